//===- barriers.h - What the threads of a block wait at ----------------------===//
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace simulator {

class Fiber;

/// Fibers that wait until they are woken.
struct Queue {
  std::vector<Fiber*> fibers;
  virtual std::string state() const = 0; ///< for the report of a deadlock

protected:
  ~Queue() = default;
};

/// In shared memory; a phase ends when arrivals and announced bytes are all there.
struct Mbarrier final : Queue {
  unsigned address = 0;
  int arrivals = 0; ///< of each phase
  int pending = 0;  ///< arrivals that the phase still waits for
  int bytes = 0;    ///< that it still waits for; below 0: not announced so far
  unsigned phase = 0;
  size_t unseen =
      0; ///< fibers that the end of the last phase has woken and that have not run since
  const Fiber* initialiser = nullptr;
  unsigned initialised = 0; ///< after so many synchronisations of the block
  bool published = false;

  std::string name() const;
  std::string state() const override;
};

constexpr unsigned kNamedBarriers = 16, kWarpgroup = 128;

struct NamedBarrier final : Queue {
  unsigned number = 0;
  unsigned threads = 0, arrived = 0; ///< of the phase
  uint32_t warps = 0;                ///< which have arrived
  unsigned phase = 0;

  std::string state() const override;
};

/// Tells what setmaxnreg has given a warpgroup, and asks for.
struct Warpgroup final : Queue {
  const struct RegisterPool* pool = nullptr;
  int held = 0; ///< by each thread
  int wanted = 0;
  bool more = false;
  uint32_t warps = 0;   ///< which have come
  unsigned changes = 0; ///< done so far

  bool complete() const;
  std::string state() const override;
};

struct RegisterPool {
  int left = 0; ///< for 128 threads each
  std::vector<Warpgroup> groups;
};

} // namespace simulator
