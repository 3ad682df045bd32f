//===- record.cpp - What tuning one kernel found, as JSON -----------------===//

#include "cache/record.h"
#include "cache/bounded_json.h"
#include "cache/untrusted.h"

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
  visit("digest", record.key.digest);
  visit("key", record.key.fields);
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
/// The deepest part, a timing of a candidate of a record in a file, has a depth of 6.
constexpr int kDeepest = 8;
/// Limits far above any record; parsing needs about fifty times as much memory.
constexpr size_t kLongestRecord = size_t{4} << 20, kLongestFile = size_t{64} << 20;

/// The record as JSON with a checksum. Objects print their members sorted by name.
Object with_checksum(const TuningRecord& record) {
  Object object = object_of(record);
  object["schema"] = kTuningSchema;
  object["checksum"] = sha256_hex(llvm::formatv("{0}", Value(Object(object))));
  return object;
}

/// Indents the JSON, so that people can read it.
std::string print(Object object) { return llvm::formatv("{0:2}\n", Value(std::move(object))); }

/// The number in "sagebwd tuning 1", or nothing.
std::optional<int> schema_of(const Object& object) {
  std::string schema;
  read_json(object.get("schema"), schema);
  llvm::StringRef text = schema;
  int number = 0;
  if (!text.consume_front(kSchemaName) || text.getAsInteger(10, number) || number < 1)
    return std::nullopt;
  return number;
}

void require_our_schema(const Object& object) {
  const std::optional<int> schema = schema_of(object);
  require(schema.has_value(),
          "it is no tuning record: it has no \"schema\": \"sagebwd tuning ...\"");
  require(*schema <= kSchemaNumber,
          "written by a newer version of sagebwd: use that version, or tune again");
}

TuningRecord record_of(const Object* object) {
  require(object != nullptr, "it is no JSON object");
  require_our_schema(*object);
  TuningRecord record;
  std::string checksum;
  require(read_json(object->get("checksum"), checksum) &&
              read_object(object, record, /*others=*/2), // the checksum and the schema
          "a member is missing, or of another kind");
  const std::string digest = record.key.digest;
  record.key = make_key(std::move(record.key.fields));
  require(record.key.digest == digest,
          "its digest is not that of its fields: it was changed by hand, or damaged");
  require(*with_checksum(record).getString("checksum") == checksum,
          "its checksum does not match: it was changed by hand, or damaged");
  return record;
}

Object parse(const std::string& bytes, size_t longest) {
  if (bytes.size() > longest)
    throw Unsound{"it has " + std::to_string(bytes.size()) + " bytes, more than any tuning record"};
  std::optional<Value> value = parse_bounded_json(bytes, kDeepest);
  require(value.has_value(), json_depth(bytes) > kDeepest
                                 ? "it is nested deeper than any tuning record"
                                 : "it is no JSON");
  require(value->getAsObject(), "it is no JSON object");
  return std::move(*value->getAsObject());
}

} // namespace

std::string serialize(const TuningRecord& record) { return print(with_checksum(record)); }

std::optional<TuningRecord> parse_record(const std::string& bytes, std::string* why) {
  return if_sound(why, [&] {
    const Object object = parse(bytes, kLongestRecord);
    return record_of(&object);
  });
}

bool is_newer_record(const std::string& bytes) {
  const auto object = if_sound(nullptr, [&] { return parse(bytes, kLongestFile); });
  return object && schema_of(*object).value_or(0) > kSchemaNumber;
}

std::string serialize_records(const std::vector<TuningRecord>& records) {
  Array array;
  for (const TuningRecord& record : records)
    array.push_back(with_checksum(record));
  return print(Object{{"schema", kTuningSchema}, {"records", std::move(array)}});
}

std::optional<std::vector<TuningRecord>> parse_records(const std::string& bytes, std::string* why) {
  return if_sound(why, [&] {
    const Object file = parse(bytes, kLongestFile);
    require_our_schema(file);
    const Array* array = file.getArray("records");
    if (!array) // a single record, as the cache stores it
      return std::vector{record_of(&file)};
    std::vector<TuningRecord> records;
    for (const Value& item : *array)
      try {
        records.push_back(record_of(item.getAsObject()));
      } catch (const Unsound& unsound) {
        throw Unsound{"record " + std::to_string(records.size() + 1) + ": " + unsound.why};
      }
    return records;
  });
}

} // namespace sagebwd
