//===- fiber.h - A simulated CUDA thread, and its warp ----------------------===//
#pragma once

#include "tests/simulator/lane.h"

#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

namespace simulator {

constexpr unsigned kWarp = 32;

class Block;

struct Copy {
  char* to; ///< nullptr once it has taken place
  const void* from;
  int group;

  void take_place() {
    if (to && from)
      std::memcpy(to, from, 16);
    else if (to)
      std::memset(to, 0, 16);
    to = nullptr;
  }
};

struct Warp {
  uint32_t ready = 0; ///< lanes that can run
  // Who has come together.
  unsigned arrived = 0;
  void* brought[kWarp] = {};
  void (*operate)(void* const*) = nullptr;
  const char* what = "";
  int line = 0;
  // wgmma: those of a group for each of 32 lanes.
  struct Issued {
    std::vector<GroupProduct> lanes;
    int group;
  };
  std::vector<Issued> products;
  int group = 0;
};

class Fiber final : public Lane {
public:
  Block* home;
  Warp* warp;
  unsigned number; ///< in the warp
  jmp_buf context;
  ucontext_t fresh;
  bool started = false, ended = false, at_barrier = false;
  const char* waits_for = nullptr; ///< and the line, or 0
  int line = 0;
  std::vector<Copy> copies;
  int group = 0;
  bool unpublished = false, allowed = false;

  void together(const char* what, int line, void* mine, void (*operate)(void* const*)) override;
  void wait_for_block(int line) override;
  void copy(unsigned to, const void* from) override;
  void commit_copies() override { ++group; }
  void wait_for_copies(int pending) override;
  void publish_copies() override { unpublished = false; }
  void multiply(const WarpProduct&) override;
  void multiply(const GroupProduct&) override;
  void allow_products() override { allowed = true; }
  void commit_products() override;
  void wait_for_products(int pending) override;
  void fail(const char* what, long long value = -1) override;

private:
  void perform_products(int last_group);
};

} // namespace simulator
