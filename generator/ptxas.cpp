//===- ptxas.cpp - Options of ptxas for each kernel -------------------------===//

#include "generator/ptxas.h"
#include "generator/definition.h"

namespace sagebwd {
namespace {

using Kind = KernelKind;
using Spec = const KernelSpec&;

bool narrow(Spec k) { return !wide(k.attention); }
bool is_widest(Spec k) { return widest(k.attention); }
bool part(Spec k) { return k.channels == Channels::part; }
bool packed(Spec k) { return k.attention.packed; }
bool windowed(Spec k) { return bounded_before(k.attention); }
bool has_scores16(Spec k) { return scores16(k.attention); }
bool consumer_blackwell(Spec k) { return k.arch.is_consumer_blackwell(); }
bool other_blackwell(Spec k) { return k.arch.is_blackwell() && !consumer_blackwell(k); }
/// Partial widths, windows and packed sequences need additional registers.
bool asks_for_more(Spec k) { return part(k) || windowed(k) || packed(k); }

constexpr std::string_view kLevel1 = "-O1";
constexpr std::string_view kFewest = "--register-usage-level=0";
constexpr std::string_view kFew = "--register-usage-level=3";
constexpr std::string_view kMany = "--register-usage-level=8";

constexpr std::string_view kLaidOut =
    "spilled when it was laid out; in a draw with NVRTC 13.0 only the code differed";

std::vector<PtxasRow> rows() {
  const std::vector<Kind> forward = {Kind::forward}, dq = {Kind::backward_dq},
                          dkv = {Kind::backward_dkv, Kind::backward},
                          gradients = {Kind::backward_dq, Kind::backward_dkv},
                          split_dkv = {Kind::backward_dkv}, fused = {Kind::backward},
                          quantize = {Kind::quantize}, mean_scores = {Kind::mean_scores};
  const std::vector<Family> no_tiles, mma = {Family::mma}, wgmma = {Family::wgmma},
                                      ws = {Family::ws}, specialised = {Family::ws, Family::pair},
                                      team = {Family::team}, pair = {Family::pair};
  return {
      // With mma.sync, from -O2 on, ptxas forms all products of a tile before it adds any of them.
      // At -O1 ptxas keeps the template's order (templates/kernels/README.md).
      {"forward-narrow", forward, mma, narrow, kLevel1, "the template's order is faster"},
      {"forward-widest", forward, mma, is_widest, kLevel1, "spills from level 2 on"},
      {"forward-more", forward, mma, asks_for_more, kLevel1, kLaidOut},
      {"forward-sm_100", forward, mma, [](Spec k) { return k.arch.name == "sm_100"; }, kLevel1,
       kLaidOut},
      {"forward-intervals", forward, mma, [](Spec k) { return hides_anywhere(k.attention); },
       kLevel1, "spills up to 176 bytes at 128 channels otherwise"},
      {"forward-max-logits", forward, mma,
       [](Spec k) {
         return k.attention.max_logits && is_sparse(k.attention) && !narrow(k) &&
                consumer_blackwell(k);
       },
       kLevel1, "lists spill 44 bytes otherwise"},
      {"forward-large", forward, mma, [](Spec k) { return k.tile.warps == 8; }, kLevel1,
       "large blocks at 128 channels spill at level 3"},

      {"team",
       {Kind::forward, Kind::backward_dq, Kind::backward_dkv},
       team,
       [](Spec) { return true; },
       kLevel1,
       "spills up to 72 bytes from level 2 on"},

      {"dq-widest", dq, mma, is_widest, kLevel1, "spills from level 2 on"},
      {"dq-more", dq, mma, asks_for_more, kLevel1, "spills from level 2 on"},
      {"dq-intervals", dq, mma, [](Spec k) { return hides_anywhere(k.attention); }, kLevel1,
       "spills up to 108 bytes at 128 channels otherwise"},
      {"dq-narrow", dq, mma, [](Spec k) { return narrow(k) && other_blackwell(k); }, kLevel1,
       "spills from level 2 on"},
      {"dq-wide", dq, mma, [](Spec k) { return !narrow(k) && consumer_blackwell(k); }, kLevel1,
       kLaidOut},
      {"dq-two-blocks", dq, mma,
       [](Spec k) {
         const bool two_small_blocks = k.arch.name == "sm_80" || k.arch.name == "sm_87";
         return !narrow(k) && (!two_small_blocks || k.attention.smooth_q);
       },
       kMany, "7.7 ms for 9.0 at 128 channels under a mask (H200)"},

      {"fused-int8", fused, mma,
       [](Spec k) {
         return which_int8(k.attention.precision).dq &&
                (!narrow(k) || k.attention.smooth_q || has_scores16(k) || asks_for_more(k) ||
                 k.arch.is_blackwell());
       },
       kLevel1, "spills from level 2 on, and is faster at level 3 where it does not"},
      {"dkv-intervals", split_dkv, mma,
       [](Spec k) { return hides_anywhere(k.attention) && narrow(k); }, kLevel1,
       "8 bytes spill under a mask otherwise"},
      {"dkv-wide", dkv, mma, [](Spec k) { return !narrow(k); }, kLevel1,
       "the template's order is faster and spills least"},
      {"dq-pair-very-wide", dq, pair, [](Spec k) { return very_wide(k.attention); }, kLevel1,
       "spills up to 16 bytes without a sink from level 2 on"},
      {"dkv-more", dkv, mma, asks_for_more, kLevel1, "spills from level 2 on"},
      {"fused-half-dp", fused, mma,
       [](Spec k) { return sums_dp_in_fp16(k.attention) && which_int8(k.attention.precision).dq; },
       kFewest, "up to 16 bytes spill under a mask otherwise"},
      {"dkv-half-dp", split_dkv, mma,
       [](Spec k) {
         return narrow(k) && sums_dp_in_fp16(k.attention) && has_scores16(k) &&
                blockwise(k.attention) && consumer_blackwell(k);
       },
       kLevel1, "16 bytes spill otherwise"},
      {"dkv-sm_103-block", dkv, mma,
       [](Spec k) { return k.arch.name == "sm_103" && blockwise(k.attention); }, kFewest,
       "two registers too many otherwise"},

      {"wgmma-widest-lists",
       {Kind::forward, Kind::backward_dkv},
       wgmma,
       [](Spec k) { return is_widest(k) && is_sparse(k.attention); },
       kLevel1,
       "spills up to 236 bytes otherwise"},
      {"forward-wgmma-intervals", forward, wgmma,
       [](Spec k) { return hides_anywhere(k.attention) && !is_widest(k); }, kFewest,
       "three blocks an SM spill 16 bytes otherwise"},
      {"dkv-wgmma-part-lists", split_dkv, wgmma,
       [](Spec k) { return part(k) && !narrow(k) && has_scores16(k) && is_sparse(k.attention); },
       kLevel1, "spills up to 108 bytes under 'block' otherwise"},
      {"dq-wgmma-fewest", dq, wgmma,
       [](Spec k) { return part(k) && is_widest(k) && has_scores16(k); }, kFewest,
       "wide heads of 16-bit queries that do not fill the width leave the fewest registers"},
      {"wgmma-dv16", gradients, wgmma,
       [](Spec k) { return narrow(k) && k.attention.precision == Precision::dv16; }, kFew,
       "three blocks an SM whose dO is the caller's spill up to 20 bytes otherwise"},
      {"wgmma-packed-qk16", gradients, wgmma, [](Spec k) { return packed(k) && has_scores16(k); },
       kFewest, "spills otherwise"},

      // With three warpgroups ptxas, at its default settings, has no register left for the place
      // where a window begins or a packed sequence ends. At 128 channels this holds for two
      // warpgroups too.
      {"dkv-ws-three", split_dkv, specialised,
       [](Spec k) { return (windowed(k) || packed(k)) && k.tile.warps == 12; }, kFewest,
       "three warpgroups spill otherwise"},
      {"dkv-ws-packed", split_dkv, ws,
       [](Spec k) { return packed(k) && bounded_behind(k.attention) && !narrow(k); }, kLevel1,
       "two warpgroups at 128 channels spill otherwise"},

      // A thread that has 64 channels of a token needs all registers. So does one that has 16
      // channels of a partial width, with as many blocks per SM as the narrowest width has, or 32
      // channels of packed sequences.
      {"quantize-widest-half-dp", quantize, no_tiles,
       [](Spec k) { return is_widest(k) && sums_dp_in_fp16(k.attention) && k.attention.smooth_q; },
       kFewest, "spills 132 bytes at level 1"},
      {"quantize-very-wide-packed", quantize, no_tiles,
       [](Spec k) {
         return very_wide(k.attention) && part(k) && packed(k) && other_blackwell(k) &&
                k.pass == Pass::backward && which_int8(k.attention.precision).dv &&
                k.attention.sink_keys > 0;
       },
       kFewest, "spills 12 bytes at level 1"},
      {"quantize-widest", quantize, no_tiles, is_widest, kLevel1, kLaidOut},
      {"quantize-part", quantize, no_tiles, [](Spec k) { return narrow(k) && part(k); }, kLevel1,
       kLaidOut},
      {"quantize-packed", quantize, no_tiles, [](Spec k) { return !narrow(k) && packed(k); },
       kLevel1, kLaidOut},
      {"quantize-smooth-q", quantize, no_tiles,
       [](Spec k) { return narrow(k) && k.attention.smooth_q && other_blackwell(k); }, kLevel1,
       "spills 4 bytes on sm_100 otherwise"},
      {"mean-scores", mean_scores, no_tiles, consumer_blackwell, kMany,
       "ptxas chooses 48 registers by itself, and spills"},
  };
}

} // namespace

const std::vector<PtxasRow>& ptxas_rows() {
  static const std::vector<PtxasRow> table = rows();
  return table;
}

const PtxasRow* ptxas_row(const KernelSpec& k) {
  for (const PtxasRow& row : ptxas_rows())
    if (includes(row.kinds, k.kind) &&
        (row.families.empty() || includes(row.families, k.tile.family)) && row.when(k))
      return &row;
  return nullptr;
}

} // namespace sagebwd
