//===- tile/sla/matrix_sums_wgmma.cuh - Sums of matrices over blocks, with wgmma ---===//
//
// A thread block takes 256 results, of which each warpgroup has 64, by a run of columns, 128 at a
// time, and goes over all blocks for each of these tiles, 64 at a time. So few reads of matrices
// come from beyond the multiprocessor that memory, and not products, takes the time.
//
// All threads copy, stages ahead of what they multiply, also across tiles. Barriers for arrivals
// let warpgroups work independently: one waits for products or stores sums while others multiply.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/sla/summed_blocks.cuh"

constexpr SumsLayout LAYOUT(HEAD_DIM, true);
constexpr int WORDS = 2; ///< of lists that a stage takes
static_assert(LAYOUT.at_once == WORDS * WORD_BITS && LAYOUT.at_once == TILE_ROWS);
static_assert(WARPS == 16 && LAYOUT.rows == WARPS * 16 && LAYOUT.columns == 128);

// A stage is a tile of blocks by columns, in panels of 64 columns.
constexpr int PANEL = TILE_ROWS * 128;
constexpr int STEPS_A_STAGE = TILE_ROWS / 16; ///< of products
constexpr u64 STEP_UNITS = 16 * 128 / 16;     ///< from one to the next, as descriptors count

/// Copies of a stage begin so many steps before the step that multiplies it: the stage's products
/// of two steps before may still be under way elsewhere. They have come EARLY steps before it.
constexpr int AHEAD = LAYOUT.stages - 2, EARLY = 2;

/// Says which stage a step of products has, and whether it has it in an odd round.
struct StageOfStep {
  int stage;
  u32 parity;
  __device__ __forceinline__ explicit StageOfStep(int step)
      : stage(step % LAYOUT.stages), parity(step / LAYOUT.stages & 1) {}
};

/// Each stage has a barrier at which all warps arrive when their part has come, and one at which
/// they do when they have multiplied it.
struct StageBarriers {
  u32 address;

  __device__ __forceinline__ u32 full(int stage) const { return address + stage * BARRIER_BYTES; }
  __device__ __forceinline__ u32 empty(int stage) const { return full(LAYOUT.stages + stage); }
  /// All threads call this.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * LAYOUT.stages; ++i)
        init_mbarrier(full(i), WARPS);
      publish_mbarriers();
    }
    __syncthreads();
  }
  static __device__ __forceinline__ void arrive_as_warp(u32 barrier) {
    __syncwarp();
    if (lane_id() == 0)
      arrive(barrier);
  }
};

/// How a thread copies stage after stage: a chunk of two blocks' columns.
class StageCopies {
public:
  __device__ __forceinline__ StageCopies(const BlockSums& of, u32 base, StageBarriers barriers,
                                         int column, int steps)
      : barriers_(barriers), count_(of.count), steps_(steps), all_(of.heads * of.count),
        head_left_(of.count), left_(all_) {
    const int chunk = threadIdx.x % 16, block = threadIdx.x / 16, row = Ones::place_of(block);
    from_ = of.matrices + static_cast<s64>(block) * MATRIX_ELEMENTS + column + chunk * 8;
    to_ = base + row * 128 + chunk / 8 * PANEL + ((chunk % 8 ^ row % 8) << 4);
#pragma unroll
    for (int step = 0; step < AHEAD; ++step)
      start(step);
    static_assert(EARLY == 2);
    finish<AHEAD - 1>(0);
    finish<AHEAD - 2>(1);
  }

  /// What a thread does for copies while products of this step are under way.
  __device__ __forceinline__ void during(int step) {
    const int next = step + AHEAD;
    if (next >= LAYOUT.stages && next < steps_) {
      const StageOfStep before(next - LAYOUT.stages);
      wait_for_phase(barriers_.empty(before.stage), before.parity, "readers of a stage");
    }
    start(next);
    finish(step + EARLY);
  }

private:
  /// Starts those of a step, if there is one.
  __device__ __forceinline__ void start(int step) {
    if (step < steps_) {
      const u32 to = to_ + StageOfStep(step).stage * LAYOUT.stage_bytes;
      const int block = threadIdx.x / 16;
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        cp_async_16_or_zeros(to + i * (WORD_BITS * 128), from_ + i * WORD_BITS * MATRIX_ELEMENTS,
                             block + i * WORD_BITS < head_left_);
      const int taken = minimum(LAYOUT.at_once, head_left_);
      from_ += static_cast<s64>(taken) * MATRIX_ELEMENTS;
      head_left_ -= taken;
      left_ -= taken;
      if (head_left_ == 0)
        head_left_ = count_;
      if (left_ == 0) { // the next tile
        from_ += LAYOUT.columns - static_cast<s64>(all_) * MATRIX_ELEMENTS;
        left_ = all_;
      }
    }
    cp_async_commit();
  }
  /// Waits for those of a step, behind which at most PENDING steps' have been started.
  template <int PENDING = AHEAD - EARLY> __device__ __forceinline__ void finish(int step) {
    cp_async_wait<PENDING>();
    fence_async_proxy();
    if (step < steps_)
      StageBarriers::arrive_as_warp(barriers_.full(StageOfStep(step).stage));
  }

  StageBarriers barriers_;
  int count_;            ///< blocks of a head
  int steps_;            ///< of all tiles
  int all_;              ///< blocks of all heads
  int head_left_, left_; ///< blocks that are not yet copied, of this head and of this tile
  const bf16* from_;
  u32 to_;
};

/// The lists of a warp's 16 results, a step ahead of the products.
template <typename Lists> class StageLists {
public:
  __device__ __forceinline__ StageLists(const Params& p, const KeyHead& at, const BlockSums& of,
                                        int first_result)
      : lists_(p, at, first_result), blocks_(of), heads_(of.heads), word_(lists_.read(blocks_)) {}

  /// Gives the two words of rows g and g + 8 for the next step.
  __device__ __forceinline__ void take(u32 (&listed)[2][WORDS]) {
    const u32 word = Lists::of_result(word_);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        listed[h][i] = __shfl_sync(~0u, word, i * Lists::RESULTS + h * 8 + lane_id() / 4);
    }
    blocks_.next();
    if (blocks_.head == heads_)
      blocks_.head = 0;
    word_ = lists_.read(blocks_);
  }

private:
  Lists lists_;
  SummedBlocks<WORDS> blocks_;
  int heads_;
  u32 word_;
};

/// A warpgroup's 64 results by 128 columns.
struct GroupSums {
  float x[16][4] = {};

  /// Starts products with a stage. A's registers may be written again behind finish().
  __device__ __forceinline__ void issue(u32 stage, const u32 (&listed)[2][WORDS],
                                        bool accumulates) {
    u32 a[STEPS_A_STAGE][4];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const Ones low(listed[0][i]), high(listed[1][i]);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        a[2 * i + s][0] = low.low(s);
        a[2 * i + s][1] = high.low(s);
        a[2 * i + s][2] = low.high(s);
        a[2 * i + s][3] = high.high(s);
      }
    }
    const u64 b = matrix_descriptor<128, PANEL>(stage);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS_A_STAGE; ++s)
      wgmma_16_transposed_wide<bf16>(x, a[s], b + s * STEP_UNITS, accumulates || s > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < 16; ++j)
      hold(x[j]);
  }
  /// Stores those of the warp's 16 results that are among `results`. `to`: the warp's first.
  __device__ __forceinline__ void store(bf16* to, int results) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = h * 8 + lane_id() / 4;
      bf16* of = to + static_cast<s64>(row) * MATRIX_ELEMENTS + lane_id() % 4 * 8;
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
          words[w] = pack<bf16>(0.5f * x[j + w][2 * h], 0.5f * x[j + w][2 * h + 1]);
        gather_octet(words);
        if (row < results)
          store_words(of + j * 8, words);
      }
    }
  }
};

template <template <int> typename ListsOf>
__device__ __forceinline__ void sum_matrices(const Params& p, const KeyHead& at,
                                             const BlockSums& of, int first_result, int column,
                                             int run) {
  const u32 base = linear_base<LAYOUT.total>();
  const StageBarriers barriers{base + LAYOUT.barriers};
  barriers.init();
  const int steps_a_tile = of.steps<WORDS>(), steps = run * steps_a_tile;
  StageCopies copies(of, base, barriers, column, steps);
  if (first_result + warp_id() / 4 * 64 >= of.results) { // the warpgroup only copies
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      copies.during(step);
      StageBarriers::arrive_as_warp(barriers.empty(StageOfStep(step).stage));
    }
    return;
  }
  const int first = first_result + warp_id() * 16, results = of.results - first;
  StageLists<ListsOf<WORDS>> lists(p, at, of, first);
  bf16* to = of.sums + static_cast<s64>(first) * MATRIX_ELEMENTS + column;
  u32 listed[2][WORDS];
  lists.take(listed);
  GroupSums sums;
  int of_tile = 0; // steps
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const StageOfStep of_step(step);
    wait_for_phase(barriers.full(of_step.stage), of_step.parity, "copies into a stage");
    sums.issue(base + of_step.stage * LAYOUT.stage_bytes, listed, of_tile > 0);
    copies.during(step);
    lists.take(listed);
    sums.finish();
    StageBarriers::arrive_as_warp(barriers.empty(of_step.stage));
    if (++of_tile == steps_a_tile) {
      sums.store(to, results);
      to += LAYOUT.columns;
      of_tile = 0;
    }
  }
}
