//===- library.h - Find libnvrtc ------------------------------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd::nvrtc {

/// A place in which libnvrtc may be.
struct Candidate {
  enum Kind {
    loaded, ///< only if the process has loaded it already; `name` is a soname
    file,   ///< `name` is a file
    search, ///< the dynamic linker looks for it; `name` is a soname
  };
  Kind kind;
  std::string name;
  std::string origin; ///< why libnvrtc may be in this place, for messages
};

/// Every place, in the order of the search. If a file or folder is given (SAGEBWD_NVRTC), it is the
/// only place.
std::vector<Candidate> candidates(const std::string& given);
/// Suggests a library file. This place comes after a libnvrtc that is loaded already, and before
/// all other places. An empty name removes the suggestion. Thread-safe.
void suggest(const std::string& file, const std::string& origin);

struct OpenLibrary {
  void* handle = nullptr;
  std::string path; ///< the file with symbolic links resolved
};
/// Opens the first candidate that can be opened, with the libnvrtc-builtins beside it. If there is
/// none, raises LibraryError, which lists all candidates.
OpenLibrary open_first(const std::vector<Candidate>&);

} // namespace sagebwd::nvrtc
