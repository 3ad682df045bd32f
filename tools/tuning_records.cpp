//===- tuning_records.cpp - Records on the command line --------------------===//
#include "tools/tuning_records.h"

#include "cache/bounded_json.h"
#include "cache/whole_file.h"
#include "runtime/tuner/records.h"
#include "tools/console.h"

#include <stdexcept>

namespace sagebwd::tools {

namespace {

std::vector<TuningRecord> all_records() {
  std::vector<std::string> problems;
  std::vector<TuningRecord> records = user_records().all(&problems);
  for (const std::string& problem : problems)
    fprintf(stderr, "sagebwd tune: %s\n", problem.c_str());
  return records;
}

} // namespace

double median_ms_of(const TuningRecord& record, const std::string& tile) {
  for (const TriedTile& tried : record.candidates)
    if (tried.tile == tile && tried.outcome == "timed")
      return tried.median_ms;
  return 0;
}

llvm::json::Object json_of(const TuningRecord& record) {
  const auto kept = parse_bounded_json(serialize(record));
  const double by_default = median_ms_of(record, record.default_tile);
  const double tuned = median_ms_of(record, record.tile);
  return llvm::json::Object{{"kernel", record.key["kind"]},
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

ExitCode list_records(bool json) {
  const std::vector<TuningRecord> records = all_records();
  const std::string place = user_records().place();
  llvm::json::Array array;
  Table table({"kernel", "spec", "bucket", "GPU", "tile", "default", "speed-up"});
  for (const TuningRecord& record : records) {
    const CacheKey& key = record.key;
    const double tuned = median_ms_of(record, record.tile);
    const std::string spec = "d" + key["head_dim"] + " " + key["dtype"] +
                             " causal=" + key["causal"] + " " + key["granularity"] + " " +
                             key["group_q"] + "x" + key["group_kv"] + " " + key["precision"];
    table.add(
        {key["kind"], spec, key["bucket"], key["gpu"], record.tile, record.default_tile,
         tuned > 0 ? format("%.3f", median_ms_of(record, record.default_tile) / tuned) : "-"});
    array.push_back(json_of(record));
  }
  if (json) {
    print_json(llvm::json::Object{{"place", place}, {"records", std::move(array)}});
  } else {
    if (!records.empty())
      table.print();
    printf("%s in %s\n", counted(records.size(), "tuning record").c_str(), place.c_str());
  }
  return kDone;
}

ExitCode export_records(const std::string& path, bool json) {
  const std::vector<TuningRecord> records = all_records();
  const std::string text = user_records().exported(records);
  if (std::string why = write_output(path, {&text}); !why.empty())
    throw std::runtime_error(why);
  if (json)
    print_json(llvm::json::Object{{"file", path}, {"exported", records.size()}});
  else
    printf("%s written to %s\n", counted(records.size(), "tuning record").c_str(), path.c_str());
  return kDone;
}

ExitCode import_records(const std::string& path, bool overwrite, bool json) {
  std::string why;
  const auto records = parse_records(read_input(path), &why);
  const auto untouched = [&](const std::string& reason) {
    return std::runtime_error(path + " is not taken over, nothing has changed: " + reason);
  };
  if (!records)
    throw untouched(why);
  Records::Merged merged;
  try {
    merged = user_records().merge(*records, overwrite);
  } catch (const SpecError& error) { // the file's fault, not the command line's
    throw untouched(error.what());
  }
  if (json)
    print_json(llvm::json::Object{{"file", path},
                                  {"added", merged.added},
                                  {"kept", merged.kept},
                                  {"replaced", merged.replaced}});
  else
    printf("%s added, %zu kept as they were, %zu replaced in %s\n",
           counted(merged.added, "tuning record").c_str(), merged.kept, merged.replaced,
           user_records().place().c_str());
  return kDone;
}

} // namespace sagebwd::tools
