//===- kernel.h - One kernel of an attention operation ---------------------===//
#pragma once

#include "generator/spec.h"
#include "generator/templates.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sagebwd {

enum class Pass { forward, backward };
std::string_view to_string(Pass);

/// The kernels of one operation, in launch order within each pass.
enum class KernelKind {
  key_mean_partial, ///< sums of K over chunks of keys
  key_mean,         ///< mean of K over keys, FP32
  quantize_q,       ///< INT8 copies of Q
  quantize_k,       ///< INT8 copies of K
  quantize_v,       ///< INT8 transposed copy of V
  quantize_dout,    ///< INT8 transposed copy of dO, and delta = rowsum(dO * O)
  forward,          ///< O and lse
  backward_dq,      ///< dQ
  backward_dkv,     ///< dK and dV
};
std::string_view to_string(KernelKind);

/// The matrix instructions a kernel is built from: warp-level mma.sync (sm_80 and later) or
/// warpgroup-level wgmma (sm_90a).
enum class Family { mma, wgmma };
std::string_view to_string(Family);

/// How fast an attention kernel runs; never what it computes, but for FP32 summation order.
/// `block_q` x `block_kv` is the tile one thread block works on at a time.
struct TileConfig {
  Family family = Family::mma;
  int block_q = 0;
  int block_kv = 0;
  int warps = 0;
  int stages = 0;        ///< copies of each streamed tile kept in shared memory
  int blocks_per_sm = 1; ///< residency the register allocation must allow

  bool operator==(const TileConfig&) const = default;
};
/// "mma 128x64 w8 s2 b1"; `parse_tile` reads it back.
std::string to_string(const TileConfig&);
TileConfig parse_tile(std::string_view);

/// Everything that decides one kernel's source and machine code.
struct KernelSpec {
  KernelKind kind;
  Pass pass;
  AttentionSpec attention; ///< resolved
  Arch arch;
  TileConfig tile; ///< zero for the quantisation passes

  bool operator==(const KernelSpec&) const = default;
};

/// A C identifier; kernels of one name and architecture are the same, e.g.
/// "sagebwd_forward_d128_bf16_causal_row64x128_wgmma_64x128_w4_s2_b3".
std::string kernel_name(const KernelSpec&);

/// The fields of a spec that its kernel depends on, one by one, as text, without the architecture:
/// what a cache key shows of it. Kernels of equal fields have equal sources.
std::vector<std::pair<std::string, std::string>> labelled(const KernelSpec&);

/// The generated source and what its launch needs.
struct KernelSource {
  std::string name;     ///< of the extern "C" entry point
  std::string text;     ///< complete, header-free CUDA C++; NVRTC and nvcc take it unchanged
  int threads = 0;      ///< per block
  int shared_bytes = 0; ///< dynamic shared memory per block
  std::vector<std::string> options; ///< of the compiler, beyond those of every kernel
};
/// From the embedded templates, or others. The same spec gives the same bytes on every machine.
/// Raises SpecError.
KernelSource emit(const KernelSpec&);
KernelSource emit_from(const TemplateSource&, const KernelSpec&);

/// A sound tile for a kernel on an architecture, without tuning. Raises SpecError where none fits.
TileConfig default_tile(KernelKind, const AttentionSpec&, const Arch&);
/// Why a kernel's tile cannot be built, or empty. The spec must be resolved.
std::string objection(KernelKind, const AttentionSpec&, const TileConfig&, const Arch&);
/// Raises SpecError where a kernel's tile cannot be built, and says why.
void check_tile(const KernelSpec&);
/// Dynamic shared memory of a kernel with this tile.
int shared_bytes(KernelKind, const AttentionSpec&, const TileConfig&);

/// The tiles of an operation's three attention kernels.
struct Tiles {
  TileConfig forward, backward_dq, backward_dkv;
};
Tiles default_tiles(const AttentionSpec&, const Arch&);

/// The kernels one pass needs, in launch order.
std::vector<KernelSpec> kernels_of(Pass, const AttentionSpec&, const Arch&, const Tiles&);
/// The same with default tiles.
std::vector<KernelSpec> kernels_of(Pass, const AttentionSpec&, const Arch&);

} // namespace sagebwd
