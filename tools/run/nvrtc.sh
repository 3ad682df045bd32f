# NVRTC, which compiles the kernels: one version, and ./run nvrtc, which tries another.

# nvrtc_pin EXTRA: the package and version that pyproject.toml's extra cu13 or cu12 names. The records
# of tests/templates are of these.
nvrtc_pin() { sed -nE "s/^$1 = \[\"(nvidia-cuda-nvrtc[^\"]*)\"\]$/\1/p" pyproject.toml; }

# A cubin of NVRTC 13 does not load on a driver for CUDA 12.
nvrtc_package() {
  if command -v nvidia-smi >/dev/null && nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 12'; then
    nvrtc_pin cu12
  else
    nvrtc_pin cu13
  fi
}

# nvrtc_in FOLDER: the library where pip has installed its package in a folder.
nvrtc_in() {
  compgen -G "$1/nvidia/cu13/lib/libnvrtc.so.13" || compgen -G "$1/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
}

# find_other_nvrtc: a toolkit's, for machines where pip reaches nothing. 12.8 is the first that knows
# sm_120.
find_other_nvrtc() {
  local path version
  for path in ${CUDA_HOME:+"$CUDA_HOME"/lib64/libnvrtc.so.1[23]} \
    ${CUDA_PATH:+"$CUDA_PATH"/lib64/libnvrtc.so.1[23]} \
    /usr/local/cuda/lib64/libnvrtc.so.1[23] /usr/lib/*-linux-gnu/libnvrtc.so.1[23]; do
    [[ -f $path ]] || continue
    version=$(basename "$(readlink -f "$path")")
    case ${version#libnvrtc.so.} in
      12.[0-7].* | 12.[0-7]) continue ;;
      *) echo "$path" && return ;;
    esac
  done
  return 1
}

# nvrtc_of PYTHON: the library among its packages; PyTorch brings one.
nvrtc_of() {
  "$1" - <<'PYTHON'
import glob, site, sys
for folder in site.getsitepackages() + [site.getusersitepackages()] + sys.path:
    found = glob.glob(folder + "/nvidia/cu13/lib/libnvrtc.so.13")
    found += glob.glob(folder + "/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    if found:
        sys.exit(print(found[0]))
sys.exit(1)
PYTHON
}

# install_nvrtc REQUIREMENT FOLDER: only that package.
install_nvrtc() {
  pip_install --no-deps --upgrade --target "$2" "$1" && nvrtc_in "$2" >/dev/null
}

# Programs in build/bin look among the packages of build/venv, without any variable.
link_nvrtc() {
  local packages
  for packages in build/venv/lib/python3*/site-packages; do
    [[ ! -d $packages || -e $packages/nvidia && ! -L $packages/nvidia ]] ||
      ln -sfn "$1/nvidia" "$packages/nvidia"
  done
}

# Whether the caller's SAGEBWD_NVRTC is there, before anything is installed and built. A name without
# folders is the dynamic linker's to find.
check_nvrtc() {
  [[ ${SAGEBWD_NVRTC:-} != */* || -e $SAGEBWD_NVRTC ]] ||
    fail "SAGEBWD_NVRTC is '$SAGEBWD_NVRTC', and there is no such file. Name a libnvrtc.so.13, or" \
      "leave it unset, for pip's."
}

# Exports SAGEBWD_NVRTC: what the caller set, or the version that is pinned, in a folder of its own.
# Where pip reaches nothing, a toolkit's or PyTorch's will do, and one line says so: tests of spills
# may then fail. Commands that only build need none.
prepare_nvrtc() {
  [[ -z ${SAGEBWD_NVRTC:-} ]] || return 0
  local wanted folder other
  wanted=$(nvrtc_package)
  folder=$root/build/nvrtc/${wanted##*==}
  if nvrtc_in "$folder" >/dev/null ||
    try_step pip-nvrtc "Installing ${wanted/==/ }" install_nvrtc "$wanted" "$folder"; then
    SAGEBWD_NVRTC=$(nvrtc_in "$folder")
    link_nvrtc "$folder"
  elif other=$(find_other_nvrtc) || other=$(nvrtc_of "$python") || other=$(nvrtc_of python3); then
    echo "(using $other; tests of spills and registers are recorded for $wanted)"
    SAGEBWD_NVRTC=$other
  else
    local message=(
      "pip cannot install NVRTC, which compiles the kernels (log: $logs/pip-nvrtc.log)."
      "Install a CUDA toolkit 12.8 or newer, or set SAGEBWD_NVRTC to its libnvrtc.so.")
    [[ -z ${needs_nvrtc:-} ]] || fail "${message[@]}"
    printf '%s\n' "${message[@]}"
    return 0
  fi
  export SAGEBWD_NVRTC
}

# One test shares a cache directory between NVRTC 12 and 13. Without NVRTC 12 it is skipped, and says
# so.
prepare_nvrtc_12() {
  [[ -z ${SAGEBWD_TEST_NVRTC12:-} ]] || return 0
  local wanted folder
  wanted=$(nvrtc_pin cu12)
  folder=$root/build/nvrtc/${wanted##*==}
  nvrtc_in "$folder" >/dev/null ||
    try_step pip-nvrtc12 "Installing ${wanted/==/ } for one test" install_nvrtc "$wanted" "$folder" ||
    return 0
  SAGEBWD_TEST_NVRTC12=$(nvrtc_in "$folder")
  export SAGEBWD_TEST_NVRTC12
}

# --- ./run nvrtc VERSION --------------------------------------------------------------------------

# reported_by LIBRARY REPORT: compiles what the tests in templates/ compile, and writes what ptxas said
# of each kernel.
reported_by() {
  rm -f "$2"
  SAGEBWD_NVRTC=$1 SAGEBWD_COMPILE_REPORT=$2 ctest --test-dir build -j "$jobs" -L templates \
    --output-on-failure
}

# record_for LIBRARY: lists what passes with it in found_sound.txt, in one process, as it writes.
record_for() {
  SAGEBWD_NVRTC=$1 SAGEBWD_UPDATE_GOLDEN=1 build/bin/templates_tests &&
    SAGEBWD_NVRTC=$1 SAGEBWD_UPDATE_GOLDEN=1 "$python" -m pytest -q -p no:cacheprovider \
      tests/python/test_instructions.py
}

# ./run nvrtc VERSION [--record]: whether that NVRTC can take the place of the one that is pinned.
run_nvrtc() {
  local record='' version='' word extra=cu13 pinned package tried status=0
  for word; do
    case $word in
      --record) record=1 ;;
      [0-9]*.[0-9]*.[0-9]*)
        [[ -z $version ]] || wrong_use "nvrtc takes one version, not '$version' and '$word'"
        version=$word
        ;;
      *) wrong_use "nvrtc takes a version of NVRTC, such as 13.0.88, and --record, not '$word'" ;;
    esac
  done
  [[ -n $version ]] || wrong_use "nvrtc takes a version of NVRTC, such as 13.0.88"
  [[ $version != 12.* ]] || extra=cu12
  pinned=$(nvrtc_pin $extra) package=${pinned%%==*}
  needs_nvrtc=1 prepare templates_tests _core
  prepare_nvdisasm
  tried=$root/build/nvrtc/$version
  nvrtc_in "$tried" >/dev/null ||
    step pip-nvrtc "Installing $package $version" install_nvrtc "$package==$version" "$tried"
  tried=$(nvrtc_in "$tried")
  nvrtc_in "$root/build/nvrtc/${pinned##*==}" >/dev/null || step pip-pinned "Installing ${pinned/==/ }" \
    install_nvrtc "$pinned" "$root/build/nvrtc/${pinned##*==}"
  echo "Two times some 1,500 kernels are compiled, unless build/test-kernels has them: about 8 minutes each"
  echo "on two cores."
  watch nvrtc-pinned "Compiling with $pinned" reported_by \
    "$(nvrtc_in "$root/build/nvrtc/${pinned##*==}")" "$logs/nvrtc-pinned.tsv" || status=1
  # What spills without being known fails there, and is listed below.
  watch nvrtc-tried "Compiling with $package==$version" \
    reported_by "$tried" "$logs/nvrtc-tried.tsv" || true
  "$python" tools/run/compare_nvrtc.py "$logs/nvrtc-pinned.tsv" "$logs/nvrtc-tried.tsv" "$version" ||
    status=1
  if [[ -n $record ]]; then
    try_step nvrtc-record "Recording it in found_sound.txt" record_for "$tried" ||
      { status=1 && failures_of "$logs/nvrtc-record.log"; }
    own_git --no-pager diff --stat -- tests/templates
  fi
  echo "To pin it, name it in pyproject.toml in place of $pinned. Then ./run test."
  return $status
}
