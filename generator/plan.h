//===- plan.h - Problems, workspace and launch geometry --------------------===//
#pragma once

#include "generator/kernel.h"
#include "generator/operands.h"

#include <cstddef>
#include <cstdint>

namespace sagebwd {

/// The sizes of one call. All lengths in tokens: of packed sequences, of which there are `batch`,
/// those of all together.
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

/// Heads and tokens of queries, or of keys.
inline int64_t heads_of(Tokens of, const Problem& p) {
  return of == Tokens::queries ? p.heads : p.heads_kv;
}
inline int64_t tokens_of(Tokens of, const Problem& p) {
  return of == Tokens::queries ? p.seq_q : p.seq_kv;
}

/// The sequence padded to whole tiles of every configuration.
inline constexpr int64_t kPadding = 128;
/// In one tile of a transposed copy: what dK's and dV's kernel walks over at a time.
inline constexpr int kTokensPerTile = 64;
/// Floats that the kernels read for each query, and for each channel of a unit: ROW_VECTORS and
/// CHANNEL_VECTORS of templates/base.cuh.
inline constexpr int64_t kRowVectors = 4, kChannelVectors = 2;
/// Keys that share a scale of K for S in the copies' layout, under any granularity.
inline constexpr int64_t kKeysAScale = 8;
/// The key-mean pass sums chunks of so many keys, or of more where the chunks would be too many.
inline constexpr int64_t kMeanChunk = 256, kMostMeanChunks = 16;

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/// Chunks that the key-mean pass divides a sequence in: mean_chunks() of templates/tile/.
inline constexpr int64_t mean_chunks(int64_t keys) {
  const int64_t share = ceil_div(ceil_div(keys, kMostMeanChunks), 64) * 64;
  return ceil_div(keys, share > kMeanChunk ? share : kMeanChunk);
}
inline unsigned blocks_of(int64_t n, int64_t per_block = 1) {
  return static_cast<unsigned>(ceil_div(n, per_block));
}
inline constexpr int64_t padded(int64_t tokens) { return ceil_div(tokens, kPadding) * kPadding; }

/// What sequences lie apart in a tensor: those of a batch, while packed ones are one.
inline int64_t sequences_apart(const AttentionSpec& s, const Problem& p) {
  return s.packed ? 1 : p.batch;
}
/// Sequences that the grid of one launch has room for; a larger batch is launched part by part, and
/// each part's workspace is the same.
inline constexpr int64_t kMostInALaunch = 65535;
inline Problem first_launch(const AttentionSpec& s, Problem p) {
  if (!s.packed)
    p.batch = std::min(p.batch, kMostInALaunch);
  return p;
}
/// Tiles of so many tokens that a head has, or places for those of packed sequences, whose lengths
/// the host does not know (templates/tile/packed.cuh).
inline int64_t places(Tokens of, int64_t size, const AttentionSpec& s, const Problem& p) {
  const int64_t tokens = tokens_of(of, p);
  return s.packed ? tokens / size + p.batch : ceil_div(tokens, size);
}
/// A head's tokens in padded copies.
inline int64_t padded_tokens(Tokens of, const AttentionSpec& s, const Problem& p) {
  return places(of, kPadding, s, p) * kPadding;
}
/// Units of so many of them, and chunks of keys that the key-mean pass sums.
inline int64_t units(Tokens of, int64_t size, const AttentionSpec& s, const Problem& p) {
  return s.packed ? places(of, size, s, p) : ceil_div(padded_tokens(of, s, p), size);
}
inline int64_t mean_chunks(const AttentionSpec& s, const Problem& p) {
  return s.packed ? places(Tokens::keys, kMeanChunk, s, p) : mean_chunks(p.seq_kv);
}

/// The kernels of a pass in the order in which they are launched.
std::vector<KernelKind> launch_order(Pass, const ResolvedSpec&);

/// A result of the caller without gaps, which the pass writes as a whole. Until it does, the
/// result's memory can hold buffers of the workspace.
struct Loan {
  Operand result;
  size_t bytes;
};
/// Where a buffer of the workspace lies: `offset` bytes into the workspace or into a result.
struct Placement {
  Operand buffer;
  Operand in; ///< the result; Operand::count: the workspace
  uint64_t offset;
};
struct Workspace {
  size_t bytes = 0; ///< of device memory that the pass needs beside the caller's tensors
  std::vector<Placement> placements;
};
/// Raises SpecError as check() does, and beyond 2^62 bytes.
Workspace lay_out(Pass, const ResolvedSpec&, const Problem&, const std::vector<Loan>& = {});
/// Bytes of a workspace that borrows nothing.
size_t workspace_bytes(Pass, const ResolvedSpec&, const Problem&);
/// Sets the addresses of a workspace's buffers, of those in results from the results' addresses.
void place(const Workspace&, uint64_t address, OperandValues&);
/// Sets the sizes; the caller's tensors stay as they are.
void put_sizes(const ResolvedSpec&, const Problem&, OperandValues&);
/// All of it, for a workspace that borrows nothing.
void place_workspace(Pass, const ResolvedSpec&, const Problem&, uint64_t workspace, OperandValues&);

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};
/// Blocks of a kernel for a problem that check() lets pass.
Grid grid_of(const KernelSpec&, const Problem&);
/// Whether a call with these operands needs no launch of a kernel of its pass.
bool is_idle(const KernelSpec&, const OperandValues&);

/// A tensor of 16-bit elements as a TensorMap has it: channels, tokens, heads, sequences, and the
/// bytes from one of the last three to the next.
struct TensorShape {
  uint64_t address;
  uint64_t sizes[4];
  uint64_t strides[3];
};
TensorShape shape_of(Operand map, const KernelSpec&, const Problem&, const OperandValues&);

/// The fields of a kernel's `Params` struct, in order.
const std::vector<Field>& fields_of(const KernelSpec&);

/// Raises SpecError for problems no kernel can run: sizes below one, heads that do not divide.
void check(const ResolvedSpec&, const Problem&);

} // namespace sagebwd
