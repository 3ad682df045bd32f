//===- parallel_for.cpp - Work on several threads that can be interrupted -===//

#include "runtime/parallel_for.h"
#include "cache/at_fork.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace sagebwd {
namespace {

/// The time between two calls of a watch.
constexpr std::chrono::milliseconds kPause{50};

thread_local std::function<void()>* current_watch = nullptr;
/// The flag of the loop for which this thread works.
thread_local const std::atomic<bool>* interrupted = nullptr;

/// Set when the process ends; `ends_it` is the thread that ends it.
std::atomic<bool> ending{false};
std::atomic<std::thread::id> ends_it{};
std::atomic<bool> cut_short{false}; ///< see is_cut_short()

/// Counts the running loops, for which the end of the process waits.
class UnderWay {
public:
  static UnderWay& instance() {
    static constinit Single<UnderWay> under_way;
    return under_way.get([] { return new UnderWay; });
  }
  void begin() {
    const std::lock_guard lock(mutex_);
    ++count_;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    --count_;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPatience, [&] { return count_ == 0; });
  }

private:
  /// The longest wait. A kernel that is being compiled is compiled to its end, which takes two
  /// seconds at most on an idle machine.
  static constexpr std::chrono::seconds kPatience{30};

  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
  AtFork at_fork_{[this] { mutex_.lock(); }, [this] { mutex_.unlock(); },
                  [this] {
                    count_ = 0; // the child does not have those threads
                    mutex_.unlock();
                  }};
};

class Loop {
public:
  Loop(size_t count, const std::function<void(size_t)>& work,
       const std::function<void(size_t)>& done)
      : count_(count), work_(work), done_(done) {}

  void run(size_t width) {
    // The calling thread then only watches, and does not work.
    const bool attends = done_ || current_watch;
    std::vector<std::thread> helpers;
    if (!interrupted) // nested loops start no threads
      start(helpers, std::min(count_, width) - (attends ? 0 : 1));
    if (helpers.empty())
      return work_alone();
    attends ? attend() : work();
    for (std::thread& helper : helpers)
      helper.join();
    if (cause_)
      std::rethrow_exception(cause_);
    if (error_)
      std::rethrow_exception(error_);
  }

private:
  void start(std::vector<std::thread>& helpers, size_t number) {
    try {
      for (size_t i = 0; i < number; ++i) {
        ++working_;
        helpers.emplace_back([this] {
          work();
          std::lock_guard lock(mutex_);
          --working_;
          changed_.notify_one();
        });
      }
    } catch (const std::system_error&) {
      // No more threads can be made: the existing threads do the work.
      --working_;
    }
  }

  void work_alone() {
    const auto* outer = std::exchange(interrupted, interrupted ? interrupted : &interrupted_);
    try {
      for (size_t i = 0; i < count_; ++i) {
        check_interrupt();
        work_(i);
        if (done_)
          done_(i);
      }
    } catch (...) {
      interrupted = outer;
      throw;
    }
    interrupted = outer;
  }

  void work() {
    const auto* outer = std::exchange(interrupted, &interrupted_);
    for (size_t i; !stop_ && (i = next_++) < count_;)
      try {
        work_(i);
        std::lock_guard lock(mutex_);
        if (done_)
          news_.push_back(i);
        changed_.notify_one();
      } catch (...) {
        std::lock_guard lock(mutex_);
        stop_ = true;
        if (!error_ || i < error_index_) {
          error_ = std::current_exception();
          error_index_ = i;
        }
      }
    interrupted = outer;
  }

  void attend() try {
    std::unique_lock lock(mutex_);
    while (working_ > 0 || !news_.empty()) {
      changed_.wait_for(lock, kPause, [&] { return working_ == 0 || !news_.empty(); });
      std::deque<size_t> news = std::exchange(news_, {});
      lock.unlock();
      for (size_t i : news)
        done_(i);
      check_interrupt();
      lock.lock();
    }
  } catch (...) {
    cause_ = std::current_exception();
    stop_ = interrupted_ = true;
  }

  const size_t count_;
  const std::function<void(size_t)>&work_, &done_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};        ///< no further index begins
  std::atomic<bool> interrupted_{false}; ///< indices that have begun may end early
  std::atomic<size_t> working_{0};       ///< helper threads that still work
  std::exception_ptr cause_;             ///< the reason for the interruption
  std::mutex mutex_;                     ///< guards the members below
  std::condition_variable changed_;
  std::deque<size_t> news_;
  std::exception_ptr error_;
  size_t error_index_ = 0;
};

} // namespace

void parallel_for(size_t count, size_t width, const std::function<void(size_t)>& work,
                  const std::function<void(size_t)>& done) {
  if (count == 0)
    return;
  static constinit Single<const bool> registered;
  registered.get([] {
    end_work_at_exit();
    return new const bool(true);
  });
  struct Scope {
    Scope() { UnderWay::instance().begin(); }
    ~Scope() { UnderWay::instance().end(); }
  } const under_way;
  Loop(count, work, done).run(std::max<size_t>(1, width));
}

void end_work() {
  ends_it = std::this_thread::get_id();
  ending = true;
  UnderWay::instance().wait();
}

void end_work_at_exit() {
  std::atexit([] {
    cut_short = true;
    end_work();
  });
}
void await_work_at_exit() { std::atexit(end_work); }
bool is_cut_short() { return cut_short; }

bool is_left_behind() { return ending && ends_it.load() != std::this_thread::get_id(); }

ScopedWatch::ScopedWatch(std::function<void()> watch)
    : watch_(std::move(watch)), outer_(std::exchange(current_watch, &watch_)) {}
ScopedWatch::~ScopedWatch() { current_watch = outer_; }

const std::atomic<bool>* interrupt_flag() { return interrupted; }
bool is_interrupted(const std::atomic<bool>* flag) { return ending || (flag && *flag); }

void check_interrupt() {
  if (is_interrupted(interrupted))
    throw Interrupted();
  if (current_watch)
    (*current_watch)();
}

} // namespace sagebwd
