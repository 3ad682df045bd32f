//===- untrusted.h - Read bytes that anybody may have written -------------===//
//
// The readers of entries, records and packs use these functions to say what is wrong; and the
// header has the start of binary files. Only .cpp files include it.
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

/// Thrown inside a reader with the reason why the bytes are not valid. Callers of a reader never
/// see it.
struct Unsound {
  std::string why;
};

inline void require(bool sound, const char* why) {
  if (!sound)
    throw Unsound{why};
}

/// The result of `read`, or nothing if it throws Unsound. `why` gets the reason, or becomes empty.
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
// Binary files are written and read as structs of bytes without padding; the integers are those of
// llvm::support.

using llvm::support::ulittle32_t;
using llvm::support::ulittle64_t;

using Magic = std::array<char, 8>;
using Sha256Digest = std::array<uint8_t, 32>;

inline Sha256Digest sha256(llvm::StringRef bytes) {
  return llvm::SHA256::hash(llvm::arrayRefFromStringRef(bytes));
}

/// The start of a file.
struct Seal {
  Magic magic;
  ulittle32_t version;
  Sha256Digest checksum; ///< of the part behind the seal
};
static_assert(sizeof(Seal) == 44);

template <typename T> std::string bytes_of(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
/// Reads a struct; the caller has checked that there are enough bytes.
template <typename T> T read_as(llvm::StringRef bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

} // namespace sagebwd
