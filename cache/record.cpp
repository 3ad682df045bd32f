//===- record.cpp - What tuning one kernel found, as JSON ------------------===//

#include "cache/record.h"
#include "cache/bounded_json.h"

#include "llvm/Support/FormatVariadic.h"

namespace sagebwd {

template <Either<TriedTile> Self, typename Visit> void visit_members(Self& tried, Visit&& visit) {
  visit("tile", tried.tile);
  visit("outcome", tried.outcome);
  visit("detail", tried.detail);
  visit("ms", tried.ms);
  visit("median_ms", tried.median_ms);
  visit("mad_ms", tried.mad_ms);
}

template <Either<TuningRecord> Self, typename Visit>
void visit_members(Self& record, Visit&& visit) {
  visit("tile", record.tile);
  visit("default_tile", record.default_tile);
  visit("compiler", record.compiler);
  visit("candidates", record.candidates);
}

namespace {

using llvm::json::Array;
using llvm::json::Object;
using llvm::json::Value;

constexpr llvm::StringLiteral kSchemaName("sagebwd tuning ");
constexpr int kSchemaNumber = 1;
constexpr int kDeepest = 8; ///< a timing of a candidate of a record of a file takes 6
/// Far beyond any record; parsing takes some fifty times as much memory.
constexpr size_t kLongestRecord = size_t{4} << 20, kLongestFile = size_t{64} << 20;

/// Without the checksum. Objects print their members sorted by name.
Object contents(const TuningRecord& record) {
  Object object = object_of(record);
  object["schema"] = kTuningSchema;
  object["digest"] = record.key.digest;
  object["key"] = json_of_fields(record.key.fields);
  return object;
}

std::string checksum_of(const TuningRecord& record) {
  return sha256_hex(llvm::formatv("{0}", Value(contents(record))));
}

Object with_checksum(const TuningRecord& record) {
  Object object = contents(record);
  object["checksum"] = checksum_of(record);
  return object;
}

/// For people.
std::string print(Object object) { return llvm::formatv("{0:2}\n", Value(std::move(object))); }

/// The number in "sagebwd tuning 1", or nothing.
std::optional<int> schema_of(const Object& object) {
  std::string schema;
  read_member(object, "schema", schema);
  llvm::StringRef text = schema;
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

std::optional<TuningRecord> record_of(const Object& object, std::string& why) {
  if (why = foreign(object); !why.empty())
    return std::nullopt;
  TuningRecord record;
  std::string digest, checksum;
  auto fields = fields_of_json(object.getObject("key"));
  why = "a member is missing, or of another kind";
  if (!fields || !read_member(object, "digest", digest) ||
      !read_member(object, "checksum", checksum) ||
      !read_object(&object, record, /*others=*/4)) // these three, and the schema
    return std::nullopt;
  record.key = make_key(std::move(*fields));
  why = "its digest is not that of its fields: it was changed by hand, or damaged";
  if (record.key.digest != digest)
    return std::nullopt;
  why = "its checksum does not match: it was changed by hand, or damaged";
  if (checksum_of(record) != checksum)
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

std::string serialize(const TuningRecord& record) { return print(with_checksum(record)); }

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
  return print(Object{{"schema", kTuningSchema}, {"records", std::move(array)}});
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
  const Array* array = file.getArray("records"); // else one record, as the cache keeps it
  std::vector<TuningRecord> records;
  for (size_t i = 0; i < (array ? array->size() : 1); ++i) {
    const Object* object = array ? (*array)[i].getAsObject() : &file;
    reason = "it is no JSON object";
    std::optional<TuningRecord> record = object ? record_of(*object, reason) : std::nullopt;
    if (!record) {
      reason = (array ? "record " + std::to_string(i + 1) + ": " : "") + reason;
      return std::nullopt;
    }
    records.push_back(std::move(*record));
  }
  return records;
}

} // namespace sagebwd
