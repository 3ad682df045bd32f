//===- record.cpp - Fuzzes the reader of tuning records --------------------===//

#include "tests/cache/mutations.h"
#include "tests/fuzz/target.h"

using namespace sagebwd;

std::vector<std::string> seeds() {
  return {serialize(test::some_record(1)),
          serialize_records({test::some_record(1), test::some_record(2)}), serialize_records({}),
          "{\"schema\": \"sagebwd tuning 2\"}"};
}

unsigned first_random() { return 5; }
std::string resealed(std::string input) { return test::resealed_record(std::move(input)); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  std::string why;
  const std::optional<TuningRecord> record = parse_record(bytes, &why);
  require(record.has_value() == why.empty());
  if (record) {
    require(make_key(record->key.fields).digest == record->key.digest);
    const std::optional<TuningRecord> again = parse_record(serialize(*record));
    require(again && again->tile == record->tile && again->candidates == record->candidates);
    require(!is_newer_record(bytes));
  }
  why.clear();
  const auto records = parse_records(bytes, &why);
  require(records.has_value() == why.empty());
  if (records)
    require(parse_records(serialize_records(*records)).has_value());
  is_newer_record(bytes);
  return 0;
}
