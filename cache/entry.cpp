//===- entry.cpp - One compiled kernel as a file --------------------------===//
//
// The format of the file: a Seal, the length of the JSON (4 bytes, little endian), the JSON, then
// the cubin up to the end.
//
//===----------------------------------------------------------------------===//

#include "cache/entry.h"
#include "cache/bounded_json.h"
#include "cache/untrusted.h"

#include "llvm/Support/FormatVariadic.h"

namespace sagebwd {

/// The members of an entry that are in the JSON, in addition to the key and the length of the
/// cubin.
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

constexpr Magic kEntryMagic = {'S', 'A', 'G', 'E', 'B', 'W', 'D', 'K'};
constexpr uint32_t kEntryFormat = 2;
constexpr size_t kJsonOffset = sizeof(Seal) + sizeof(ulittle32_t);

/// Reads an entry; its key is the one that the file contains.
StoredEntry read(llvm::StringRef bytes) {
  require(bytes.size() >= kJsonOffset, "it is shorter than an entry's header");
  const auto seal = read_as<Seal>(bytes);
  require(seal.magic == kEntryMagic, "it is no sagebwd entry");
  require(seal.version == kEntryFormat, "it has another format version");
  const llvm::StringRef body = bytes.drop_front(sizeof(Seal)), rest = bytes.drop_front(kJsonOffset);
  require(seal.checksum == sha256(body), "its checksum does not match: it is truncated or corrupt");
  const size_t json_bytes = read_as<ulittle32_t>(body);
  require(json_bytes <= rest.size(), "its JSON is longer than the file");
  // The checksum is right, so from here on the bytes are those that were written.
  const std::optional<llvm::json::Value> json = parse_bounded_json(rest.take_front(json_bytes));
  require(json && json->getAsObject(), "its JSON does not parse");
  const llvm::json::Object& object = *json->getAsObject();
  StoredEntry stored;
  CacheEntry& entry = stored.entry;
  require(read_json(object.get("digest"), stored.key.digest) &&
              read_json(object.get("fields"), stored.key.fields),
          "its JSON holds no key");
  size_t cubin_bytes = 0;
  require(read_object(&object, entry, kAnyNumber) &&
              read_json(object.get("cubin_bytes"), cubin_bytes) &&
              std::min({entry.lowest_driver, entry.registers, entry.spill_bytes,
                        entry.shared_bytes}) >= 0,
          "a field of its JSON is missing or out of range");
  entry.cubin = rest.drop_front(json_bytes).str();
  require(entry.cubin.size() == cubin_bytes, "its cubin has another length than its JSON says");
  return stored;
}

} // namespace

std::string serialize(const CacheKey& key, const CacheEntry& entry) {
  // Objects print their members sorted by name, so that equal entries have equal bytes.
  llvm::json::Object object = object_of(entry);
  object["digest"] = key.digest;
  object["fields"] = as_json(key.fields);
  object["cubin_bytes"] = as_json(entry.cubin.size());
  const std::string json = llvm::formatv("{0}", llvm::json::Value(std::move(object)));
  const std::string body = bytes_of(ulittle32_t(json.size())) + json + entry.cubin;
  return bytes_of(Seal{kEntryMagic, ulittle32_t(kEntryFormat), sha256(body)}) + body;
}

std::optional<CacheEntry> deserialize(const std::string& bytes, const CacheKey& key,
                                      std::string* why) {
  return if_sound(why, [&] {
    // The file has the key's name, so comparing digests suffices.
    StoredEntry stored = read(bytes);
    require(stored.key.digest == key.digest, "it is the entry of another key");
    return std::move(stored.entry);
  });
}

std::optional<StoredEntry> inspect_entry(const std::string& bytes, std::string* why) {
  return if_sound(why, [&] {
    StoredEntry stored = read(bytes);
    CacheKey key = make_key(std::move(stored.key.fields));
    require(stored.key.digest == key.digest, "its digest is not that of its fields");
    stored.key = std::move(key);
    return stored;
  });
}

} // namespace sagebwd
