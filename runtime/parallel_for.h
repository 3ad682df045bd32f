//===- parallel_for.h - Work on several threads, and its interruption -----===//
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <stdexcept>

namespace sagebwd {

/// Calls work(0) ... work(count - 1) on up to `width` threads, or on as many of them as can be had.
/// After an error nothing more is begun; of several errors, the one of the first index is raised.
/// `done`, where given, is called on the calling thread after each index that is done, in the order
/// in which they are; what it raises ends the work likewise. Within `work`, a further parallel_for
/// takes no threads of its own.
void parallel_for(size_t count, size_t width, const std::function<void(size_t)>& work,
                  const std::function<void(size_t)>& done = nullptr);

/// While it lives, what this thread waits for can be interrupted: `watch` is called several times a
/// second, on this thread, and what it raises ends the work and is raised in its place.
class ScopedWatch {
public:
  explicit ScopedWatch(std::function<void()> watch);
  ~ScopedWatch();
  ScopedWatch(const ScopedWatch&) = delete;
  ScopedWatch& operator=(const ScopedWatch&) = delete;

private:
  std::function<void()> watch_, *outer_;
};

/// Ends work whose result nobody waits for any more; parallel_for() raises the cause instead.
class Interrupted : public std::runtime_error {
public:
  Interrupted() : std::runtime_error("the work was interrupted") {}
};

/// Set once the parallel_for that this thread works for is interrupted; null where it works for
/// none.
const std::atomic<bool>* interrupt_flag();
/// Whether that flag says so, or the process ends.
bool is_interrupted(const std::atomic<bool>* flag);
/// The process ends: work of other threads is interrupted and waited for, so that nothing is taken
/// down around it. What begins later raises Interrupted.
void end_work();
/// The same when the process exits, before what was set up before this call is taken down. It may
/// be called again.
void end_work_at_exit();
/// Whether another thread than this one has ended the work.
bool is_left_behind();
/// For loops that last: calls the watch where this thread has one, and raises Interrupted where it
/// works for a parallel_for that has been interrupted, or the process ends.
void check_interrupt();

} // namespace sagebwd
