//===- log.cpp - A log line for each kernel built or found ----------------===//

#include "runtime/log.h"

#include "cache/at_fork.h"
#include "runtime/settings.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <mutex>
#include <unistd.h>
#include <utility>

namespace sagebwd {

namespace {

/// The most lines that are kept, so that lines which no front end reads do not fill the memory.
constexpr size_t kMostLines = 1000;

struct Kept {
  ForkSafeMutex mutex;
  std::deque<LogLine> lines;
};
Kept& kept() {
  static constinit Single<Kept> kept; // never destroyed: threads may still build at exit
  return kept.get([] { return new Kept; });
}

std::atomic<bool> keeps{false}, has_lines{false};

/// Appends a whole line, also if several processes write to the same file.
void write_line(const std::string& path, const std::string& line) {
  const int file = path == Settings::kStandardError
                       ? STDERR_FILENO
                       : ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  const bool written = file >= 0 && ::write(file, line.data(), line.size()) >= 0;
  const int error = errno;
  if (file > STDERR_FILENO)
    ::close(file);
  static std::atomic<bool> warned{false};
  if (!written && !warned.exchange(true))
    std::fprintf(stderr, "sagebwd: warning: SAGEBWD_LOG is '%s', which cannot be written: %s\n",
                 path.c_str(), std::strerror(error));
}

} // namespace

void log_kernel(const std::string& name, const std::string& arch, const std::string& place,
                double seconds) {
  const std::string& log = settings().log;
  const bool to_file = !log.empty() && log != Settings::kNoLog;
  if (!to_file && !keeps)
    return;
  char taken[32];
  std::snprintf(taken, sizeof(taken), " in %.3f s", seconds);
  const bool compiled = place.empty();
  LogLine line{(compiled ? "compiled " : "loaded ") + name + " for " + arch +
                   (compiled ? "" : " from " + place) + taken,
               compiled};
  if (to_file)
    write_line(log, "sagebwd: " + line.text + "\n");
  if (!keeps)
    return;
  std::lock_guard lock(kept().mutex);
  kept().lines.push_back(std::move(line));
  if (kept().lines.size() > kMostLines)
    kept().lines.pop_front();
  has_lines = true;
}

void keep_log_lines() { keeps = true; }
bool has_log_lines() { return has_lines.load(std::memory_order_relaxed); }

std::vector<LogLine> take_log_lines() {
  std::lock_guard lock(kept().mutex);
  has_lines = false;
  std::vector<LogLine> lines(kept().lines.begin(), kept().lines.end());
  kept().lines.clear();
  return lines;
}

} // namespace sagebwd
