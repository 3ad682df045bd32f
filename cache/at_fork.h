//===- at_fork.h - Make fork() safe for mutexes and singletons ------------===//
//
// After fork() only the forking thread exists in the child. If another thread held a mutex, the
// mutex would stay locked for ever, and work that another thread had begun would never be finished.
// The classes of this file prevent both.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

namespace sagebwd {

/// Steps that fork() runs in the forking thread while this object lives: one before the fork, one
/// in the parent and one in the child afterwards. The steps of objects that were made first run
/// first.
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

/// A mutex that is never locked in a forked child: fork() waits until it is free. A thread must
/// hold it only briefly, and must not lock or make another ForkSafeMutex meanwhile.
class ForkSafeMutex {
public:
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

private:
  std::mutex mutex_;
  AtFork at_fork_{[this] { lock(); }, [this] { unlock(); }, [this] { unlock(); }};
};

/// While an object lives, no other thread can fork. A thread may have several objects; when it
/// makes the first, it must not hold a ForkSafeMutex.
class NoFork {
public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
};

/// The only object of its kind in a process. The first caller makes the object, which is never
/// destroyed, because threads may use it while the process ends. A function-local static would not
/// do: if a process forks while the static is being made, the child waits for it for ever.
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
