# ./run test.

# failures_of LOG: what failed tests of ctest said, and which they are. All of the log is read, as a
# command whose output nobody reads ends with an error.
failures_of() {
  awk '/\*\*\*/ && !/Skipped/ {on = 1} /^ +Start +[0-9]+:/ {on = 0} on && n++ < 200' "$1"
  sed -n '/The following tests FAILED/,$p' "$1"
}

# What tests need beyond what was built; without any of it tests are skipped, and say so.
prepare_tests() {
  prepare_nvrtc_12
  prepare_nvdisasm
  try_step pip-docs "Installing what builds the site" prepare_docs
}

# Without a GPU each of its tests is skipped, by name: one process says so, and not a thousand.
skip_gpu_tests() {
  build/bin/gpu_tests --gtest_output=xml:build/reports/alone/gpu.xml >"$logs/gpu-tests.log" 2>&1
}

prepare_all_tests() {
  [[ -z $with_torch ]] || prepare_torch
  prepare_tests
}

# ./run test [quick] [--with-torch]: quick leaves out what compiles hundreds of kernels, for GPUs or
# the simulator, and what is built again with sanitizers. --with-torch also runs the tests of the
# package with PyTorch, in an environment of their own.
run_test() {
  local word targets=all left_out=() site=skipped ok=0 counted=(0 0 1)
  with_torch=
  for word; do
    case $word in
      quick)
        targets=quick_tests left_out+=(heavy)
        export SAGEBWD_TEST_QUICK=1
        ;;
      --with-torch) with_torch=1 ;;
      *) wrong_use "test takes quick and --with-torch, not '$word'" ;;
    esac
  done
  [[ -n $with_torch ]] || left_out+=(torch)
  [[ -e /proc/self ]] || fail "/proc is not mounted, and tests look at their own process there:" \
    "  mount -t proc proc /proc"
  needs_nvrtc=1 meanwhile=prepare_all_tests prepare "$targets"
  prepare_all_tests && site=failed # finds what it installed meanwhile, or tries again
  rm -rf build/ctest.xml build/reports
  if ! build/bin/sagebwd doctor | grep -q '^gpu 0'; then
    left_out+=('^gpu$' gpu_python) # whose tests Python.simulated names, too
    skip_gpu_tests || { ok=1 && tail -n 40 "$logs/gpu-tests.log"; }
  fi
  # One more than there are cores: many of them wait for others, for locks or for signals.
  watch ctest "Tests in C++ and Python" ctest --test-dir build -j "${JOBS:-$((jobs + 1))}" \
    ${left_out:+-LE "$(IFS='|' && echo "${left_out[*]}")"} --output-on-failure \
    --output-junit ctest.xml || { ok=1 && failures_of "$logs/ctest.log"; }
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
