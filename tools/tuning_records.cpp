//===- tuning_records.cpp - Records on the command line --------------------===//
#include "tools/tuning_records.h"

#include "cache/bounded_json.h"
#include "cache/whole_file.h"
#include "runtime/tuner/records.h"
#include "tools/console.h"

#include <stdexcept>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// As to_string() prints the spec, without its booleans.
std::string spec_of(const CacheKey& key) {
  std::string line;
  visit_fields(usual<AttentionSpec>(), [&]<typename T>(const Label& label, const T&) {
    if constexpr (!std::is_same_v<T, bool>)
      line += std::string(label.mark) + key[std::string(label.name)];
  });
  return line;
}

std::vector<TuningRecord> all_records() {
  std::vector<std::string> problems;
  std::vector<TuningRecord> records = user_records().all(&problems);
  for (const std::string& problem : problems)
    complain("tune", problem);
  return records;
}

} // namespace

double median_ms_of(const TuningRecord& record, const std::string& tile) {
  for (const TriedTile& tried : record.candidates)
    if (tried.tile == tile && tried.outcome == "timed")
      return tried.median_ms;
  return 0;
}

json::Object json_of(const TuningRecord& record) {
  const auto kept = parse_bounded_json(serialize(record));
  const double by_default = median_ms_of(record, record.default_tile);
  const double tuned = median_ms_of(record, record.tile);
  return json::Object{{"kernel", record.key["kind"]},
                      {"gpu", record.key["gpu"]},
                      {"bucket", record.key["bucket"]},
                      {"head_dim", record.key["head_dim"]},
                      {"dtype", record.key["dtype"]},
                      {"causal", record.key["causal"]},
                      {"digest", record.key.digest},
                      {"tile", record.tile},
                      {"default_tile", record.default_tile},
                      {"default_ms", by_default},
                      {"tuned_ms", tuned},
                      {"speedup", tuned > 0 ? by_default / tuned : 0},
                      {"compiler", record.compiler},
                      {"candidates", *kept->getAsObject()->get("candidates")}};
}

ExitCode list_records(const Command& command) {
  const std::vector<TuningRecord> records = all_records();
  const std::string place = user_records().place();
  json::Array rows;
  Table table;
  for (const TuningRecord& record : records) {
    const CacheKey& key = record.key;
    const double tuned = median_ms_of(record, record.tile);
    table.add(
        {{"", "kernel", key["kind"]},
         {"", "spec", spec_of(key)},
         {"", "bucket", key["bucket"]},
         {"", "GPU", key["gpu"]},
         {"", "tile", record.tile},
         {"", "default", record.default_tile},
         {"", "speed-up",
          tuned > 0 ? format("%.3f", median_ms_of(record, record.default_tile) / tuned) : "-"}});
    rows.push_back(json_of(record));
  }
  return command.finish(json::Object{{"place", place}, {"records", std::move(rows)}}, [&] {
    table.print();
    printf("%s in %s\n", counted(records.size(), "tuning record").c_str(), place.c_str());
  });
}

ExitCode export_records(const Command& command, const std::string& path) {
  const std::vector<TuningRecord> records = all_records();
  const std::string text = user_records().exported(records);
  if (std::string why = write_output(path, {&text}); !why.empty())
    throw std::runtime_error(why);
  return command.finish(json::Object{{"file", path}, {"exported", records.size()}}, [&] {
    printf("%s written to %s\n", counted(records.size(), "tuning record").c_str(), path.c_str());
  });
}

ExitCode import_records(const Command& command, const std::string& path, bool overwrite) {
  std::string why;
  const auto records = parse_records(read_input(path), &why);
  Records::Merged merged;
  if (records)
    try {
      merged = user_records().merge(*records, overwrite);
    } catch (const SpecError& error) { // the file's fault, not the command line's
      why = error.what();
    }
  if (!records || !why.empty())
    throw std::runtime_error(path + " is not taken over, nothing has changed: " + why);
  return command.finish(json::Object{{"file", path},
                                     {"added", merged.added},
                                     {"kept", merged.kept},
                                     {"replaced", merged.replaced}},
                        [&] {
                          printf("%s added, %zu kept as they were, %zu replaced in %s\n",
                                 counted(merged.added, "tuning record").c_str(), merged.kept,
                                 merged.replaced, user_records().place().c_str());
                        });
}

} // namespace sagebwd::tools
