# ./run image: tries tools/Dockerfile. docker or podman builds it where one of them works; elsewhere
# its instructions run one after the other in a fresh root. Exit code 3: neither can be had here.

# Few kernels: what is tried is the file.
image_prebuild="--arch sm_80 --head-dim 64 --dtype bf16 --causal none"

# What shows that the image works: every kernel is there, for a user who is not root.
image_trial='[ "$(id -u)" != 0 ] && sagebwd doctor && sagebwd build '$image_prebuild

# image_steps DOCKERFILE: its instructions as a script for bash. Both stages have one file system, so
# what is copied between them lies there already.
image_steps() {
  local word rest
  echo 'set -euo pipefail
    as_user() { runuser -u "$user" -- env "HOME=$(getent passwd "$user" | cut -d: -f6)" "$@"; }'
  sed -e '/^#/d' -e ':a' -e '/\\$/{N;s/\\\n *//;ba;}' "$1" | while read -r word rest; do
    case $word in
      FROM) echo "user=root; cd /" ;;
      ARG) echo "${rest%%=*}=\${${rest%%=*}-${rest#*=}}" ;;
      ENV) echo "export $rest" ;;
      USER) echo "user=$rest" ;;
      WORKDIR) echo "cd $rest" ;;
      COPY) [[ $rest == "--from="* ]] || echo "mkdir -p ${rest#* }; cp -a /sagebwd/. ${rest#* }" ;;
      RUN) printf 'as_user env PREBUILD="${PREBUILD:-}" sh -ec %q\n' "$rest" ;;
      CMD) printf 'as_user sh -ec %q\n' "$image_trial" ;;
      "") ;;
      *) echo "echo 'tools/run/image.sh does not know $word'; exit 1" ;;
    esac
  done
}

run_image() {
  local tool
  [[ $# -eq 0 ]] || wrong_use "image takes no more words: '$1'"
  for tool in docker podman; do
    "$tool" info >"$logs/image-$tool.log" 2>&1 || continue
    step image "Building tools/Dockerfile with $tool" "$tool" build -f tools/Dockerfile \
      --build-arg "PREBUILD=$image_prebuild" -t sagebwd-image .
    step image-trial "Running it" "$tool" run --rm sagebwd-image sh -ec "$image_trial"
    printf '\n1 passed, 0 failed, 0 skipped\n'
    return
  done
  make_root debian:bookworm
  step image-clone "Cloning $(own_git log -1 --format=%h) into it" clone
  step image "The instructions of tools/Dockerfile in it" in_root "PREBUILD=$image_prebuild" \
    bash -c "$(image_steps tools/Dockerfile)"
  printf '\n1 passed, 0 failed, 0 skipped\n'
}
