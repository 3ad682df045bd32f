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

/// A's elements; those of B are s8 beside both 8-bit ones. Sums are in INT32 or FP32, and of
/// fp16_half_sums in FP16, two in a word.
enum class Element { s8, u8, bf16, fp16, fp16_half_sums };

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
  bool transposed;   ///< B's columns are contiguous
  bool a_transposed; ///< A's rows are
  bool accumulate;
  void* d;
  bool a_in_registers;
  unsigned a[4];
  unsigned long long a_tile, b_tile; ///< descriptors
};

/// A tensor as cuTensorMapEncodeTiled has described it, in the first bytes of a TensorMap.
struct Tensor {
  static constexpr unsigned kMark = 0x7e4503a9;
  unsigned mark, element_bytes, swizzle; ///< bytes of a swizzled row, or 0
  const char* address;
  unsigned long long strides[3]; ///< in bytes, of all but the innermost dimension
  unsigned extents[4], box[4];
};

class Lane {
public:
  Index thread, block, threads, blocks;
  char* shared; ///< where the block's shared memory begins
  unsigned shared_bytes;
  unsigned* writers; ///< for each word of shared memory: the thread and its count of fences
  unsigned fences = 0;

  /// Waits for all lanes of the warp to come to the same place; the last one calls `operate` with
  /// what each has brought.
  virtual void together(const char* what, int line, void* mine,
                        void (*operate)(void* const* lanes)) = 0;
  virtual void wait_for_block(int line) = 0;

  /// These have every lane of the warp together too. They are not the kernels' own code, as that is
  /// compiled again for each kernel, and for a short compile.
  virtual unsigned long long shuffle(unsigned long long value, int from, int line) = 0;
  /// r[m] of a lane: row lane / 4 of matrix m, its 4 bytes from 4 * (lane % 4) on; transposed, as
  /// 16-bit elements: rows 2 (lane % 4) and the next, column lane / 4. Of matrix m lane 8 m + i has
  /// the address of row i.
  virtual void load_matrices(unsigned (&r)[4], unsigned address, bool transposed, int line) = 0;
  virtual void store_matrices(unsigned address, const unsigned (&r)[4], int line) = 0;
  virtual unsigned transpose(unsigned two, int line) = 0;

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

  virtual void init_mbarrier(unsigned barrier, int arrivals, int line) = 0;
  virtual void publish_mbarriers() = 0;
  virtual void arrive(unsigned barrier, unsigned bytes, int line) = 0;
  virtual void wait_for_phase(unsigned barrier, unsigned parity, int line) = 0;
  virtual void named_barrier(unsigned barrier, unsigned threads, bool waits, int line) = 0;
  virtual void set_registers(int registers, bool more, int line) = 0;

  /// These take place when nobody else can run, or at any time.
  virtual void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                         int line) = 0;
  virtual void tensor_copy(unsigned to, const void* map, const int (&first)[4], unsigned barrier,
                           int line) = 0;
  /// These take place when they are waited for, or when they are committed.
  virtual void bulk_add(float* to, unsigned from, unsigned bytes, int line) = 0;
  virtual void bulk_add(unsigned short* fp16, unsigned from, unsigned bytes, int line) = 0;
  virtual void commit_bulk() = 0;
  virtual void wait_for_bulk_reads(int pending) = 0;

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
  /// Before its next fence.proxy.async asynchronous reads may miss what this thread has written.
  void wrote(unsigned address, unsigned bytes) {
    for (unsigned i = address / 4; i < (address + bytes + 3) / 4; ++i)
      writers[i] = (fences + 1) << 10 | thread.x;
  }
};

/// Stacks begin at multiples of their size; at the end of each stands whose it is.
constexpr unsigned long kStackBytes = 256 << 10, kOwnerBytes = 64;
inline Lane& lane() {
  const auto here = reinterpret_cast<unsigned long>(__builtin_frame_address(0));
  return **reinterpret_cast<Lane**>((here | (kStackBytes - 1)) + 1 - kOwnerBytes);
}

} // namespace simulator
