//===- block.h - A thread block, its threads as fibers ----------------------===//
#pragma once

#include "tests/simulator/lane.h"

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace simulator {

struct Launch {
  void (*kernel)(const void* params);
  const void* params;
  Index blocks;
  unsigned threads;
  int registers; ///< of a thread, where setmaxnreg has not changed them
  /// Of the CPU's thread that asks.
  std::function<std::span<char>()> shared_memory;
  uint64_t seed; ///< of the order in which warps and lanes run; 0: one after the other
};

/// Runs all blocks; says what went wrong.
std::string run(const Launch&);

} // namespace simulator
