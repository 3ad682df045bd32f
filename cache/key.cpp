//===- key.cpp - The name of a cached thing --------------------------------===//

#include "cache/key.h"
#include "cache/untrusted.h"

#include <algorithm>

namespace sagebwd {

namespace {

/// A length before each string keeps ("ab", "c") and ("a", "bc") apart.
void update(llvm::SHA256& hash, const std::string& text) {
  hash.update(llvm::StringRef(bytes_of(ulittle64_t(text.size()))));
  hash.update(llvm::StringRef(text));
}

} // namespace

std::string CacheKey::operator[](const std::string& label) const {
  for (const auto& [name, value] : fields)
    if (name == label)
      return value;
  return "";
}

CacheKey make_key(std::vector<std::pair<std::string, std::string>> fields) {
  std::sort(fields.begin(), fields.end());
  llvm::SHA256 hash;
  for (const auto& [label, value] : fields) {
    update(hash, label);
    update(hash, value);
  }
  return {std::move(fields), llvm::toHex(llvm_compat::finish(hash), /*LowerCase=*/true)};
}

std::string sha256_hex(const std::string& text) {
  return llvm::toHex(sha256(text), /*LowerCase=*/true);
}

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

} // namespace sagebwd
