//===- plan.h - Problems, workspace and launch geometry --------------------===//
#pragma once

#include "generator/kernel.h"
#include "generator/operands.h"

#include <cstddef>
#include <cstdint>

namespace sagebwd {

/// The sizes of one call. Lengths are in tokens. If sequences are packed, `batch` is their number,
/// and the lengths are the sums over all of them.
struct Problem {
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t heads_kv = 1;
  int64_t seq_q = 1;
  int64_t seq_kv = 1;
};
template <typename Self, typename Visitor>
requires std::is_same_v<std::remove_const_t<Self>, Problem>
constexpr void visit_fields(Self& p, Visitor&& visit) {
  visit(Label{"batch", "B", "batch size"}, p.batch);
  visit(Label{"heads", " H", "query heads"}, p.heads);
  visit(Label{"heads_kv", "/", "key and value heads; 0 means as many as query heads"}, p.heads_kv);
  visit(Label{"seq_q", " M", "queries"}, p.seq_q);
  visit(Label{"seq_kv", " N", "keys, 0: as many as queries"}, p.seq_kv);
}

/// The heads and tokens of queries, or of keys.
inline int64_t heads_of(Tokens of, const Problem& p) {
  return of == Tokens::queries ? p.heads : p.heads_kv;
}
inline int64_t tokens_of(Tokens of, const Problem& p) {
  return of == Tokens::queries ? p.seq_q : p.seq_kv;
}

/// Copies are padded to a multiple of so many tokens, so that they consist of whole groups and of
/// whole tiles.
inline constexpr int64_t kPadding = 128;
/// Tokens in one tile of a transposed copy. backward_dkv walks over so many queries at a time.
inline constexpr int kTokensPerTile = 64;
/// Floats that the kernels read for each query, and for each channel of a unit. They are
/// ROW_VECTORS and CHANNEL_VECTORS of templates/layouts/copies.cuh.
inline constexpr int64_t kRowVectors = 4, kChannelVectors = 2;
/// The layout of the copies has one scale of K for S for so many keys, under every granularity.
inline constexpr int64_t kKeysAScale = 8;
/// The kernel key_mean sums chunks of kMeanChunk keys. If there would be more than kMostMeanChunks
/// chunks, the chunks are longer.
inline constexpr int64_t kMeanChunk = 256, kMostMeanChunks = 16;

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/// The number of chunks into which the kernel key_mean divides a sequence of so many keys, as
/// mean_chunks() of templates/tile/prepass/key_mean.cuh computes it.
inline constexpr int64_t mean_chunks(int64_t keys) {
  const int64_t share = ceil_div(ceil_div(keys, kMostMeanChunks), 64) * 64;
  return ceil_div(keys, share > kMeanChunk ? share : kMeanChunk);
}
inline constexpr int64_t padded(int64_t tokens) { return ceil_div(tokens, kPadding) * kPadding; }

/// The extent of the batch dimension: `batch`, or 1 for packed sequences.
inline int64_t sequences_apart(const AttentionSpec& s, const Problem& p) {
  return s.packed ? 1 : p.batch;
}
/// The most sequences that the grid of one launch has room for. A larger batch is divided among
/// several launches, which use the same workspace one after the other.
inline constexpr int64_t kMostInALaunch = 65535;
inline Problem first_launch(const AttentionSpec& s, Problem p) {
  if (!s.packed)
    p.batch = std::min(p.batch, kMostInALaunch);
  return p;
}
/// The number of tiles of `size` tokens that a head has. The host does not know the lengths of
/// packed sequences: for them it is the number of places for tiles, of which some stay empty
/// (templates/tile/walk/packed.cuh).
inline int64_t places(Tokens of, int64_t size, const AttentionSpec& s, const Problem& p) {
  const int64_t tokens = tokens_of(of, p);
  return s.packed ? tokens / size + p.batch : ceil_div(tokens, size);
}
/// The tokens of a head in padded copies.
inline int64_t padded_tokens(Tokens of, const AttentionSpec& s, const Problem& p) {
  return places(of, kPadding, s, p) * kPadding;
}
/// The number of units of `size` tokens that a head's padded copies have.
inline int64_t units(Tokens of, int64_t size, const AttentionSpec& s, const Problem& p) {
  return s.packed ? places(of, size, s, p) : ceil_div(padded_tokens(of, s, p), size);
}
/// The number of chunks of a head's keys that the kernel key_mean sums.
inline int64_t mean_chunks(const AttentionSpec& s, const Problem& p) {
  return s.packed ? places(Tokens::keys, kMeanChunk, s, p) : mean_chunks(p.seq_kv);
}

/// Blocks of lists: of a head's queries, each of which has a list, or of its keys.
inline int64_t list_blocks(Tokens of, const AttentionSpec& s, const Problem& p) {
  return ceil_div(tokens_of(of, p), of == Tokens::queries ? s.sparse_q : s.sparse_kv);
}
/// The words of 32 bits of a list: a bit per block of keys, and at least one more, the last, which
/// marks a list that is wrong. With intervals each word has another one behind it,
/// whose bits say in which blocks they hide a part. column_words(): per block of queries, for a
/// block of keys.
inline int64_t list_words(const AttentionSpec& s, const Problem& p) {
  return (list_blocks(Tokens::keys, s, p) / 32 + 1) * (hides_anywhere(s) ? 2 : 1);
}
inline int64_t column_words(const AttentionSpec& s, const Problem& p) {
  return ceil_div(list_blocks(Tokens::queries, s, p), 32);
}

/// The blocks that pool_blocks adds up: of the queries of all heads and sequences, and of the keys.
inline int64_t pooled_blocks(const AttentionSpec& s, const Problem& p) {
  return p.batch * (p.heads * list_blocks(Tokens::queries, s, p) +
                    p.heads_kv * list_blocks(Tokens::keys, s, p));
}

/// The runs of a head's tokens that blocks of the front end's kernels take.
int64_t front_chunks(Tokens, const AttentionSpec&, const Problem&);
/// The heads that a block of the front end's kernels takes one after the other, and the blocks.
int64_t front_heads(const AttentionSpec&, const Problem&);
int64_t front_blocks(const AttentionSpec&, const Problem&, int64_t heads_a_block);

/// The parts of a head's queries over which estimated_dk sums. They are enough to fill a GPU, and
/// their sums take no more memory than half of the queries.
int64_t estimated_parts(const AttentionSpec&, const Problem&);

/// A result of the caller that has no gaps in memory and that the pass overwrites completely.
/// Before the pass writes the result, buffers of the workspace can lie in the result's memory.
struct Loan {
  Operand result;
  size_t bytes;
};
/// The place of a buffer: `offset` bytes into the workspace or into a result of the caller.
struct Placement {
  Operand buffer;
  Operand in; ///< the result, or Operand::count for the workspace
  uint64_t offset;
};
struct Workspace {
  size_t bytes = 0; ///< device memory that the pass needs in addition to the caller's tensors
  std::vector<Placement> placements;
};
/// Lays out the workspace of a pass, and puts into the loans the buffers that fit there. With
/// linear attention buffers that no kernel needs at the same time share memory. `keeps_sums`: those
/// that is_kept() names lie in the caller's kept_sums. Raises SpecError if check() does, or if the
/// workspace would have more than 2^62 bytes.
Workspace lay_out(Pass, const ResolvedSpec&, const Problem&, const std::vector<Loan>& = {},
                  bool keeps_sums = false);
/// The size in bytes of kept_sums. Raises SpecError if check() does, or without linear attention.
size_t kept_sums_bytes(const ResolvedSpec&, const Problem&);
/// The size in bytes of a workspace without loans.
size_t workspace_bytes(Pass, const ResolvedSpec&, const Problem&);
/// Sets the addresses of a workspace's buffers. `address` is the workspace's; the values must
/// already have the addresses of results that hold buffers.
void place(const Workspace&, uint64_t address, OperandValues&);
/// Sets the operands that are sizes. The caller's tensors are not changed.
void put_sizes(const ResolvedSpec&, const Problem&, OperandValues&);
/// Sets the addresses of all buffers, and the sizes, for a workspace without loans.
void place_workspace(Pass, const ResolvedSpec&, const Problem&, uint64_t workspace, OperandValues&);

/// Whether calls of a spec have a tensor in a pass: only packed ones have the arrays that say where
/// sequences lie, only sparse ones lists, and only mixed ones those of linear attention.
bool takes(const AttentionSpec&, const CallerTensor&, Pass);

struct Grid {
  unsigned x, y, z;

  Grid(int64_t blocks, int64_t heads = 1, int64_t sequences = 1)
      : x(static_cast<unsigned>(blocks)), y(static_cast<unsigned>(heads)),
        z(static_cast<unsigned>(sequences)) {}
};
/// The blocks that a kernel is launched with, for a problem that check() accepts.
Grid grid_of(const KernelSpec&, const Problem&);
/// The grid may depend on how many multiprocessors a GPU has. Blocks of the kernels that take work
/// tiles (KernelDefinition) have the work of several blocks of grid_of().
Grid grid_on(int multiprocessors, const KernelSpec&, const Problem&);
/// Whether a call with these operands may leave out the launch of this kernel.
bool is_idle(const KernelSpec&, const OperandValues&);

/// A tensor of 16-bit elements, as a TensorMap describes it.
struct TensorShape {
  uint64_t address;
  uint64_t sizes[4];   ///< channels, tokens, heads, sequences
  uint64_t strides[3]; ///< bytes from one token, head and sequence to the next
};
TensorShape shape_of(Operand map, const KernelSpec&, const Problem&, const OperandValues&);

/// Raises SpecError for a problem that no kernel can run, for example with sizes below 1, or with
/// heads that are not a multiple of the key and value heads.
void check(const ResolvedSpec&, const Problem&);

} // namespace sagebwd
