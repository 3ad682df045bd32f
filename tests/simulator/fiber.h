//===- fiber.h - A simulated CUDA thread, and its warp ----------------------===//
#pragma once

#include "tests/simulator/lane.h"

#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <ucontext.h>
#include <vector>

namespace simulator {

constexpr unsigned kWarp = 32;

/// Says where to go on. The compiler's own setjmp saves less than the library's.
#if defined(__x86_64__)
using Place = void* [5];
#define SET_PLACE(place) __builtin_setjmp(place)
#define GO_TO(place) __builtin_longjmp(place, 1)
#else
using Place = jmp_buf;
#define SET_PLACE(place) _setjmp(place)
#define GO_TO(place) _longjmp(place, 1)
#endif

class Block;
struct BulkCopy;
struct Mbarrier;
struct Queue;
struct RegisterPool;

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

/// Part of a group that reads shared memory as late as it may.
struct BulkAdd {
  float* to; ///< or
  unsigned short* fp16;
  unsigned from, bytes;
  int group;
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
  unsigned issued = 0;
};

class Fiber final : public Lane {
public:
  Block* home;
  Warp* warp;
  unsigned number; ///< in the warp
  Place context;
  ucontext_t fresh;
  bool started = false, ended = false, at_barrier = false;
  const char* waits_for = nullptr; ///< and the line, or 0
  const Queue* waits_at = nullptr; ///< beyond the warp and __syncthreads
  int line = 0;
  std::vector<Copy> copies;
  int group = 0;
  std::vector<BulkAdd> adds;
  int bulk_group = 0;
  bool unpublished = false, allowed = false;

  void reset(); ///< for the next block
  void check_end();
  std::string block_text() const; ///< "0, 0, 0"
  [[noreturn]] void fail_in(int line, const std::string& what);
  void count_bytes(const BulkCopy&);

  void together(const char* what, int line, void* mine, void (*operate)(void* const*)) override;
  void wait_for_block(int line) override;
  unsigned long long shuffle(unsigned long long value, int from, int line) override;
  void load_matrices(unsigned (&r)[4], unsigned address, bool transposed, int line) override;
  void store_matrices(unsigned address, const unsigned (&r)[4], int line) override;
  unsigned transpose(unsigned two, int line) override;
  void copy(unsigned to, const void* from) override;
  void commit_copies() override { ++group; }
  void wait_for_copies(int pending) override;
  void publish_copies() override {
    unpublished = false;
    ++fences;
  }
  void multiply(const WarpProduct&) override;
  void multiply(const GroupProduct&) override;
  void allow_products() override { allowed = true; }
  void commit_products() override;
  void wait_for_products(int pending) override;

  void init_mbarrier(unsigned barrier, int arrivals, int line) override;
  void publish_mbarriers() override;
  void arrive(unsigned barrier, unsigned bytes, int line) override;
  void wait_for_phase(unsigned barrier, unsigned parity, int line) override;
  void named_barrier(unsigned barrier, unsigned threads, bool waits, int line) override;
  void set_registers(int registers, bool more, int line) override;

  void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                 int line) override;
  void tensor_copy(unsigned to, const void* map, const int (&first)[4], unsigned barrier,
                   int line) override;
  void bulk_add(float* to, unsigned from, unsigned bytes, int line) override;
  void bulk_add(unsigned short* fp16, unsigned from, unsigned bytes, int line) override;
  void commit_bulk() override;
  void wait_for_bulk_reads(int pending) override;

  [[noreturn]] void fail(const char* what, long long value = -1) override;

private:
  Mbarrier& mbarrier(unsigned address, int line);
  void settle(Mbarrier&, int line);
  void start_bulk_copy(unsigned to, unsigned bytes, unsigned barrier, int line,
                       std::function<void()> take_place);
  void start_bulk_add(const BulkAdd&, int line);
  void perform_adds(int last_group);
  void perform_products(int last_group);
};

} // namespace simulator
