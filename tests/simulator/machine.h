//===- machine.h - What runs a block: its fibers, who waits, what is under way ----===//
#pragma once

#include "tests/simulator/barriers.h"
#include "tests/simulator/block.h"
#include "tests/simulator/fiber.h"

#include <map>

namespace simulator {

inline constexpr int kPoison = 0xff; ///< each byte of memory that nobody has written

/// A copy that a thread has started and a barrier waits for.
struct BulkCopy {
  Fiber* by;
  int line;
  Mbarrier* barrier;
  unsigned bytes;
  std::function<void()> take_place;
};

class Block {
public:
  Block();

  /// Runs block `index`; says what went wrong.
  std::string run(const Launch& launch, Index index, uint64_t seed);

  /// Goes on with who can run; comes back when `me` is woken.
  void pass_on(Fiber* me);
  [[noreturn]] void stop(std::string error);
  void end(Fiber&);
  void wait_for_all(Fiber&);

  void wait(Fiber&, const char* what, int line, Queue&);
  void wake(Queue&);
  /// With a seed others may run now.
  void perhaps_yield(Fiber&);

  bool has_seed() const { return launch_->seed != 0; }
  uint32_t random() { // xorshift
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return static_cast<uint32_t>(random_ >> 32);
  }
  bool coin() { return has_seed() && random() % 2; }

  unsigned threads() const { return launch_->threads; }
  Fiber& fiber(unsigned i) { return fibers_[i]; }

  std::map<unsigned, Mbarrier> mbarriers; ///< by address
  NamedBarrier named[kNamedBarriers];
  RegisterPool registers;
  unsigned synchronisations = 0; ///< of the whole block or by named barriers, so far
  std::vector<BulkCopy> under_way;

private:
  char* stack(unsigned i) { return stacks_ + i * kStackBytes; }
  void prepare(unsigned i, Index index, std::span<char> shared);
  static void live();
  void start();
  [[noreturn]] void enter(Fiber&);
  [[noreturn]] void leave();
  Fiber* choose();
  Fiber* choose_ready(int skip);
  bool land_one(bool any);
  void release_all();
  std::string who_waits() const;
  std::string what_is_left() const;

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<unsigned> writers_;
  char* stacks_;
  Place outside_;
  const Launch* launch_ = nullptr;
  unsigned warps_in_use_ = 0, turn_ = 0, ended_ = 0, waiting_ = 0;
  uint64_t random_ = 0;
  std::string error_;
};

} // namespace simulator
