//===- mutations.h - Damaged and forged files ------------------------------===//
//
// For tests and fuzzers: random damage, and checksums made right again, so that it reaches what
// lies behind them.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/bounded_json.h"
#include "cache/entry.h"
#include "cache/record.h"

#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/Endian.h"
#include "llvm/Support/FormatVariadic.h"

#include <algorithm>
#include <random>
#include <string>

namespace sagebwd::test {

using Random = std::minstd_rand;

inline size_t below(Random& random, size_t end) { return end ? random() % end : 0; }

/// One piece of damage; `other` lends parts of a sound file.
inline std::string mutated(std::string bytes, const std::string& other, Random& random) {
  const size_t at = below(random, bytes.size() + 1);
  switch (below(random, 10)) {
  case 0: // some bits
    for (size_t flips = 1 + below(random, 4); flips > 0 && !bytes.empty(); --flips)
      bytes[below(random, bytes.size())] ^= static_cast<char>(1 << below(random, 8));
    return bytes;
  case 1:
    return bytes.substr(0, at);
  case 2:
    return below(random, 8) ? bytes.substr(at) : "";
  case 3: { // a length: huge, or a little off
    const char* const numbers[] = {"\xff\xff\xff\xff", "\xff\xff\xff\x7f", "\0\0\0\x80",
                                   "\0\0\0\0",         "\1\0\0\0",         "\xff\0\0\0"};
    const size_t header = std::min<size_t>(bytes.size(), 96);
    return bytes.replace(below(random, header + 1) / 4 * 4, 4,
                         std::string(numbers[below(random, 6)], 4));
  }
  case 4: // the header of another file
  case 5: {
    const size_t edge = below(random, std::min({bytes.size(), other.size(), size_t{200}}) + 1);
    return other.substr(0, edge) + bytes.substr(edge);
  }
  case 6: // a part of it, or of another file, elsewhere
    return bytes.insert(at, other.substr(below(random, other.size()), below(random, 64)));
  case 7:
    return bytes.erase(at, 1 + below(random, 64));
  case 8: { // what JSON makes something of
    const char* const pieces[] = {"\"",         "{",     "}",      "[",
                                  "]",          ",",     ":",      "\\",
                                  "-1",         "1e999", "null",   "9223372036854775808",
                                  "4294967297", "\"\"",  "\\u0000"};
    return bytes.insert(at, pieces[below(random, std::size(pieces))]);
  }
  default: { // a number in text
    const size_t digit = bytes.find_first_of("0123456789", at);
    if (digit != std::string::npos)
      bytes[digit] = static_cast<char>('0' + below(random, 10));
    return bytes;
  }
  }
}

//===--- Checksums made right ---------------------------------------------===//

inline std::string sha256_bytes(const std::string& text) { return llvm::fromHex(sha256_hex(text)); }

/// The JSON of an entry gets the digest of its fields, the file its checksum.
inline std::string resealed_entry(std::string bytes) {
  constexpr size_t kChecksumAt = 12, kBodyAt = 44, kJsonAt = 48;
  if (bytes.size() < kJsonAt)
    return bytes;
  const size_t json_bytes = llvm::support::endian::read32le(bytes.data() + kBodyAt);
  const std::string json = bytes.substr(kJsonAt, json_bytes);
  if (auto value = parse_bounded_json(json); value && value->getAsObject())
    if (Fields fields; read_json(value->getAsObject()->get("fields"), fields)) {
      const std::string label = "\"digest\":\"", digest = make_key(std::move(fields)).digest;
      const size_t at = json.find(label);
      if (at != std::string::npos && at + label.size() + digest.size() <= json.size())
        bytes.replace(kJsonAt + at + label.size(), digest.size(), digest);
    }
  return bytes.replace(kChecksumAt, kBodyAt - kChecksumAt, sha256_bytes(bytes.substr(kBodyAt)));
}

/// The manifest's and the index's checksums; the items keep what they have.
inline std::string resealed_pack(std::string bytes) {
  constexpr size_t kChecksumAt = 12, kCountAt = 44, kManifestAt = 56, kIndexAt = 88, kRow = 48;
  if (bytes.size() < kIndexAt)
    return bytes;
  const uint64_t rows = llvm::support::endian::read32le(bytes.data() + kCountAt);
  const uint64_t manifest_bytes = llvm::support::endian::read64le(bytes.data() + kCountAt + 4);
  const uint64_t end = std::min<uint64_t>(bytes.size(), kIndexAt + rows * kRow);
  bytes.replace(kManifestAt, 32, sha256_bytes(bytes.substr(end, manifest_bytes)));
  return bytes.replace(kChecksumAt, 32, sha256_bytes(bytes.substr(kCountAt, end - kCountAt)));
}

inline void reseal(llvm::json::Object& record) {
  if (Fields fields; read_json(record.get("key"), fields))
    record["digest"] = make_key(std::move(fields)).digest;
  llvm::json::Object contents; // LLVM 14 must not copy an object from which something was erased
  for (const auto& [name, value] : record)
    if (name != "checksum")
      contents[name] = value;
  record["checksum"] =
      sha256_hex(llvm::formatv("{0}", llvm::json::Value(std::move(contents))).str());
}

/// The digest and the checksum of a record, or of all records of a file.
inline std::string resealed_record(std::string bytes) {
  auto value = parse_bounded_json(bytes);
  llvm::json::Object* file = value ? value->getAsObject() : nullptr;
  if (!file)
    return bytes;
  if (llvm::json::Array* records = file->getArray("records")) {
    for (llvm::json::Value& record : *records)
      if (record.getAsObject())
        reseal(*record.getAsObject());
  } else {
    reseal(*file);
  }
  return llvm::formatv("{0:2}", *value).str();
}

//===--- Sound files to begin with ----------------------------------------===//

inline CacheKey some_key(int number) {
  return make_key({{"schema", "test"}, {"number", std::to_string(number)}, {"arch", "sm_90a"}});
}

inline std::string some_entry(int number) {
  CacheEntry entry;
  entry.kernel_name = "kernel_" + std::to_string(number);
  entry.arch = "sm_90a";
  entry.compiler = "nvrtc 13.0 build 36424714";
  entry.lowest_driver = 13000;
  entry.registers = 168;
  entry.shared_bytes = 99 << 10;
  for (int i = 0; i < 300 + number; ++i)
    entry.cubin.push_back(static_cast<char>(i * i + number));
  return serialize(some_key(number), entry);
}

inline TuningRecord some_record(int number) {
  TuningRecord record;
  record.key = make_key({{"schema", kTuningSchema},
                         {"gpu", "GPU " + std::to_string(number)},
                         {"bucket", "q512 kv512 full"}});
  record.tile = record.default_tile = "mma 64x64 w4 s1 b1";
  record.compiler = "nvrtc 13.0 build 36424714";
  record.candidates = {{"mma 64x64 w4 s1 b1", "timed", "", {1.5, 1.25, 2}, 1.5, 0.25},
                       {"mma 128x64 w8 s2 b1", "crashed", "signal \"11\"", {}, 0, 0}};
  return record;
}

} // namespace sagebwd::test
