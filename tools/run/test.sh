# ./run test.

# failures_of LOG: what failed tests of ctest said, and which they are.
failures_of() {
  awk '/\*\*\*/ && !/Skipped/ {on = 1} /^ +Start +[0-9]+:/ {on = 0} on' "$1" | head -n 200
  sed -n '/The following tests FAILED/,$p' "$1"
}

# What tests need beyond what was built; without any of it tests are skipped, and say so.
prepare_tests() {
  prepare_nvrtc_12
  prepare_nvdisasm
  try_step pip-docs "Installing what builds the site" prepare_docs
}

# ./run test [quick]: quick leaves out what compiles hundreds of kernels, for GPUs or the simulator,
# and what is built again with sanitizers.
run_test() {
  [[ $# -eq 0 || $* == quick ]] || wrong_use "test takes quick, not '$*'"
  [[ -e /proc/self ]] || fail "/proc is not mounted, and tests look at their own process there:" \
    "  mount -t proc proc /proc"
  local targets=all chosen=() site=skipped ok=0 counted=(0 0 1)
  if [[ $* == quick ]]; then
    targets=quick_tests chosen=(-LE heavy)
    export SAGEBWD_TEST_QUICK=1
  fi
  needs_nvrtc=1 meanwhile=prepare_tests prepare "$targets"
  prepare_tests && site=failed # finds what it installed meanwhile, or tries again
  rm -rf build/ctest.xml build/reports
  echo
  echo "Tests in C++ and Python (log: build/logs/ctest.log)"
  ctest --test-dir build -j "$jobs" "${chosen[@]}" --output-on-failure --output-junit ctest.xml \
    >"$logs/ctest.log" 2>&1 || { ok=1 && failures_of "$logs/ctest.log"; }
  # What passing tests say is in ctest's own log alone.
  grep -hE '^stale in known_spills|to be listed in found_sound' build/Testing/Temporary/LastTest.log | sort -u || true

  if [[ $site == skipped ]]; then
    echo "  skipped the site: pip has nothing to build it with (log: build/logs/pip-docs.log)"
  elif try_step docs "Building the site" mkdocs_of_docs build; then
    counted=(1 0 0)
  else
    ok=1 counted=(0 1 0)
    tail -n 40 "$logs/docs.log"
  fi
  "$python" tools/run/counts.py build/ctest.xml build/reports "${counted[@]}" || ok=1
  [[ $ok -eq 0 ]]
}
