//===- spec.h - What an attention operation computes, and for which GPU ---===//
//
// An AttentionSpec fixes the numerics of the operation, a TileConfig only its speed, an Arch the
// instruction set. Everything here is a plain value: parsed, printed, validated and compared.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd {

/// A spec, tile or architecture that cannot be built. The message says what was given, what is
/// supported and what to do.
class SpecError : public std::invalid_argument {
public:
  using std::invalid_argument::invalid_argument;
};

enum class DType { bf16, fp16 };
/// `top_left`: key j is visible to query i iff j <= i; `bottom_right`: iff j <= i + N - M.
enum class Causal { none, top_left, bottom_right };
/// Along what a quantisation scale may vary: `row`, one per token or channel of a group; `block`,
/// one per group (SageBwd, arXiv 2603.02170, section 3).
enum class Granularity { row, block };
/// Which of the seven products are INT8: all but dP = dO V^T, or all but that and S = Q K^T.
enum class Precision { six_of_seven, qk16 };

std::string_view to_string(DType);
std::string_view to_string(Causal);
std::string_view to_string(Granularity);
std::string_view to_string(Precision);
/// The inverses; unknown names raise SpecError and list the known ones.
DType parse_dtype(std::string_view);
Causal parse_causal(std::string_view);
Granularity parse_granularity(std::string_view);
Precision parse_precision(std::string_view);

/// The numerics of one attention operation. Group sizes of 0 mean "the default of this
/// granularity"; `resolved()` fills them in.
struct AttentionSpec {
  int head_dim = 128;
  DType dtype = DType::bf16;
  Causal causal = Causal::none;
  Granularity granularity = Granularity::row;
  Precision precision = Precision::six_of_seven;
  bool smooth_k = true;
  bool rotate = true;
  bool deterministic = true;
  int group_q = 0;  ///< queries that share a quantisation group
  int group_kv = 0; ///< keys that share a quantisation group

  bool operator==(const AttentionSpec&) const = default;
};

/// One GPU architecture that kernels are compiled for.
struct Arch {
  std::string_view name; ///< NVRTC's name, e.g. "sm_90a"
  int major;             ///< compute capability
  int minor;
  int max_shared_bytes; ///< the most shared memory one block may use
  int first_cuda;       ///< the first CUDA version whose driver and NVRTC know it, e.g. 12080
  int registers_per_sm = 65536;

  bool operator==(const Arch& other) const { return name == other.name; }
};

/// Fills in default group sizes and checks every field; raises SpecError. Keys form groups of 128
/// under `row` where the registers allow it: with wgmma, and at head dimension 64; else of 64.
AttentionSpec resolved(AttentionSpec, const Arch&);
/// The same for no architecture in particular: any but sm_90a.
AttentionSpec resolved(AttentionSpec);
/// One line, e.g. "d128 bf16 causal=none row 64x64 six-of-seven smooth_k rotate deterministic".
std::string to_string(const AttentionSpec&);

const std::vector<Arch>& all_archs();
const Arch& find_arch(std::string_view name);          ///< raises SpecError
const Arch& arch_for_capability(int major, int minor); ///< raises SpecError

} // namespace sagebwd
