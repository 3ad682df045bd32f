//===- block.cpp - A thread block, its threads as fibers --------------------===//
//
// A fiber runs until it has to wait for others, and then passes control to the next that can run:
// one of its warp while there is any, then one of another warp. With a seed warps change whenever
// a warp has come together, and lanes take turns in any order.
//
// A bulk copy takes place when nobody can run and somebody waits at its barrier; with a seed also
// whenever control passes.
//
//===----------------------------------------------------------------------===//

// longjmp goes from stack to stack, which the checked one takes for an error.
#undef _FORTIFY_SOURCE

#include "tests/simulator/block.h"
#include "tests/simulator/machine.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <thread>

namespace simulator {

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr size_t kGuardBytes = 4096;
/// Stacks begin at different places in their memory: those of all threads would share the cache's
/// lines.
constexpr size_t kStepBytes = 1088, kSteps = 64;
constexpr unsigned kSwitchesAWarp = 4;

} // namespace

Block::Block() : fibers_(kMostThreads), warps_(kMostThreads / kWarp) {
  const size_t bytes = (kMostThreads + 1) * kStackBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::bad_alloc();
  const auto first = (reinterpret_cast<uintptr_t>(memory) | (kStackBytes - 1)) + 1;
  stacks_ = reinterpret_cast<char*>(first);
  for (unsigned i = 0; i < kMostThreads; ++i) {
    Fiber* fiber = &fibers_[i];
    fiber->home = this;
    fiber->warp = &warps_[i / kWarp];
    fiber->number = i % kWarp;
    mprotect(stack(i), kGuardBytes, PROT_NONE);
    std::memcpy(stack(i) + kStackBytes - kOwnerBytes, &fiber, sizeof(fiber));
  }
}

std::string Block::run(const Launch& launch, Index index, uint64_t seed) {
  launch_ = &launch;
  random_ = seed;
  ended_ = waiting_ = synchronisations = 0;
  error_.clear();
  mbarriers.clear();
  under_way.clear();
  for (unsigned i = 0; i < kNamedBarriers; ++i)
    named[i] = NamedBarrier(), named[i].number = i;
  registers = RegisterPool();
  registers.groups.resize(launch.threads / kWarpgroup);
  for (Warpgroup& group : registers.groups)
    group.pool = &registers, group.held = launch.registers;
  const std::span<char> shared = launch.shared_memory();
  std::memset(shared.data(), kPoison, shared.size());
  writers_.assign(shared.size() / 4 + 1, 0);
  warps_in_use_ = launch.threads / kWarp;
  for (unsigned i = 0; i < launch.threads; ++i)
    prepare(i, index, shared);
  turn_ = 0;
  start();
  if (ended_ == launch.threads) {
    const std::string left = what_is_left();
    return left.empty() ? "" : "block " + fibers_[0].block_text() + " has ended, but " + left;
  }
  for (Fiber& fiber : fibers_) // what they left on their stacks is forgotten
    fiber.started = false;
  return error_.empty() ? "deadlock: " + who_waits() : error_;
}

[[gnu::noinline]] void Block::pass_on(Fiber* me) {
  if (SET_PLACE(me->context))
    return;
  Fiber* next = choose();
  if (next == me)
    return;
  if (next)
    enter(*next);
  leave();
}
void Block::stop(std::string error) {
  error_ = std::move(error);
  leave();
}
void Block::end(Fiber& fiber) {
  fiber.ended = true;
  ++ended_;
  release_all();
  pass_on(&fiber);
  fiber.ended = false; // the next block's
}
void Block::wait_for_all(Fiber& fiber) {
  fiber.at_barrier = true;
  ++waiting_;
  release_all();
  pass_on(&fiber);
}
void Block::wait(Fiber& fiber, const char* what, int line, Queue& queue) {
  fiber.waits_for = what;
  fiber.line = line;
  fiber.waits_at = &queue;
  queue.fibers.push_back(&fiber);
  pass_on(&fiber);
  fiber.waits_at = nullptr;
}
void Block::wake(Queue& queue) {
  for (Fiber* fiber : queue.fibers)
    fiber->warp->ready |= 1u << fiber->number;
  queue.fibers.clear();
}
void Block::perhaps_yield(Fiber& fiber) {
  if (!coin())
    return;
  fiber.warp->ready |= 1u << fiber.number;
  pass_on(&fiber);
}

void Block::prepare(unsigned i, Index index, std::span<char> shared) {
  Fiber& fiber = fibers_[i];
  fiber.thread = {i, 0, 0};
  fiber.block = index;
  fiber.threads = {launch_->threads, 1, 1};
  fiber.blocks = launch_->blocks;
  fiber.shared = shared.data();
  fiber.shared_bytes = static_cast<unsigned>(shared.size());
  fiber.writers = writers_.data();
  fiber.reset();
  if (i % kWarp == 0)
    *fiber.warp = Warp(), fiber.warp->ready = ~0u;
  if (!fiber.started) {
    getcontext(&fiber.fresh);
    fiber.fresh.uc_stack.ss_sp = stack(i) + kGuardBytes;
    fiber.fresh.uc_stack.ss_size =
        kStackBytes - kGuardBytes - kOwnerBytes - i % kSteps * kStepBytes;
    fiber.fresh.uc_link = nullptr;
    makecontext(&fiber.fresh, &Block::live, 0);
  }
}
/// A fiber's life: a thread of one block after the other.
void Block::live() {
  Fiber& self = static_cast<Fiber&>(lane());
  for (;;) {
    self.home->launch_->kernel(self.home->launch_->params);
    self.check_end();
    self.home->end(self);
  }
}
[[gnu::noinline]] void Block::start() {
  if (!SET_PLACE(outside_))
    enter(*choose());
}
[[gnu::noinline]] void Block::leave() { GO_TO(outside_); }
[[gnu::noinline]] void Block::enter(Fiber& fiber) {
  fiber.waits_for = nullptr;
  if (fiber.started)
    GO_TO(fiber.context);
  fiber.started = true;
  setcontext(&fiber.fresh);
  __builtin_unreachable();
}

/// Who runs next: none if all have ended, or wait for each other. This is asked at every switch, so
/// that one random number serves for all that is drawn: its bits are apart from each other.
Fiber* Block::choose() {
  const uint32_t drawn = has_seed() ? random() : 0;
  if (has_seed()) {
    if (!under_way.empty() && (drawn >> 5) % 8 == 0)
      land_one(true);
    if ((drawn >> 8) % kSwitchesAWarp == 0)
      turn_ = (drawn >> 11) % warps_in_use_;
  }
  for (;;) {
    if (Fiber* next = choose_ready(drawn % kWarp))
      return next;
    if (!land_one(false))
      return nullptr;
  }
}
/// The first lane from `skip` on, of the first warp from the one in turn on.
inline Fiber* Block::choose_ready(int skip) {
  for (unsigned i = 0; i < warps_in_use_; ++i, turn_ = turn_ + 1 < warps_in_use_ ? turn_ + 1 : 0) {
    Warp& warp = warps_[turn_];
    if (!warp.ready)
      continue;
    const unsigned lane = (std::countr_zero(std::rotr(warp.ready, skip)) + skip) % kWarp;
    warp.ready &= ~(1u << lane);
    return &fibers_[turn_ * kWarp + lane];
  }
  return nullptr;
}
/// A bulk copy takes place: any, or one that somebody waits for.
bool Block::land_one(bool any) {
  const size_t first = has_seed() && !under_way.empty() ? random() % under_way.size() : 0;
  for (size_t i = 0; i < under_way.size(); ++i) {
    const auto place = under_way.begin() + (first + i) % under_way.size();
    if (!any && place->barrier->fibers.empty())
      continue;
    const BulkCopy copy = std::move(*place);
    under_way.erase(place);
    copy.take_place();
    copy.by->count_bytes(copy);
    return true;
  }
  return false;
}
void Block::release_all() {
  if (waiting_ == 0 || waiting_ + ended_ < launch_->threads)
    return;
  waiting_ = 0;
  ++synchronisations;
  for (unsigned i = 0; i < launch_->threads; ++i)
    if (fibers_[i].at_barrier) {
      fibers_[i].at_barrier = false;
      fibers_[i].warp->ready |= 1u << fibers_[i].number;
    }
}

/// "warp 0: lanes 0 to 15 at mma.sync, lanes 16 to 31 have ended; warp 1: the same; warp 2: ..."
std::string Block::who_waits() const {
  const auto state = [](const Fiber& fiber) -> std::string {
    if (fiber.ended)
      return "have ended";
    return std::string("at ") + fiber.waits_for + (fiber.waits_at ? fiber.waits_at->state() : "") +
           (fiber.line ? " in line " + std::to_string(fiber.line) : "");
  };
  std::string text, last;
  for (unsigned first = 0; first < launch_->threads; first += kWarp) {
    std::string lanes;
    for (unsigned i = 0, end; i < kWarp; i = end) {
      for (end = i + 1; end < kWarp; ++end)
        if (state(fibers_[first + end]) != state(fibers_[first + i]))
          break;
      lanes += (i ? ", lanes " : " lanes ") + std::to_string(i) + " to " + std::to_string(end - 1) +
               " " + state(fibers_[first + i]);
    }
    text += (first ? "; warp " : "warp ") + std::to_string(first / kWarp) + ":" +
            (lanes == last ? " the same" : lanes);
    last = lanes;
  }
  return text;
}
/// Names what is left that no block may leave behind when it ends.
std::string Block::what_is_left() const {
  if (!under_way.empty())
    return "a bulk copy of " + std::to_string(under_way[0].bytes) + " bytes, started in line " +
           std::to_string(under_way[0].line) + ", is under way to " + under_way[0].barrier->name();
  for (const auto& [address, barrier] : mbarriers)
    if (barrier.bytes != 0)
      return barrier.name() + " has had " +
             (barrier.bytes > 0
                  ? std::to_string(barrier.bytes) + " bytes fewer than were announced"
                  : std::to_string(-barrier.bytes) + " bytes more than were announced");
  for (unsigned first = 0; first < warps_in_use_; first += 4)
    for (unsigned i = first; i < first + 4; ++i)
      if ((i < warps_in_use_ ? warps_[i].issued : 0) != warps_[first].issued)
        return "warp " + std::to_string(i) + " has not executed every wgmma of its warpgroup";
  return "";
}

std::string run(const Launch& launch) {
  // Stacks are kept from launch to launch; one launch at a time.
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Block>> machines;
  std::lock_guard lock(mutex);

  if (launch.threads == 0 || launch.threads % kWarp != 0 || launch.threads > kMostThreads)
    return "a block of " + std::to_string(launch.threads) + " threads";
  const auto [x, y, z] = launch.blocks;
  std::atomic<uint64_t> next{0};
  std::mutex error_mutex;
  std::string error;
  const auto work = [&](Block& machine) {
    for (uint64_t i; (i = next++) < uint64_t(x) * y * z;) {
      const Index index{static_cast<unsigned>(i % x), static_cast<unsigned>(i / x % y),
                        static_cast<unsigned>(i / x / y)};
      std::string found = machine.run(launch, index, (launch.seed + i) * 0x9e3779b97f4a7c15 | 1);
      if (!found.empty()) {
        std::lock_guard lock(error_mutex);
        error = std::move(found);
        next = uint64_t(x) * y * z;
      }
    }
  };
  const size_t workers = std::clamp<uint64_t>(uint64_t(x) * y * z, 1,
                                              std::max(1u, std::thread::hardware_concurrency()));
  while (machines.size() < workers)
    machines.push_back(std::make_unique<Block>());
  std::vector<std::thread> threads;
  for (size_t i = 1; i < workers; ++i)
    threads.emplace_back([&, i] { work(*machines[i]); });
  work(*machines[0]);
  for (std::thread& thread : threads)
    thread.join();
  return error;
}

} // namespace simulator
