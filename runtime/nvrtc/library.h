//===- library.h - Finding libnvrtc -----------------------------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd::nvrtc {

/// A place to look for the library.
struct Candidate {
  enum Kind {
    loaded, ///< only if the process has it already; `name` is a soname
    file,   ///< `name` is a file
    search, ///< by the dynamic linker; `name` is a soname
  };
  Kind kind;
  std::string name;
  std::string origin; ///< why it is looked for there, for messages
};

/// Every place, in order. A file or folder that is given, as SAGEBWD_NVRTC does, leaves no other.
std::vector<Candidate> candidates(const std::string& given);
/// A library file that this process knows of: it comes behind a libnvrtc that is loaded, and before
/// all others. Empty: none. Thread-safe.
void suggest(const std::string& file, const std::string& origin);

struct OpenLibrary {
  void* handle = nullptr;
  std::string path; ///< of the file, symbolic links resolved
};
/// The first that opens, with the libnvrtc-builtins beside it. LibraryError lists all.
OpenLibrary open_first(const std::vector<Candidate>&);

} // namespace sagebwd::nvrtc
