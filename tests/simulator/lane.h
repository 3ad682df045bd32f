//===- lane.h - What a simulated CUDA thread asks of its machine ------------===//
//
// The only thing that kernels, compiled one by one, and the simulator share. No header of C++ is
// included: a kernel's compile is to be short.
//
//===----------------------------------------------------------------------===//
#pragma once

namespace simulator {

struct Index {
  unsigned x, y, z;
};

/// A's elements; those of B are s8 beside both 8-bit ones.
enum class Element { s8, u8, bf16, fp16 };

/// One lane's part of an mma.sync: 16 x 8, 32 bytes deep.
struct WarpProduct {
  Element element;
  void* d;
  const unsigned* a;
  unsigned b[2];
  const void* c;
};

/// One lane's part of a wgmma: its warp's 16 rows x columns, 32 bytes deep.
struct GroupProduct {
  Element element;
  int columns;
  bool transposed; ///< B's columns are contiguous
  bool accumulate;
  void* d;
  bool a_in_registers;
  unsigned a[4];
  unsigned long long a_tile, b_tile; ///< descriptors
};

class Lane {
public:
  Index thread, block, threads, blocks;
  char* shared; ///< where the block's shared memory begins
  unsigned shared_bytes;

  /// Waits for all lanes of the warp to come to the same place; the last one calls `operate` with
  /// what each has brought.
  virtual void together(const char* what, int line, void* mine,
                        void (*operate)(void* const* lanes)) = 0;
  virtual void wait_for_block(int line) = 0;

  /// Asynchronous copies of 16 bytes, of zeros from nullptr. They take place as late as they may,
  /// or at once: at random where there is a seed.
  virtual void copy(unsigned to, const void* from) = 0;
  virtual void commit_copies() = 0;
  virtual void wait_for_copies(int pending) = 0;
  virtual void publish_copies() = 0;

  virtual void multiply(const WarpProduct&) = 0;
  /// These take place as late as they may, or when they are committed.
  virtual void multiply(const GroupProduct&) = 0;
  virtual void allow_products() = 0;
  virtual void commit_products() = 0;
  virtual void wait_for_products(int pending) = 0;

  /// Ends the launch with an error; a value below 0 is not told.
  [[noreturn]] virtual void fail(const char* what, long long value = -1) = 0;

  /// A place in shared memory, whose alignment is its size.
  char* at(unsigned address, unsigned bytes) {
    if (address % bytes != 0)
      fail("misaligned shared address", address);
    if (address + bytes > shared_bytes)
      fail("address beyond shared memory", address);
    return shared + address;
  }
};

/// Stacks begin at multiples of their size; at the end of each stands whose it is.
constexpr unsigned long kStackBytes = 256 << 10, kOwnerBytes = 64;
inline Lane& lane() {
  const auto here = reinterpret_cast<unsigned long>(__builtin_frame_address(0));
  return **reinterpret_cast<Lane**>((here | (kStackBytes - 1)) + 1 - kOwnerBytes);
}

} // namespace simulator
