//===- tile/prepass/front_ahead.cuh - Tokens' vectors on their way -----------===//
//
// Norm and RoPE wait for memory alone. So a thread has several vectors on their way into shared
// memory, where they take no registers. It reads only what it asked for itself, and waits for no
// other thread.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/prepass/front_rows.cuh"

/// The vectors that a thread has on their way or is reading. With four, copies on an H200 are as
/// fast as those of memory to memory; two are 7 % slower.
constexpr int FRONT_SLOTS = 4;

/// A ring of a thread's vectors of TENSORS tensors.
template <int TENSORS> struct FrontAhead {
  uint4 octets[FRONT_SLOTS][TENSORS][2][THREADS];

  /// Asks for two octets of a token in the caller's tensor; zeros for what is not there.
  __device__ __forceinline__ void ask(int slot, int tensor, const Element* token,
                                      const FrontLane& own, bool is_token) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      void* to = &octets[slot][tensor][j][threadIdx.x];
      cp_async_16_or_zeros(static_cast<u32>(__cvta_generic_to_shared(to)), token + own.first[j],
                           own.exists[j] && is_token);
    }
  }
  __device__ __forceinline__ void unpack_to(Octets& x, int slot, int tensor) const {
    const uint4 words[2] = {octets[slot][tensor][0][threadIdx.x],
                            octets[slot][tensor][1][threadIdx.x]};
    unpack_octets(x, words);
  }
};

/// Which slot of the ring a walk reads. `ask(slot)` asks for the walk's next vector, if there is
/// one more, and is called once for each that is read, and ahead of them FRONT_SLOTS - 1 times.
struct FrontSlot {
  int now = 0;

  template <typename Ask> __device__ __forceinline__ void begin(const Ask& ask) {
#pragma unroll
    for (int slot = 0; slot < FRONT_SLOTS - 1; ++slot) {
      ask(slot);
      cp_async_commit();
    }
  }
  /// Calls read(slot) when the walk's vector is there.
  template <typename Read, typename Ask>
  __device__ __forceinline__ void next(const Read& read, const Ask& ask) {
    cp_async_wait<FRONT_SLOTS - 2>();
    read(now);
    ask((now + FRONT_SLOTS - 1) % FRONT_SLOTS); // whose vector has been read in the turn before
    cp_async_commit();
    now = (now + 1) % FRONT_SLOTS;
  }
};

/// What the threads of a block share.
template <int TENSORS> struct FrontShared {
  FrontAhead<TENSORS> ahead;
  TokenRows rows;
};
