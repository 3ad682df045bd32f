//===- record.cpp - What tuning one kernel found, as JSON ------------------===//

#include "cache/record.h"
#include "cache/bounded_json.h"

#include "llvm/Support/FormatVariadic.h"

#include <cmath>

namespace sagebwd {

namespace {

using llvm::json::Array;
using llvm::json::Object;
using llvm::json::Value;

constexpr llvm::StringLiteral kSchemaName("sagebwd tuning ");
constexpr int kSchemaNumber = 1;
constexpr int kDeepest = 8; ///< a timing of a candidate of a record of a file takes 6
/// Far beyond any record; parsing takes some fifty times as much memory.
constexpr size_t kLongestRecord = size_t{4} << 20, kLongestFile = size_t{64} << 20;

/// JSON has no infinities.
double finite(double value) { return std::isfinite(value) ? value + 0.0 : 0; }

std::string print(const Value& value, bool indented) {
  return indented ? llvm::formatv("{0:2}", value).str() : llvm::formatv("{0}", value).str();
}

/// Without the checksum. Objects print their members sorted by name.
Object contents(const TuningRecord& record) {
  Array candidates;
  for (const TriedTile& tried : record.candidates) {
    Array ms;
    for (double value : tried.ms)
      ms.push_back(finite(value));
    candidates.push_back(Object{{"tile", utf8(tried.tile)},
                                {"outcome", utf8(tried.outcome)},
                                {"detail", utf8(tried.detail)},
                                {"ms", std::move(ms)},
                                {"median_ms", finite(tried.median_ms)},
                                {"mad_ms", finite(tried.mad_ms)}});
  }
  return Object{{"schema", kTuningSchema},
                {"digest", record.key.digest},
                {"key", json_of_fields(record.key.fields)},
                {"tile", utf8(record.tile)},
                {"default_tile", utf8(record.default_tile)},
                {"compiler", utf8(record.compiler)},
                {"candidates", std::move(candidates)}};
}

Object with_checksum(const TuningRecord& record) {
  Object object = contents(record);
  const std::string checksum = sha256_hex(print(Value(Object(object)), /*indented=*/false));
  object["checksum"] = checksum;
  return object;
}

/// The number in "sagebwd tuning 1", or nothing.
std::optional<int> schema_of(const Object& object) {
  llvm::StringRef text;
  if (auto schema = llvm_compat::to_optional<llvm::StringRef>(object.getString("schema")))
    text = *schema;
  int number = 0;
  if (!text.consume_front(kSchemaName) || text.getAsInteger(10, number) || number < 1)
    return std::nullopt;
  return number;
}

const char* const kNewer = "written by a newer version of sagebwd: use that version, or tune again";

/// Why an object is not of our schema, or empty.
std::string foreign(const Object& object) {
  const std::optional<int> schema = schema_of(object);
  if (!schema)
    return "it is no tuning record: it has no \"schema\": \"sagebwd tuning ...\"";
  return *schema > kSchemaNumber ? kNewer : "";
}

bool read(const Value& value, TriedTile& tried) {
  const Object* object = value.getAsObject();
  const Array* ms = object ? object->getArray("ms") : nullptr;
  if (!ms || object->size() != 6 || !read_member(*object, "tile", tried.tile) ||
      !read_member(*object, "outcome", tried.outcome) ||
      !read_member(*object, "detail", tried.detail) ||
      !read_member(*object, "median_ms", tried.median_ms) ||
      !read_member(*object, "mad_ms", tried.mad_ms))
    return false;
  for (const Value& timing : *ms) {
    auto number = llvm_compat::to_optional<double>(timing.getAsNumber());
    if (!number)
      return false;
    tried.ms.push_back(*number);
  }
  return true;
}

std::optional<TuningRecord> record_of(const Object& object, std::string& why) {
  if (why = foreign(object); !why.empty())
    return std::nullopt;
  TuningRecord record;
  std::string digest, checksum;
  auto fields = fields_of_json(object.getObject("key"));
  const Array* candidates = object.getArray("candidates");
  why = "a member is missing, or of another kind";
  if (!fields || !candidates || object.size() != 8 || !read_member(object, "digest", digest) ||
      !read_member(object, "checksum", checksum) || !read_member(object, "tile", record.tile) ||
      !read_member(object, "default_tile", record.default_tile) ||
      !read_member(object, "compiler", record.compiler))
    return std::nullopt;
  for (const Value& value : *candidates)
    if (!read(value, record.candidates.emplace_back()))
      return std::nullopt;
  record.key = make_key(std::move(*fields));
  why = "its digest is not that of its fields: it was changed by hand, or damaged";
  if (record.key.digest != digest)
    return std::nullopt;
  why = "its checksum does not match: it was changed by hand, or damaged";
  if (*text_of(with_checksum(record), "checksum") != checksum)
    return std::nullopt;
  why.clear();
  return record;
}

std::optional<Value> parse(const std::string& bytes, size_t longest, std::string& why) {
  if (bytes.size() > longest) {
    why = "it has " + std::to_string(bytes.size()) + " bytes, more than any tuning record";
    return std::nullopt;
  }
  std::optional<Value> value = parse_bounded_json(bytes, kDeepest);
  if (!value)
    why = json_depth(bytes) > kDeepest ? "it is nested deeper than any tuning record"
                                       : "it is no JSON";
  else if (!value->getAsObject())
    why = "it is no JSON object";
  return value && value->getAsObject() ? std::move(value) : std::nullopt;
}

} // namespace

std::string serialize(const TuningRecord& record) {
  return print(Value(with_checksum(record)), /*indented=*/true) + "\n";
}

std::optional<TuningRecord> parse_record(const std::string& bytes, std::string* why) {
  std::string unused;
  std::string& reason = why ? *why : unused;
  const std::optional<Value> value = parse(bytes, kLongestRecord, reason);
  return value ? record_of(*value->getAsObject(), reason) : std::nullopt;
}

bool is_newer_record(const std::string& bytes) {
  std::string unused;
  const std::optional<Value> value = parse(bytes, kLongestFile, unused);
  return value && schema_of(*value->getAsObject()).value_or(0) > kSchemaNumber;
}

std::string serialize_records(const std::vector<TuningRecord>& records) {
  Array array;
  for (const TuningRecord& record : records)
    array.push_back(with_checksum(record));
  return print(Value(Object{{"schema", kTuningSchema}, {"records", std::move(array)}}),
               /*indented=*/true) +
         "\n";
}

std::optional<std::vector<TuningRecord>> parse_records(const std::string& bytes, std::string* why) {
  std::string unused;
  std::string& reason = why ? *why : unused;
  const std::optional<Value> value = parse(bytes, kLongestFile, reason);
  if (!value)
    return std::nullopt;
  const Object& file = *value->getAsObject();
  if (reason = foreign(file); !reason.empty())
    return std::nullopt;
  const Array* array = file.getArray("records");
  std::vector<TuningRecord> records;
  if (!array) { // one record, as the cache keeps it
    std::optional<TuningRecord> record = record_of(file, reason);
    if (!record)
      return std::nullopt;
    records.push_back(std::move(*record));
    return records;
  }
  for (const Value& item : *array) {
    const Object* object = item.getAsObject();
    reason = "it is no JSON object";
    std::optional<TuningRecord> record = object ? record_of(*object, reason) : std::nullopt;
    if (!record) {
      reason = "record " + std::to_string(records.size() + 1) + ": " + reason;
      return std::nullopt;
    }
    records.push_back(std::move(*record));
  }
  return records;
}

} // namespace sagebwd
