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

namespace sagebwd {

namespace {

namespace endian = llvm::support::endian;

constexpr llvm::StringLiteral kMagic("SAGEBWDK");
constexpr uint32_t kFormatVersion = 2;
constexpr size_t kVersionOffset = 8;
constexpr size_t kChecksumOffset = 12;
constexpr size_t kBodyOffset = 44;
constexpr size_t kJsonOffset = 48;
static_assert(kMagic.size() == kVersionOffset);

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
  if (endian::read32le(bytes.data() + kVersionOffset) != kFormatVersion)
    return "it has another format version";
  if (bytes.substr(kChecksumOffset, kBodyOffset - kChecksumOffset) !=
      llvm_compat::sha256(bytes.substr(kBodyOffset)))
    return "its checksum does not match: it is truncated or corrupt";
  size_t json_size = endian::read32le(bytes.data() + kBodyOffset);
  if (json_size > bytes.size() - kJsonOffset)
    return "its JSON is longer than the file";
  parts = {bytes.substr(kJsonOffset, json_size), bytes.substr(kJsonOffset + json_size)};
  return "";
}

const char* read(const llvm::json::Object& object, llvm::StringRef cubin, CacheEntry& entry) {
  int cubin_bytes = 0;
  if (!read_member(object, "kernel", entry.kernel_name) ||
      !read_member(object, "arch", entry.arch) ||
      !read_member(object, "compiler", entry.compiler) ||
      !read_member(object, "lowest_driver", entry.lowest_driver) ||
      !read_member(object, "registers", entry.registers) ||
      !read_member(object, "spill_bytes", entry.spill_bytes) ||
      !read_member(object, "shared_bytes", entry.shared_bytes) ||
      !read_member(object, "cubin_bytes", cubin_bytes))
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
  if (!read_member(*object, "digest", digest))
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
  const std::string body =
      llvm_compat::bytes_of(static_cast<uint32_t>(json.size())) + json + entry.cubin;
  return kMagic.str() + llvm_compat::bytes_of(kFormatVersion) + llvm_compat::sha256(body) + body;
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
