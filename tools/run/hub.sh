# ./run hub: sagebwd as a kernel for the Hugging Face Hub, in build/hub (docs/use/hub.md).

run_hub() {
  [[ $# -eq 0 ]] || wrong_use "hub takes no more words: '$1'"
  configure_library
  step hub-library "Building the library for the Hub" \
    cmake --build build/library -j "$jobs" --target sagebwd_hub
  python3 hub/write.py build/library/hub-library/libsagebwd.so build/hub
}
