//===- key.cpp - The key of a cached kernel or record ---------------------===//

#include "cache/key.h"
#include "cache/untrusted.h"

#include <algorithm>

namespace sagebwd {

std::string CacheKey::operator[](const std::string& label) const {
  for (const auto& [name, value] : fields)
    if (name == label)
      return value;
  return "";
}

CacheKey make_key(std::vector<std::pair<std::string, std::string>> fields) {
  std::sort(fields.begin(), fields.end());
  // The length before each string distinguishes ("ab", "c") from ("a", "bc").
  std::string bytes;
  for (const auto& [label, value] : fields)
    for (const std::string& text : {label, value})
      bytes += bytes_of(ulittle64_t(text.size())) + text;
  return {std::move(fields), sha256_hex(bytes)};
}

std::string sha256_hex(const std::string& text) {
  return llvm::toHex(sha256(text), /*LowerCase=*/true);
}

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

} // namespace sagebwd
