# ./run fresh [SYSTEM [COMMAND...]]: tries what a newcomer gets. It makes a minimal root of a
# distribution, clones the last commit into it, and runs ./run demo and ./run test there, or the
# COMMANDs. Exit code 3: no such root can be made here, and nothing was tried.

# log_of COMMAND: the name of its log, with all of its letters if a file's name can have them.
log_of() {
  local letters
  letters=$(tr -cd '[:alnum:]' <<<"$1")
  [[ ${#letters} -le 100 ]] || letters=${letters:0:80}-$(cksum <<<"$1" | cut -d ' ' -f 1)
  echo "fresh-$letters"
}

fresh_systems="debian:bookworm ubuntu:jammy ubuntu:noble"

no_root_here() {
  printf '%s\n' "No fresh $system here: $1" "${@:2}" >&2
  exit 3
}

# Mounts and processes are in a namespace of their own, invisible from outside. The namespace ends
# with this script, however that ends.
namespace=
in_namespace() {
  setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child "$@" &
  namespace=$!
  wait $namespace
}

# A signal may have come in the midst of work there.
remove_tree() {
  [[ -z $namespace ]] || { kill -KILL $namespace && wait $namespace; } 2>/dev/null || true
  rm -rf "$tree" || { sleep 1 && rm -rf "$tree"; }
}

# in_root COMMAND...: runs it with the settings that the network requires, and nothing else of this
# machine.
in_root() {
  in_namespace bash -euc '
    tree=$1 count=$2
    mount -t proc proc "$tree/proc"
    mount --rbind /dev "$tree/dev"
    for folder in "${@:3:count}"; do
      mkdir -p "$tree$folder"
      mount --bind "$folder" "$tree$folder"
      mount -o remount,bind,ro "$tree$folder"
    done
    exec chroot "$tree" env -i "${@:3 + count}"
  ' in_root "$tree" ${#folders[@]} "${folders[@]}" "${settings[@]}" "$@"
}

# --- what the network here asks for ---------------------------------------------------------------

# lend PATH...: a copy of a file, a read-only view of a folder, at the same place in the root.
lend() {
  local path
  for path; do
    if [[ $path == /* && -f $path ]]; then
      mkdir -p "$tree$(dirname "$path")"
      cp -L "$path" "$tree$path"
    elif [[ $path == /* && -d $path ]]; then
      folders+=("$path")
    fi
  done
}

# paths_in FILE: the absolute paths that are values in a configuration.
paths_in() { grep -oE '[="[:space:]]/[^"; ]+' "$1" | sed 's/^.//' || true; }

# Sets settings and folders: proxies, certificates, where pip and apt look.
take_settings_along() {
  local name file
  settings=(HOME="$HOME" LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin ${JOBS:+"JOBS=$JOBS"})
  folders=()
  mkdir -p "$tree$HOME"
  for name in $(compgen -e); do
    case ${name,,} in
      *_proxy | pip_* | ssl_cert_file | *_ca_bundle)
        settings+=("$name=${!name}")
        lend "${!name}"
        ;;
    esac
  done
  for file in "${PIP_CONFIG_FILE:-}" /etc/pip.conf /etc/xdg/pip/pip.conf ~/.config/pip/pip.conf \
    ~/.pip/pip.conf; do
    [[ -f $file ]] || continue
    lend "$file"
    while read -r name; do lend "$name"; done < <(paths_in "$file")
  done
  lend /etc/hosts /etc/resolv.conf /usr/local/share/ca-certificates/*
  # Nobody needs this root after a power failure: dpkg need not wait for the disk at each file.
  echo force-unsafe-io >"$tree/etc/dpkg/dpkg.cfg.d/unsafe-io"
  file=$tree/etc/apt/apt.conf.d/00-of-the-machine-outside
  apt_settings >"$file"
  while read -r name; do lend "$name"; done < <(paths_in "$file")
}

# The archive of the family, as mmdebstrap knows it: its first is Debian's.
public_archive() {
  local wanted='.*'
  if [[ $family == ubuntu ]]; then wanted='.*ubuntu.*'; fi
  sed -nE "s/^ *(my )?\\\$mirror *= '($wanted)';/\\2/p" "$(command -v mmdebstrap)" | head -n 1
}

# What this machine's apt knows of its network.
apt_settings() { apt-config dump | grep -E '^Acquire::(https?::|Retries|Check-)' || true; }

# Prints the lines of sources.list: the archive asked for, or this machine's, or the public one.
apt_sources() {
  local components=main mirror=${SAGEBWD_FRESH_MIRROR:-} here=
  if [[ $family == ubuntu ]]; then components="main universe"; fi
  if [[ -z $mirror ]]; then
    here=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Created-By: Packages' |
      sort -u | sed -nE "s/ ($suite(-updates|-security)?)$/ \1 $components/p")
    mirror=$(public_archive)
  fi
  if [[ -z $here ]]; then
    here=$(printf '%s\n' "$mirror "{"$suite","$suite-updates"}" $components")
  fi
  sed 's/^/deb /' <<<"$here"
}

# --- the root -------------------------------------------------------------------------------------

# By one run of apt, in half of the time that debootstrap takes, which fetches packages one by one.
# Ubuntu does not count apt itself among what every system needs.
make_minimal_root() {
  local lines
  mapfile -t lines <<<"$sources"
  [[ -f $keyring ]] || lines=("${lines[@]/#deb /deb [trusted=yes] }")
  apt_settings >"$base.apt"
  in_namespace mmdebstrap --mode=root --variant=minbase --include=apt --format=tar \
    --aptopt="$base.apt" "$suite" "$base.part" "${lines[@]}" && mv "$base.part" "$base"
}

# The checkout may belong to another user than root.
own_git() { git -c safe.directory='*' "$@"; }

clone() {
  own_git clone --quiet --depth 1 --upload-pack "git -c safe.directory='*' upload-pack" \
    "file://$root" "$tree/sagebwd"
}

check_that_roots_can_be_had() {
  [[ $EUID -eq 0 ]] || no_root_here "chroot and mount are root's: sudo ./run fresh $system"
  own_git rev-parse --quiet --verify HEAD >/dev/null 2>&1 ||
    no_root_here "git is missing, or this folder is no clone of its repository"
  in_namespace true 2>"$logs/fresh-namespace.log" ||
    no_root_here "this sandbox forbids namespaces: $(tail -n 1 "$logs/fresh-namespace.log")"
  command -v apt-get >/dev/null || no_root_here "this machine has no apt-get"
  local lock
  exec {lock}>build/fresh/lock
  flock "$lock" # of two systems at the same time one installs it
  if ! command -v mmdebstrap >/dev/null; then
    { try_step fresh-apt-update "Reading the package lists" apt-get update &&
      try_step fresh-apt-install "Installing mmdebstrap" apt_install mmdebstrap; } ||
      no_root_here "mmdebstrap cannot be installed (log: $logs/fresh-apt-*.log)"
  fi
  exec {lock}>&-
}

# make_root SYSTEM: in_root runs commands there until this shell ends.
make_root() {
  local system=$1 family=${1%:*} suite=${1#*:} sources keyring lock
  mkdir -p build/fresh
  check_that_roots_can_be_had
  exec {lock}>"build/fresh/$suite.lock"
  flock --nonblock "$lock" || fail "Another ./run fresh $system is at work in build/fresh."
  sources=$(apt_sources)
  tree=$root/build/fresh/$suite base=$root/build/fresh/$suite.tar
  trap remove_tree EXIT
  rm -rf "$tree" && mkdir -p "$tree"
  keyring=/usr/share/keyrings/$family-archive-keyring.gpg
  if [[ ! -f $base ]]; then
    [[ -f $keyring ]] ||
      echo "(its packages' signatures are not checked: there is no $family-archive-keyring here)"
    try_step fresh-root "Making a minimal $system" make_minimal_root ||
      no_root_here "$(tail -n 1 "$logs/fresh-root.log")" "The whole log is $logs/fresh-root.log"
  fi
  step fresh-unpack "Unpacking a fresh $system" tar -C "$tree" -xf "$base"
  printf '%s\n' "$sources" >"$tree/etc/apt/sources.list"
  take_settings_along
  in_root true 2>"$logs/fresh-mount.log" ||
    no_root_here "this sandbox forbids mount or chroot: $(tail -n 1 "$logs/fresh-mount.log")"
}

# show_and_log LOG COMMAND...: its output is seen as it comes, indented. The command runs in this shell,
# not in a pipeline, so that signals end it.
show_and_log() {
  local shown reader status=0
  exec {shown}> >(tee "$1" | sed -u 's/^/  /')
  reader=$!
  "${@:2}" >&$shown 2>&1 || status=$?
  exec {shown}>&-
  wait $reader
  return $status
}

run_fresh() {
  local system=${1:-debian:bookworm} commands=("${@:2}") command log begun passed=0 failed=0
  [[ " $fresh_systems " == *" $system "* ]] ||
    wrong_use "there is no fresh '$system'; there is $fresh_systems"
  local logs=$logs/${system#*:} # two systems may be tried at the same time
  mkdir -p "$logs"
  [[ ${#commands[@]} -gt 0 ]] || commands=("./run demo" "./run test")
  make_root "$system"
  step fresh-clone "Cloning $(own_git log -1 --format=%h) into it" clone
  own_git diff --quiet HEAD || echo "(it lacks what is not committed)"
  for command in "${commands[@]}"; do
    log=$(log_of "$command") begun=$SECONDS
    echo "$command in it"
    if show_and_log "$logs/$log.log" in_root bash -c "cd /sagebwd && $command"; then
      passed=$((passed + 1))
      printf '%-46s %4d s\n' "$command" $((SECONDS - begun))
    else
      failed=$((failed + 1))
      rm -rf "${logs:?}/$log"
      cp -r "$tree/sagebwd/build/logs" "$logs/$log" 2>/dev/null || mkdir -p "$logs/$log"
      echo "$command failed in a fresh $system: $logs/$log.log, and its own logs in $logs/$log"
    fi
  done
  echo
  echo "$passed passed, $failed failed, 0 skipped"
  [[ $failed -eq 0 ]]
}
