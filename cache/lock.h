//===- lock.h - Locks on one byte of a file for each key ------------------===//
//
// The locks are open-file-description locks on single bytes of one file. They exclude threads as
// well as processes, vanish with the process that holds them, and leave no files behind. A lock
// only saves work and is not needed for correctness: if the file system has no locks, or a lock is
// not released in time, work goes on without it.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/at_fork.h"
#include "cache/posix.h"

#include <chrono>
#include <functional>
#include <string>

namespace sagebwd {

/// Exclusive use of one key while the object lives.
class KeyLock {
public:
  /// Called once, when the wait has lasted two seconds, with the holder of the key ("process 4711
  /// (python3)", or "another process" if this machine cannot tell) and the longest time that is
  /// left.
  using OnWait = std::function<void(const std::string& holder, std::chrono::milliseconds left)>;

  /// Waits until the key is free, until `limit` has passed, or until `enough()`, which is called
  /// between attempts, returns true because there is nothing left to wait for.
  KeyLock(const std::string& directory, const std::string& digest, std::chrono::milliseconds limit,
          const std::function<bool()>& enough, const OnWait& on_wait = nullptr);
  ~KeyLock();
  KeyLock(const KeyLock&) = delete;
  KeyLock& operator=(const KeyLock&) = delete;

  bool held() const { return static_cast<bool>(file_); }
  bool waited() const { return waited_; }       ///< another thread or process held it at first
  bool timed_out() const { return timed_out_; } ///< and still holds it

private:
  static constexpr std::chrono::milliseconds kLongestPause{20}, kSilence{2000};

  Descriptor file_; ///< open only while the lock is held
  off_t byte_ = 0;
  bool waited_ = false, timed_out_ = false;
};

/// Marks keys as used by this process, while the object lives. Thread-safe.
class UseMarks {
public:
  void mark(const std::string& directory, const std::string& digest);
  /// Whether any process, including this one, uses a key.
  static bool used(const std::string& directory, const std::string& digest);

private:
  ForkSafeMutex mutex_;
  Descriptor file_;
};

} // namespace sagebwd
