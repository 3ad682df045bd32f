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
#include "cache/llvm_compat.h"

#include "llvm/Support/JSON.h"
#include "llvm/Support/raw_ostream.h"

namespace sagebwd {

namespace {

constexpr llvm::StringLiteral kMagic("SAGEBWDK");
constexpr uint32_t kFormatVersion = 1;
constexpr size_t kVersionOffset = 8;
constexpr size_t kChecksumOffset = 12;
constexpr size_t kBodyOffset = 44;
constexpr size_t kJsonOffset = 48;
static_assert(kMagic.size() == kVersionOffset);

/// Longer key fields (the source) are shown by their digest: the file need not carry them twice.
constexpr size_t kLongestClearField = 1024;

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

llvm::json::Object describe(const CacheKey& key) {
  llvm::json::Object fields;
  for (const auto& [label, value] : key.fields)
    fields[utf8(label)] =
        value.size() <= kLongestClearField ? utf8(value) : "sha256:" + sha256_hex(value);
  return llvm::json::Object{{"digest", key.digest}, {"fields", std::move(fields)}};
}

std::string print(const CacheKey& key, const CacheEntry& entry) {
  // An object prints its members sorted by name: the same entry, the same bytes.
  llvm::json::Value value = llvm::json::Object{
      {"key", describe(key)},
      {"kernel", utf8(entry.kernel_name)},
      {"arch", utf8(entry.arch)},
      {"compiler", utf8(entry.compiler)},
      {"source_sha256", utf8(entry.source_digest)},
      {"options", utf8(entry.options)},
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
  auto text = llvm_compat::to_optional<llvm::StringRef>(object.getString(name));
  if (text)
    out = text->str();
  return text.has_value();
}

bool read(const llvm::json::Object& object, llvm::StringRef name, int& out) {
  auto number = llvm_compat::to_optional<int64_t>(object.getInteger(name));
  if (number)
    out = static_cast<int>(*number);
  return number.has_value();
}

} // namespace

std::string serialize(const CacheKey& key, const CacheEntry& entry) {
  std::string json = print(key, entry);
  std::string body = little_endian(static_cast<uint32_t>(json.size())) + json + entry.cubin;
  return kMagic.str() + little_endian(kFormatVersion) + checksum_of(body) + body;
}

std::optional<CacheEntry> deserialize(const std::string& bytes, const CacheKey& key,
                                      std::string* why) {
  auto reject = [&](const char* reason) -> std::optional<CacheEntry> {
    if (why)
      *why = reason;
    return std::nullopt;
  };
  if (bytes.size() < kJsonOffset)
    return reject("it is shorter than an entry's header");
  llvm::StringRef all(bytes);
  if (all.substr(0, kMagic.size()) != kMagic)
    return reject("it is no sagebwd entry");
  if (read_little_endian(bytes.data() + kVersionOffset) != kFormatVersion)
    return reject("it has another format version");
  llvm::StringRef checksum = all.substr(kChecksumOffset, kBodyOffset - kChecksumOffset);
  if (checksum != checksum_of(all.substr(kBodyOffset)))
    return reject("its checksum does not match: it is truncated or corrupt");

  // From here on the bytes are what some version of this library wrote.
  size_t json_size = read_little_endian(bytes.data() + kBodyOffset);
  if (json_size > bytes.size() - kJsonOffset)
    return reject("its JSON is longer than the file");
  llvm::Expected<llvm::json::Value> parsed = llvm::json::parse(all.substr(kJsonOffset, json_size));
  if (!parsed) {
    llvm::consumeError(parsed.takeError());
    return reject("its JSON does not parse");
  }
  const llvm::json::Object* object = parsed->getAsObject();
  const llvm::json::Object* stored_key = object ? object->getObject("key") : nullptr;
  std::string digest;
  if (!stored_key || !read(*stored_key, "digest", digest))
    return reject("its JSON holds no key");
  if (digest != key.digest)
    return reject("it is the entry of another key");

  CacheEntry entry;
  int cubin_bytes = 0;
  if (!read(*object, "kernel", entry.kernel_name) || !read(*object, "arch", entry.arch) ||
      !read(*object, "compiler", entry.compiler) ||
      !read(*object, "source_sha256", entry.source_digest) ||
      !read(*object, "options", entry.options) || !read(*object, "registers", entry.registers) ||
      !read(*object, "spill_bytes", entry.spill_bytes) ||
      !read(*object, "shared_bytes", entry.shared_bytes) ||
      !read(*object, "cubin_bytes", cubin_bytes))
    return reject("its JSON lacks a field");
  entry.cubin = bytes.substr(kJsonOffset + json_size);
  if (entry.cubin.size() != static_cast<size_t>(cubin_bytes))
    return reject("its cubin has another length than its JSON says");
  return entry;
}

} // namespace sagebwd
