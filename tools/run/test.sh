# ./run test.

# counts FILE: "passed failed skipped" of a JUnit report's first test suite.
counts() {
  local line
  line=$(tr '\n\t' '  ' <"$1" | grep -o '<testsuite [^>]*>' | head -n 1)
  attribute() { sed -n "s/.* $1=\"\([0-9]*\)\".*/\1/p" <<<"$line"; }
  local all failed skipped
  all=$(attribute tests)
  failed=$(($(attribute failures) + $(attribute errors | grep . || echo 0)))
  skipped=$(($(attribute skipped) + $(attribute disabled | grep . || echo 0)))
  echo $((all - failed - skipped)) "$failed" "$skipped"
}

# failures_of LOG: what failed tests of ctest said, and which they are.
failures_of() {
  awk '/\*\*\*/ && !/Skipped/ {on = 1} /^ +Start +[0-9]+:/ {on = 0} on' "$1" | head -n 200
  sed -n '/% tests passed/,$p' "$1"
}

# What failed, once more: last, where one looks first.
failed_names() {
  sed -nE 's/.* Test +#[0-9]+: ([^ ]+) .*\*\*\*(Failed|Timeout|Exception.*) .*/  \2 \1/p' "$logs/ctest.log"
  grep -E '^(FAILED|ERROR) ' "$logs/pytest.log" | sed 's/^/  /' || true
}

run_test() {
  [[ -e /proc/self ]] || fail "/proc is not mounted, and tests look at their own process there:" \
    "  mount -t proc proc /proc"
  needs_nvrtc=1 prepare all
  prepare_nvrtc_12
  prepare_nvdisasm
  local site=skipped
  try_step pip-docs "Installing what builds the site" prepare_docs && site=failed
  local ok=0 report passed=0 failed=0 skipped=0 p f s
  rm -f build/ctest.xml build/pytest.xml
  echo
  echo "C++ tests (log: build/logs/ctest.log)"
  ctest --test-dir build -j "$jobs" --output-on-failure --output-junit ctest.xml \
    >"$logs/ctest.log" 2>&1 || { ok=1 && failures_of "$logs/ctest.log"; }
  grep -E 'Not Run|Skipped' "$logs/ctest.log" |
    sed -nE 's/.*Test +#[0-9]+: ([^ ]+) .*/  skipped \1/p' || true
  echo "Python tests (log: build/logs/pytest.log)"
  "$python" -m pytest -q -p no:cacheprovider --junitxml build/pytest.xml >"$logs/pytest.log" 2>&1 ||
    { ok=1 && tail -n 40 "$logs/pytest.log"; }
  grep -E '^SKIPPED' "$logs/pytest.log" | sed 's/^/  /' || true

  for report in build/ctest.xml build/pytest.xml; do
    if [[ -s $report ]]; then
      read -r p f s <<<"$(counts "$report")"
    else
      ok=1 p=0 f=1 s=0
      echo "no $report: its run broke off"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  done
  if [[ $site == skipped ]]; then
    skipped=$((skipped + 1))
    echo "  skipped the site: pip has nothing to build it with (log: build/logs/pip-docs.log)"
  elif try_step docs "Building the site" mkdocs_of_docs build; then
    passed=$((passed + 1))
  else
    ok=1 failed=$((failed + 1))
    tail -n 40 "$logs/docs.log"
  fi
  echo
  if [[ $ok -ne 0 ]]; then failed_names; fi
  echo "$passed passed, $failed failed, $skipped skipped"
  if [[ $ok -ne 0 && $failed -eq 0 ]]; then echo "A run broke off: see $logs"; fi
  [[ $failed -eq 0 && $ok -eq 0 ]]
}
