//===- block.cpp - A thread block, its threads as fibers --------------------===//
//
// A fiber runs until it has to wait for others, and then passes control to the next that can run:
// one of its warp while there is any, then one of another warp. With a seed warps change whenever
// a warp has come together, and lanes take turns in any order.
//
//===----------------------------------------------------------------------===//

// longjmp goes from stack to stack, which the checked one takes for an error.
#undef _FORTIFY_SOURCE

#include "tests/simulator/block.h"
#include "tests/simulator/fiber.h"
#include "tests/simulator/products.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <vector>

namespace simulator {

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr size_t kGuardBytes = 4096;
constexpr int kPoison = 0xff;

} // namespace

class Block {
public:
  Block() : fibers_(kMostThreads), warps_(kMostThreads / kWarp) {
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

  /// Runs block `index`; says what went wrong.
  std::string run(const Launch& launch, Index index, uint64_t seed) {
    launch_ = &launch;
    random_ = seed;
    ended_ = waiting_ = 0;
    error_.clear();
    const std::span<char> shared = launch.shared_memory();
    std::memset(shared.data(), kPoison, shared.size());
    warps_in_use_ = launch.threads / kWarp;
    for (unsigned i = 0; i < launch.threads; ++i)
      prepare(i, index, shared);
    turn_ = 0;
    start();
    if (ended_ == launch.threads)
      return "";
    for (Fiber& fiber : fibers_) // what they left on their stacks is forgotten
      fiber.started = false;
    return error_.empty() ? "deadlock: " + who_waits() : error_;
  }

  /// Goes on with who can run; comes back when `me` is woken.
  [[gnu::noinline]] void pass_on(Fiber* me) {
    if (_setjmp(me->context))
      return;
    if (Fiber* next = choose(); next != me) {
      if (next)
        enter(*next);
      _longjmp(outside_, 1);
    }
  }
  [[noreturn]] void stop(std::string error) {
    error_ = std::move(error);
    _longjmp(outside_, 1);
  }
  void end(Fiber& fiber) {
    fiber.ended = true;
    ++ended_;
    release_barrier();
    pass_on(&fiber);
    fiber.ended = false; // the next block's
  }
  void arrive(Fiber& fiber) {
    fiber.at_barrier = true;
    ++waiting_;
    release_barrier();
    pass_on(&fiber);
  }

  bool has_seed() const { return launch_->seed != 0; }
  uint32_t random() { // xorshift
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return static_cast<uint32_t>(random_ >> 32);
  }

private:
  char* stack(unsigned i) { return stacks_ + i * kStackBytes; }

  void prepare(unsigned i, Index index, std::span<char> shared) {
    Fiber& fiber = fibers_[i];
    fiber.thread = {i, 0, 0};
    fiber.block = index;
    fiber.threads = {launch_->threads, 1, 1};
    fiber.blocks = launch_->blocks;
    fiber.shared = shared.data();
    fiber.shared_bytes = static_cast<unsigned>(shared.size());
    fiber.at_barrier = fiber.ended = fiber.unpublished = fiber.allowed = false;
    fiber.waits_for = nullptr;
    fiber.copies.clear();
    if (i % kWarp == 0)
      *fiber.warp = Warp(), fiber.warp->ready = ~0u;
    if (!fiber.started) {
      getcontext(&fiber.fresh);
      fiber.fresh.uc_stack.ss_sp = stack(i) + kGuardBytes;
      fiber.fresh.uc_stack.ss_size = kStackBytes - kGuardBytes - kOwnerBytes;
      fiber.fresh.uc_link = nullptr;
      makecontext(&fiber.fresh, &Block::live, 0);
    }
  }
  /// A fiber's life: a thread of one block after the other.
  static void live() {
    Fiber& self = static_cast<Fiber&>(lane());
    for (;;) {
      self.home->launch_->kernel(self.home->launch_->params);
      self.home->end(self);
    }
  }
  [[gnu::noinline]] void start() {
    if (!_setjmp(outside_))
      enter(*choose());
  }
  [[noreturn]] void enter(Fiber& fiber) {
    fiber.waits_for = nullptr;
    if (fiber.started)
      _longjmp(fiber.context, 1);
    fiber.started = true;
    setcontext(&fiber.fresh);
    __builtin_unreachable();
  }

  /// Who runs next: none if all have ended, or wait for each other.
  Fiber* choose() {
    if (has_seed() && random() % 4 == 0)
      turn_ = random() % warps_in_use_;
    for (unsigned i = 0; i < warps_in_use_;
         ++i, turn_ = turn_ + 1 < warps_in_use_ ? turn_ + 1 : 0) {
      Warp& warp = warps_[turn_];
      if (!warp.ready)
        continue;
      const int skip = has_seed() ? random() % kWarp : 0;
      const unsigned lane = (std::countr_zero(std::rotr(warp.ready, skip)) + skip) % kWarp;
      warp.ready &= ~(1u << lane);
      return &fibers_[turn_ * kWarp + lane];
    }
    return nullptr;
  }
  void release_barrier() {
    if (waiting_ == 0 || waiting_ + ended_ < launch_->threads)
      return;
    waiting_ = 0;
    for (unsigned i = 0; i < launch_->threads; ++i)
      if (fibers_[i].at_barrier) {
        fibers_[i].at_barrier = false;
        fibers_[i].warp->ready |= 1u << fibers_[i].number;
      }
  }

  /// "warp 0: lanes 0 to 15 at mma.sync, lanes 16 to 31 have ended; warp 1: ..."
  std::string who_waits() const {
    const auto state = [](const Fiber& fiber) -> std::string {
      if (fiber.ended)
        return "have ended";
      return std::string("at ") + fiber.waits_for +
             (fiber.line ? " in line " + std::to_string(fiber.line) : "");
    };
    std::string text;
    for (unsigned first = 0; first < launch_->threads; first += kWarp) {
      text += (first ? "; warp " : "warp ") + std::to_string(first / kWarp) + ":";
      for (unsigned i = 0, end; i < kWarp; i = end) {
        for (end = i + 1; end < kWarp; ++end)
          if (state(fibers_[first + end]) != state(fibers_[first + i]))
            break;
        text += (i ? ", lanes " : " lanes ") + std::to_string(i) + " to " +
                std::to_string(end - 1) + " " + state(fibers_[first + i]);
      }
    }
    return text;
  }

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  char* stacks_;
  jmp_buf outside_;
  const Launch* launch_ = nullptr;
  unsigned warps_in_use_ = 0, turn_ = 0, ended_ = 0, waiting_ = 0;
  uint64_t random_ = 0;
  std::string error_;
};

void Fiber::fail(const char* what, long long value) {
  home->stop("thread " + std::to_string(thread.x) + " of block " + std::to_string(block.x) + ", " +
             std::to_string(block.y) + ", " + std::to_string(block.z) + ": " + what +
             (value < 0 ? "" : " " + std::to_string(value)));
}

void Fiber::together(const char* what, int line, void* mine, void (*operate)(void* const*)) {
  if (warp->arrived == 0) {
    warp->what = what;
    warp->line = line;
    warp->operate = operate;
  } else if (warp->operate != operate || warp->line != line) {
    home->stop("lanes of a warp part: one is at " + std::string(what) + " in line " +
               std::to_string(line) + ", others are at " + warp->what + " in line " +
               std::to_string(warp->line));
  }
  warp->brought[number] = mine;
  waits_for = what;
  this->line = line;
  if (++warp->arrived < kWarp)
    return home->pass_on(this);
  warp->arrived = 0;
  operate(warp->brought);
  warp->ready = ~0u;
  if (home->has_seed())
    return home->pass_on(this);
  warp->ready &= ~(1u << number);
}

void Fiber::wait_for_block(int line) {
  waits_for = "__syncthreads";
  this->line = line;
  home->arrive(*this);
}

void Fiber::copy(unsigned to, const void* from) {
  copies.push_back({at(to, 16), from, group});
  if (home->has_seed() && home->random() % 2)
    copies.back().take_place();
}
void Fiber::wait_for_copies(int pending) {
  std::erase_if(copies, [&](Copy& copy) {
    const bool due = copy.group < group - pending;
    if (due) {
      copy.take_place();
      unpublished = true;
    }
    return due;
  });
}

void Fiber::multiply(const WarpProduct& product) {
  together("mma.sync", 0, const_cast<WarpProduct*>(&product), [](void* const* lanes) {
    simulator::multiply(reinterpret_cast<const WarpProduct* const*>(lanes));
  });
}

void Fiber::multiply(const GroupProduct& product) {
  if (!allowed)
    fail("wgmma without a fence behind the last wait");
  if (unpublished)
    fail("wgmma without fence.proxy.async behind the copies that came before");
  together("wgmma", 0, const_cast<GroupProduct*>(&product), [](void* const* lanes) {
    Warp& warp = *static_cast<Fiber&>(lane()).warp;
    warp.products.push_back({{}, warp.group});
    for (unsigned i = 0; i < kWarp; ++i) {
      const auto& product = *static_cast<const GroupProduct*>(lanes[i]);
      const auto& first = *static_cast<const GroupProduct*>(lanes[0]);
      if (product.a_tile != first.a_tile || product.b_tile != first.b_tile ||
          product.accumulate != first.accumulate)
        lane().fail("wgmma's operands are not those of lane 0, in lane", i);
      warp.products.back().lanes.push_back(product);
    }
  });
}
void Fiber::perform_products(int last_group) {
  std::erase_if(warp->products, [&](const Warp::Issued& issued) {
    const bool due = issued.group <= last_group;
    if (due)
      simulator::multiply(issued.lanes.data(), thread.x / kWarp % 4, shared, shared_bytes);
    return due;
  });
}
void Fiber::commit_products() {
  together("wgmma.commit_group", 0, nullptr, [](void* const*) {
    Fiber& last = static_cast<Fiber&>(lane());
    if (last.home->has_seed() && last.home->random() % 2)
      last.perform_products(last.warp->group);
    ++last.warp->group;
  });
}
void Fiber::wait_for_products(int pending) {
  allowed = false;
  together("wgmma.wait_group", 0, &pending, [](void* const* lanes) {
    Fiber& last = static_cast<Fiber&>(lane());
    last.perform_products(last.warp->group - 1 - *static_cast<int*>(lanes[0]));
  });
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
