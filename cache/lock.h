//===- lock.h - One byte of a file for each key ---------------------------===//
//
// Open-file-description locks on single bytes of one file: they exclude threads as well as
// processes, vanish with whoever held them, and leave no files behind. A lock is an optimisation,
// never correctness: where the file system has none, or nobody lets go in time, work goes on.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/at_fork.h"
#include "cache/posix.h"

#include <chrono>
#include <functional>
#include <string>

namespace sagebwd {

/// Exclusive use of one key while it lives.
class KeyLock {
public:
  /// Told once, when the wait has taken two seconds: who has the key ("process 4711 (python3)", or
  /// "another process" where this machine cannot tell), and how much longer it may take.
  using OnWait = std::function<void(const std::string& holder, std::chrono::milliseconds left)>;

  /// Waits until the key is free, `limit` has passed, or `enough()`, asked between attempts, says
  /// that there is nothing to wait for.
  KeyLock(const std::string& directory, const std::string& digest, std::chrono::milliseconds limit,
          const std::function<bool()>& enough, const OnWait& on_wait = nullptr);
  ~KeyLock();
  KeyLock(const KeyLock&) = delete;
  KeyLock& operator=(const KeyLock&) = delete;

  bool held() const { return static_cast<bool>(file_); }
  bool waited() const { return waited_; }       ///< someone else held it at first
  bool timed_out() const { return timed_out_; } ///< and still does

private:
  static constexpr std::chrono::milliseconds kLongestPause{20}, kSilence{2000};

  Descriptor file_; ///< only while it is held
  off_t byte_ = 0;
  bool waited_ = false, timed_out_ = false;
};

/// Says of keys that this process uses them, for as long as it lives. Thread-safe.
class UseMarks {
public:
  void mark(const std::string& directory, const std::string& digest);
  /// Whether any process, this one included, uses a key.
  static bool used(const std::string& directory, const std::string& digest);

private:
  ForkSafeMutex mutex_;
  Descriptor file_;
};

} // namespace sagebwd
