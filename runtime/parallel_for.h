//===- parallel_for.h - Work on several threads that can be interrupted ---===//
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <stdexcept>

namespace sagebwd {

/// Calls work(0) ... work(count - 1) on up to `width` threads; if threads cannot be made, on fewer.
/// After an error no further index begins; of several errors, the error of the lowest index is
/// raised. If `done` is given, the calling thread calls it after each finished index, in the order
/// in which they finish; an error of `done` also ends the work. A parallel_for inside `work` starts
/// no threads.
void parallel_for(size_t count, size_t width, const std::function<void(size_t)>& work,
                  const std::function<void(size_t)>& done = nullptr);

/// While the object lives, waits and loops of this thread can be interrupted: `watch` is called
/// several times a second on this thread. If `watch` raises an error, the work ends, and that error
/// is raised.
class ScopedWatch {
public:
  explicit ScopedWatch(std::function<void()> watch);
  ~ScopedWatch();
  ScopedWatch(const ScopedWatch&) = delete;
  ScopedWatch& operator=(const ScopedWatch&) = delete;

private:
  std::function<void()> watch_, *outer_;
};

/// Ends work whose result nobody needs any more. parallel_for() raises the cause of the
/// interruption instead.
class Interrupted : public std::runtime_error {
public:
  Interrupted() : std::runtime_error("the work was interrupted") {}
};

/// A flag that is set when the parallel_for for which this thread works is interrupted; null if
/// this thread works for none.
const std::atomic<bool>* interrupt_flag();
/// Whether the flag is set or the process ends.
bool is_interrupted(const std::atomic<bool>* flag);
/// Interrupts the work of other threads and waits for its end, so that the end of the process does
/// not destroy objects in use. Work that begins later raises Interrupted.
void end_work();
/// Calls end_work() when the process exits, before handlers run that were registered before this
/// call. Those that were registered later have run then, and with them libraries may have ended: so
/// work under way is cut short. Repeated calls are allowed.
void end_work_at_exit();
/// Serves programs in which no library's handler is registered later: work under way is done to its
/// end.
void await_work_at_exit();
/// Whether work under way has to end at once.
bool is_cut_short();
/// Whether a thread other than this one has ended the work.
bool is_left_behind();
/// For long loops: calls this thread's watch if there is one, and raises Interrupted if this
/// thread's parallel_for has been interrupted or the process ends.
void check_interrupt();

} // namespace sagebwd
