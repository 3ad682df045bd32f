//===- at_fork.h - What a forked child finds ------------------------------===//
//
// Of a process that forks only the thread that does lives on: a mutex that another one held would
// be locked for ever, and what another one was about to do is never done.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

namespace sagebwd {

/// What a thread that forks does for as long as this lives: before, and after in each process.
/// Those made first come first.
class AtFork {
public:
  using Step = std::function<void()>;
  AtFork(Step before, Step in_parent, Step in_child);
  ~AtFork();
  AtFork(const AtFork&) = delete;
  AtFork& operator=(const AtFork&) = delete;

private:
  friend struct AtForkList;
  Step before_, in_parent_, in_child_;
};

/// A mutex that no forked child finds locked: fork() waits until it is free. For what is held for a
/// moment; while one is held no other is taken or made.
class ForkSafeMutex {
public:
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

private:
  std::mutex mutex_;
  AtFork at_fork_{[this] { lock(); }, [this] { unlock(); }, [this] { unlock(); }};
};

/// While one lives no other thread forks. A thread may have several; it holds no ForkSafeMutex when
/// it makes the first.
class NoFork {
public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

/// What a process has one of: made by the first to ask, never destroyed, as threads may use it
/// while the process ends. Not a function's static: a child forked while that is made finds it in
/// the making for ever.
template <class T> class Single {
public:
  template <class Make> T& get(const Make& make) {
    if (T* made = it_.load(std::memory_order_acquire))
      return *made;
    const NoFork no_fork;
    if (!it_.load(std::memory_order_acquire))
      it_.store(make(), std::memory_order_release);
    return *it_.load(std::memory_order_acquire);
  }

private:
  std::atomic<T*> it_{nullptr};
};

} // namespace sagebwd
