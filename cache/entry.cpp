//===- entry.cpp - One compiled kernel as a file ---------------------------===//
//
// Layout, integers little endian:
//   0   8  magic
//   8   4  format version
//   12 32  SHA-256 of every byte from 44 on
//   44  4  length of the JSON
//   48  .  JSON, then the cubin to the end of the file
//
//===----------------------------------------------------------------------===//

#include "cache/entry.h"
#include "cache/bounded_json.h"
#include "cache/llvm_compat.h"

#include "llvm/Support/raw_ostream.h"

#include <limits>

namespace sagebwd {

namespace {

constexpr llvm::StringLiteral kMagic("SAGEBWDK");
constexpr uint32_t kFormatVersion = 2;
constexpr size_t kVersionOffset = 8;
constexpr size_t kChecksumOffset = 12;
constexpr size_t kBodyOffset = 44;
constexpr size_t kJsonOffset = 48;
static_assert(kMagic.size() == kVersionOffset);

std::string little_endian(uint32_t value) {
  std::string bytes;
  for (int i = 0; i < 4; ++i)
    bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}

uint32_t read_little_endian(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i)
    value |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  return value;
}

std::string checksum_of(llvm::StringRef body) {
  llvm::SHA256 hash;
  hash.update(body);
  llvm_compat::Sha256Digest digest = llvm_compat::finish(hash);
  return std::string(digest.begin(), digest.end());
}

/// JSON strings must be UTF-8. Every field is ASCII in practice.
std::string utf8(const std::string& text) {
  return llvm::json::isUTF8(text) ? text : llvm::json::fixUTF8(text);
}

std::string print(const CacheKey& key, const CacheEntry& entry) {
  // An object prints its members sorted by name: the same entry, the same bytes.
  llvm::json::Value value = llvm::json::Object{
      {"digest", key.digest},
      {"fields", json_of_fields(key.fields)},
      {"kernel", utf8(entry.kernel_name)},
      {"arch", utf8(entry.arch)},
      {"compiler", utf8(entry.compiler)},
      {"lowest_driver", entry.lowest_driver},
      {"registers", entry.registers},
      {"spill_bytes", entry.spill_bytes},
      {"shared_bytes", entry.shared_bytes},
      {"cubin_bytes", static_cast<int64_t>(entry.cubin.size())},
  };
  std::string text;
  llvm::raw_string_ostream(text) << value;
  return text;
}

bool read(const llvm::json::Object& object, llvm::StringRef name, std::string& out) {
  auto text = text_of(object, name);
  if (text)
    out = std::move(*text);
  return text.has_value();
}

/// Counts and sizes: never negative.
bool read(const llvm::json::Object& object, llvm::StringRef name, int& out) {
  auto number = llvm_compat::to_optional<int64_t>(object.getInteger(name));
  if (!number || *number < 0 || *number > std::numeric_limits<int>::max())
    return false;
  out = static_cast<int>(*number);
  return true;
}

/// The parts of a file whose checksum is right; the JSON is not parsed yet.
struct Parts {
  llvm::StringRef json, cubin;
};

/// Why the bytes are no whole file, or empty.
const char* split(llvm::StringRef bytes, Parts& parts) {
  if (bytes.size() < kJsonOffset)
    return "it is shorter than an entry's header";
  if (bytes.substr(0, kMagic.size()) != kMagic)
    return "it is no sagebwd entry";
  if (read_little_endian(bytes.data() + kVersionOffset) != kFormatVersion)
    return "it has another format version";
  if (bytes.substr(kChecksumOffset, kBodyOffset - kChecksumOffset) !=
      checksum_of(bytes.substr(kBodyOffset)))
    return "its checksum does not match: it is truncated or corrupt";
  size_t json_size = read_little_endian(bytes.data() + kBodyOffset);
  if (json_size > bytes.size() - kJsonOffset)
    return "its JSON is longer than the file";
  parts = {bytes.substr(kJsonOffset, json_size), bytes.substr(kJsonOffset + json_size)};
  return "";
}

const char* read(const llvm::json::Object& object, llvm::StringRef cubin, CacheEntry& entry) {
  int cubin_bytes = 0;
  if (!read(object, "kernel", entry.kernel_name) || !read(object, "arch", entry.arch) ||
      !read(object, "compiler", entry.compiler) ||
      !read(object, "lowest_driver", entry.lowest_driver) ||
      !read(object, "registers", entry.registers) ||
      !read(object, "spill_bytes", entry.spill_bytes) ||
      !read(object, "shared_bytes", entry.shared_bytes) ||
      !read(object, "cubin_bytes", cubin_bytes))
    return "a field of its JSON is missing or out of range";
  if (cubin.size() != static_cast<size_t>(cubin_bytes))
    return "its cubin has another length than its JSON says";
  entry.cubin = cubin.str();
  return "";
}

/// Why the bytes are no entry, or empty. Without `key`, of whatever key.
std::string read(const std::string& bytes, const CacheKey* key, StoredEntry& stored) {
  Parts parts;
  if (const char* why = split(bytes, parts); *why)
    return why;
  // From here on the bytes are what someone meant to write.
  std::optional<llvm::json::Value> parsed = parse_bounded_json(parts.json);
  const llvm::json::Object* object = parsed ? parsed->getAsObject() : nullptr;
  if (!object)
    return "its JSON does not parse";
  std::string digest;
  if (!read(*object, "digest", digest))
    return "its JSON holds no key";
  if (key) { // found under the key's name: nothing but the digest needs to be compared
    if (digest != key->digest)
      return "it is the entry of another key";
  } else {
    auto fields = fields_of_json(object->getObject("fields"));
    if (!fields)
      return "its JSON holds no key";
    stored.key = make_key(std::move(*fields));
    if (digest != stored.key.digest)
      return "its digest is not that of its fields";
  }
  return read(*object, parts.cubin, stored.entry);
}

} // namespace

std::string serialize(const CacheKey& key, const CacheEntry& entry) {
  std::string json = print(key, entry);
  std::string body = little_endian(static_cast<uint32_t>(json.size())) + json + entry.cubin;
  return kMagic.str() + little_endian(kFormatVersion) + checksum_of(body) + body;
}

std::optional<CacheEntry> deserialize(const std::string& bytes, const CacheKey& key,
                                      std::string* why) {
  StoredEntry stored;
  std::string problem = read(bytes, &key, stored);
  if (why)
    *why = problem;
  return problem.empty() ? std::optional(std::move(stored.entry)) : std::nullopt;
}

std::optional<StoredEntry> inspect_entry(const std::string& bytes, std::string* why) {
  StoredEntry stored;
  std::string problem = read(bytes, nullptr, stored);
  if (why)
    *why = problem;
  return problem.empty() ? std::optional(std::move(stored)) : std::nullopt;
}

} // namespace sagebwd
