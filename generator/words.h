//===- words.h - The options of an attention operation that are words -----===//
#pragma once

#include "generator/fields.h"

namespace sagebwd {

enum class DType { bf16, fp16 };
/// Which keys a query sees. `top_left`: query i sees key j if j <= i. `bottom_right`: query i sees
/// key j if j <= i + N - M, for M queries and N keys.
enum class Causal { none, top_left, bottom_right };
/// The granularity says which values share a quantisation scale. `row`: each token or channel of a
/// group has its own scale. `block`: a group has one scale (SageBwd, arXiv 2603.02170, section 3).
/// grouping_of() has everything else that depends on the granularity.
enum class Granularity { row, block };
/// Which of the seven products are INT8 and which have 16-bit operands. which_int8() lists them.
enum class Precision { six_of_seven, qk16, dv16, gradients16 };
/// The format in which a fused backward sums dQ in memory. `fp16`: each query's sums are multiplied
/// by a power of two, chosen so that no finite input overflows (templates/tile/dq/dq_sums16.cuh).
enum class DqSums { fp32, fp16 };
/// Which kernels form the gradients. `split`: dQ has a kernel of its own. `fused`: one kernel forms
/// dQ, dK and dV, so that S and dP are formed once. `either`: what is faster on the architecture.
enum class Backward { either, split, fused };
/// The format in which tensor cores sum dP = dO V^T. `fp16`: V less its mean, and dO, become FP16
/// times powers of two, chosen so that no finite input overflows
/// (templates/tile/math/dp_sums16.cuh).
enum class DpSums { fp32, fp16 };
/// Which keys linear attention sees beside exact attention to the keys of listed blocks (SLA2,
/// arXiv 2602.12675, Algorithms 2 and 3). `complement`: those of blocks that a list leaves out.
/// `all`: all. `none`: there is no linear attention.
enum class LinearKeys { none, complement, all };

template <> struct Words<DType> {
  static constexpr std::string_view what = "dtype";
  static constexpr Word<DType> all[] = {{DType::bf16, "bf16"}, {DType::fp16, "fp16"}};
};
template <> struct Words<Causal> {
  static constexpr std::string_view what = "causal mask";
  static constexpr Word<Causal> all[] = {{Causal::none, "none"},
                                         {Causal::top_left, "top-left"},
                                         {Causal::bottom_right, "bottom-right"}};
};
template <> struct Words<Granularity> {
  static constexpr std::string_view what = "granularity";
  static constexpr Word<Granularity> all[] = {{Granularity::row, "row"},
                                              {Granularity::block, "block"}};
};
template <> struct Words<Precision> {
  static constexpr std::string_view what = "precision";
  static constexpr Word<Precision> all[] = {{Precision::six_of_seven, "six-of-seven"},
                                            {Precision::qk16, "qk16"},
                                            {Precision::dv16, "dv16"},
                                            {Precision::gradients16, "gradients16"}};
};
template <> struct Words<DqSums> {
  static constexpr std::string_view what = "format of dQ's sums";
  static constexpr Word<DqSums> all[] = {{DqSums::fp32, "fp32"}, {DqSums::fp16, "fp16"}};
};
template <> struct Words<DpSums> {
  static constexpr std::string_view what = "format of dP's sums";
  static constexpr Word<DpSums> all[] = {{DpSums::fp32, "fp32"}, {DpSums::fp16, "fp16"}};
};

template <> struct Words<LinearKeys> {
  static constexpr std::string_view what = "keys of linear attention";
  static constexpr Word<LinearKeys> all[] = {
      {LinearKeys::none, "none"}, {LinearKeys::complement, "complement"}, {LinearKeys::all, "all"}};
};

template <> struct Words<Backward> {
  static constexpr std::string_view what = "gradient kernels";
  static constexpr Word<Backward> all[] = {
      {Backward::either, "any"}, {Backward::split, "split"}, {Backward::fused, "fused"}};
};

} // namespace sagebwd
