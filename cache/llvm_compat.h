//===- llvm_compat.h - LLVM 14 to 19, as one -------------------------------===//
//
// The only place that may ask for LLVM's version. Included by .cpp files only.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/Support/Endian.h"
#include "llvm/Support/SHA256.h"

#include <array>
#include <cstring>

#if LLVM_VERSION_MAJOR < 14 || LLVM_VERSION_MAJOR > 19
#error "LLVM 14 to 19 are supported"
#endif

namespace sagebwd::llvm_compat {

using Sha256Digest = std::array<uint8_t, 32>;

/// `SHA256::final()` returns a StringRef up to LLVM 14 and an array from 15 on.
inline Sha256Digest finish(llvm::SHA256& hash) {
  auto bytes = hash.final();
  static_assert(sizeof(*bytes.data()) == 1);
  Sha256Digest digest;
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

inline Sha256Digest sha256(llvm::StringRef bytes) {
  llvm::SHA256 hash;
  hash.update(bytes);
  return finish(hash);
}

} // namespace sagebwd::llvm_compat
