//===- untrusted.h - Bytes that anybody may have written ------------------===//
//
// How the readers of entries, records and packs say what is wrong, and how binary files begin.
// Included by .cpp files only.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/Endian.h"
#include "llvm/Support/SHA256.h"

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace sagebwd {

/// Why bytes are not what they should be: how the parts of a reader end. No caller sees it.
struct Unsound {
  std::string why;
};

inline void require(bool sound, const char* why) {
  if (!sound)
    throw Unsound{why};
}

/// What `read` gives, or nothing where it ends as Unsound; `why` gets the reason, or becomes empty.
template <typename Read> auto if_sound(std::string* why, Read&& read) {
  std::optional<decltype(read())> result;
  std::string problem;
  try {
    result = read();
  } catch (Unsound& unsound) {
    problem = std::move(unsound.why);
  }
  if (why)
    *why = std::move(problem);
  return result;
}

//===--- Binary files ------------------------------------------------------===//
//
// They are written and read as structs of bytes, without padding: llvm::support has the integers.

using llvm::support::ulittle32_t;
using llvm::support::ulittle64_t;

using Magic = std::array<char, 8>;
using Sha256Digest = std::array<uint8_t, 32>;

inline Sha256Digest sha256(llvm::StringRef bytes) {
  return llvm::SHA256::hash(llvm::arrayRefFromStringRef(bytes));
}

/// What a file begins with.
struct Seal {
  Magic magic;
  ulittle32_t version;
  Sha256Digest checksum; ///< of what comes next
};
static_assert(sizeof(Seal) == 44);

template <typename T> std::string bytes_of(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
/// There must be as many bytes.
template <typename T> T read_as(llvm::StringRef bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

} // namespace sagebwd
