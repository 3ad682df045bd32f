//===- tuning_records.cpp - Records on the command line --------------------===//
#include "tools/tuning_records.h"

#include "runtime/tuner/records.h"
#include "tools/console.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

namespace sagebwd::tools {

namespace {

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw std::runtime_error(path + " cannot be " + what + ": " + std::strerror(errno));
}

std::string read_whole(const std::string& path) {
  constexpr off_t kLongest = off_t{64} << 20;
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC); // nor wait for a FIFO
  struct stat info;
  if (fd < 0 || ::fstat(fd, &info) != 0)
    fail(path, "read");
  std::string text(static_cast<size_t>(std::min(info.st_size, kLongest)), '\0');
  size_t done = 0;
  ssize_t count = 1;
  while (S_ISREG(info.st_mode) && done < text.size() &&
         (count = ::read(fd, text.data() + done, text.size() - done)) > 0)
    done += static_cast<size_t>(count);
  ::close(fd);
  if (!S_ISREG(info.st_mode))
    throw std::runtime_error(path + " cannot be read: it is no file");
  if (info.st_size > kLongest)
    throw std::runtime_error(path + " is longer than any file of tuning records");
  if (count < 0)
    fail(path, "read");
  text.resize(done);
  return text;
}

/// Whole or not at all: what was there stays until the new file is complete.
void write_whole(const std::string& path, const std::string& text) {
  struct stat there;
  if (::lstat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) // a rename would replace it
    throw std::runtime_error(path + " is there and is no regular file; name another file");
  const std::string unfinished = path + ".unfinished-" + std::to_string(::getpid());
  const int fd = ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0)
    fail(path, "written");
  size_t done = 0;
  ssize_t count = 1;
  while (done < text.size() && (count = ::write(fd, text.data() + done, text.size() - done)) > 0)
    done += static_cast<size_t>(count);
  const bool written = done == text.size() && ::fsync(fd) == 0;
  int error = errno;
  if (::close(fd) == 0 && written && ::rename(unfinished.c_str(), path.c_str()) == 0)
    return;
  error = written ? errno : error;
  ::unlink(unfinished.c_str());
  errno = error;
  fail(path, "written");
}

std::vector<TuningRecord> all_records() {
  std::vector<std::string> problems;
  std::vector<TuningRecord> records = user_records().all(&problems);
  for (const std::string& problem : problems)
    fprintf(stderr, "sagebwd tune: %s\n", problem.c_str());
  return records;
}

std::string place() {
  const CacheStore& store = user_records().store();
  return store.disabled_reason().empty() ? store.directory()
                                         : "no directory (" + store.disabled_reason() + ")";
}

} // namespace

double median_ms_of(const TuningRecord& record, const std::string& tile) {
  for (const TriedTile& tried : record.candidates)
    if (tried.tile == tile && tried.outcome == "timed")
      return tried.median_ms;
  return 0;
}

llvm::json::Object json_of(const TuningRecord& record) {
  llvm::json::Array candidates;
  for (const TriedTile& tried : record.candidates)
    candidates.push_back(llvm::json::Object{{"tile", tried.tile},
                                            {"outcome", tried.outcome},
                                            {"detail", llvm::json::fixUTF8(tried.detail)},
                                            {"ms", llvm::json::Array(tried.ms)},
                                            {"median_ms", tried.median_ms},
                                            {"mad_ms", tried.mad_ms}});
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
                            {"candidates", std::move(candidates)}};
}

ExitCode list_records(bool json) {
  const std::vector<TuningRecord> records = all_records();
  if (json) {
    llvm::json::Array array;
    for (const TuningRecord& record : records)
      array.push_back(json_of(record));
    print_json(llvm::json::Object{{"place", place()}, {"records", std::move(array)}});
    return kDone;
  }
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
  }
  table.print();
  printf("%zu tuning records in %s\n", records.size(), place().c_str());
  return kDone;
}

ExitCode export_records(const std::string& path, bool json) {
  const std::vector<TuningRecord> records = all_records();
  if (records.empty())
    throw std::runtime_error("there is no tuning record in " + place() +
                             " to export: run 'sagebwd tune' first, on the GPU in question");
  write_whole(path, serialize_records(records));
  if (json)
    print_json(llvm::json::Object{{"file", path}, {"exported", records.size()}});
  else
    printf("%zu tuning records written to %s\n", records.size(), path.c_str());
  return kDone;
}

ExitCode import_records(const std::string& path, bool overwrite, bool json) {
  std::string why;
  const auto records = parse_records(read_whole(path), &why);
  if (!records)
    throw std::runtime_error(path + " is not taken over, nothing has changed: " + why);
  Records::Merged merged;
  try {
    merged = user_records().merge(*records, overwrite);
  } catch (const SpecError& error) { // the file's fault, not the command line's
    throw std::runtime_error(path + " is not taken over, nothing has changed: " + error.what());
  }
  if (json)
    print_json(llvm::json::Object{{"file", path},
                                  {"added", merged.added},
                                  {"kept", merged.kept},
                                  {"replaced", merged.replaced}});
  else
    printf("%zu tuning records added, %zu kept as they were, %zu replaced in %s\n", merged.added,
           merged.kept, merged.replaced, place().c_str());
  return kDone;
}

} // namespace sagebwd::tools
