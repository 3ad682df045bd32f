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

#include "llvm/Support/FormatVariadic.h"

namespace sagebwd {

/// What of an entry is JSON, beside its key and its cubin's length.
template <Either<CacheEntry> Self, typename Visit> void visit_members(Self& entry, Visit&& visit) {
  visit("kernel", entry.kernel_name);
  visit("arch", entry.arch);
  visit("compiler", entry.compiler);
  visit("lowest_driver", entry.lowest_driver);
  visit("registers", entry.registers);
  visit("spill_bytes", entry.spill_bytes);
  visit("shared_bytes", entry.shared_bytes);
}

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
  llvm::json::Object object = object_of(entry);
  object["digest"] = key.digest;
  object["fields"] = json_of_fields(key.fields);
  object["cubin_bytes"] = as_json(entry.cubin.size());
  return llvm::formatv("{0}", llvm::json::Value(std::move(object)));
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
  size_t cubin_bytes = 0;
  if (!read_object(&object, entry, kAnyNumber) ||
      !read_member(object, "cubin_bytes", cubin_bytes) ||
      std::min({entry.lowest_driver, entry.registers, entry.spill_bytes, entry.shared_bytes}) < 0)
    return "a field of its JSON is missing or out of range";
  if (cubin.size() != cubin_bytes)
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

std::optional<StoredEntry> read(const std::string& bytes, const CacheKey* key, std::string* why) {
  StoredEntry stored;
  const std::string problem = read(bytes, key, stored);
  if (why)
    *why = problem;
  return problem.empty() ? std::optional(std::move(stored)) : std::nullopt;
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
  std::optional<StoredEntry> stored = read(bytes, &key, why);
  return stored ? std::optional(std::move(stored->entry)) : std::nullopt;
}

std::optional<StoredEntry> inspect_entry(const std::string& bytes, std::string* why) {
  return read(bytes, nullptr, why);
}

} // namespace sagebwd
