//===- emulation.cpp - Attention as the kernels compute it -----------------===//
//
// Every quantiser bit for bit, integer products exact, everything else FP32. What the kernels
// leave open, and so may differ in the last bits: the order of FP32 sums, exp2 and log2 (here
// correctly rounded or nearly so) and the reciprocals of P's and dS's maxima.
//
//===----------------------------------------------------------------------===//
#include "runtime/reference/gemm.h"
#include "runtime/reference/head.h"
#include "runtime/reference/quantizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sagebwd::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.69314718f;
constexpr float kLog2Levels = 7.99435344f; ///< log2(255)

float dot(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += static_cast<double>(a[i]) * b[i];
  return static_cast<float>(sum);
}

/// 2^(x * scale + addend) with one rounding of the exponent, as a fused multiply-add has.
float exp2_fused(float x, float scale, float addend) {
  return std::exp2(static_cast<float>(static_cast<double>(x) * scale + addend));
}

/// Copies of a token-by-channel matrix, quantised group by group of tokens.
struct Copy {
  std::vector<float> levels;      ///< tokens x channels
  std::vector<float> token_scale; ///< one a token
  std::vector<float> group_scale; ///< groups x channels
};
Copy quantized_copy(const float* x, int64_t tokens, int64_t channels, int64_t group,
                    Sharing sharing) {
  Copy copy;
  for (int64_t first = 0; first < tokens; first += group) {
    const Quantized part = quantize(x + first * channels, std::min(group, tokens - first), channels,
                                    channels, sharing, kSignedLevels);
    copy.levels.insert(copy.levels.end(), part.levels.begin(), part.levels.end());
    copy.token_scale.insert(copy.token_scale.end(), part.row_scale.begin(), part.row_scale.end());
    // A `whole` scale sits in both: products over tokens use it by channel.
    std::vector<float> scales = part.column_scale;
    if (sharing == Sharing::whole)
      std::fill(scales.begin(), scales.end(), part.row_scale[0]);
    copy.group_scale.insert(copy.group_scale.end(), scales.begin(), scales.end());
  }
  return copy;
}

class EmulatedHead final : public HeadComputation<float> {
public:
  EmulatedHead(const Head& head, const AttentionSpec& spec, const ProductPlan& plan,
               bool round_outputs)
      : head_(head), spec_(spec), plan_(plan), round_outputs_(round_outputs),
        block_(grouping_of(spec.granularity).one_scale), shifts_(spec.smooth_k && plan.s) {
    const int64_t n = head.keys, d = head.channels;
    const size_t size = n * d;
    smooth_keys();
    if (plan.s)
      k_scores_ = score_copy(smoothed_k_.data(), n, spec.group_kv);
    if (plan.pv)
      v_transposed_ = quantized_copy(head.v, n, d, spec.group_kv, over_tokens());
    if (!head.dout)
      return;
    if (plan.dp)
      v_rows_ = quantized_copy(head.v, n, d, spec.group_kv, over_channels());
    if (plan.dq)
      k_transposed_ = quantized_copy(smoothed_k_.data(), n, d, spec.group_kv, over_tokens());
    dk.assign(size, 0);
    dv.assign(size, 0);
  }

  Panel<float> panel(int64_t first, int64_t rows) override {
    Panel<float> out;
    out.first = first;
    out.rows = rows;
    scores(out);
    forward(out);
    if (round_outputs_)
      round(out.o);
    if (!head_.dout) {
      probabilities(out, out.lse.data());
      return out;
    }
    probabilities(out, head_.given_lse ? head_.given_lse + first : out.lse.data());
    score_gradients(out);
    products(out);
    return out;
  }

private:
  /// Scales of operands whose product sums over channels, and over tokens.
  Sharing over_channels() const { return block_ ? Sharing::whole : Sharing::row; }
  Sharing over_tokens() const { return block_ ? Sharing::whole : Sharing::column; }
  MatrixView<float> rows_of(const float* tensor) const { return {tensor, head_.channels}; }
  float rounded(float x) const { return round_to(spec_.dtype, x); }
  void round(std::vector<float>& tensor) const {
    for (float& x : tensor)
      x = rounded(x);
  }

  void smooth_keys() {
    const int64_t n = head_.keys, d = head_.channels;
    smoothed_k_.assign(head_.k, head_.k + n * d);
    if (!spec_.smooth_k)
      return;
    std::vector<double> sums(d, 0);
    for (int64_t i = 0; i < n * d; ++i)
      sums[i % d] += head_.k[i];
    for (double sum : sums)
      mean_.push_back(static_cast<float>(sum / static_cast<double>(n)));
    for (int64_t i = 0; i < n * d; ++i)
      smoothed_k_[i] -= mean_[i % d];
  }

  Copy score_copy(const float* x, int64_t tokens, int64_t group) const {
    const int64_t d = head_.channels;
    std::vector<float> rotated(x, x + tokens * d);
    if (spec_.rotate)
      for (int64_t i = 0; i < tokens; ++i)
        rotate(rotated.data() + i * d, head_.channels);
    return quantized_copy(rotated.data(), tokens, d, group, over_channels());
  }

  /// scores_, short of the query's factor row_factor_, and the shift of lse by smoothing.
  void scores(const Panel<float>& panel) {
    const int64_t n = head_.keys, d = head_.channels, rows = panel.rows;
    const float* q = head_.q + panel.first * d;
    scores_.resize(rows * n);
    row_factor_.assign(rows, head_.softmax_scale * kLog2E);
    shift_.assign(rows, 0);
    if (!plan_.s) {
      gemm(rows, n, d, rows_of(q), rows_of(head_.k).transposed(), scores_.data(), n);
      return;
    }
    const Copy queries = score_copy(q, rows, spec_.group_q);
    gemm(rows, n, d, rows_of(queries.levels.data()), rows_of(k_scores_.levels.data()).transposed(),
         scores_.data(), n);
    for (int64_t i = 0; i < rows; ++i) {
      row_factor_[i] *= queries.token_scale[i];
      for (int64_t j = 0; j < n; ++j)
        scores_[i * n + j] *= k_scores_.token_scale[j];
      if (shifts_)
        shift_[i] = dot(q + i * d, mean_.data(), d) * head_.softmax_scale;
    }
  }

  void forward(Panel<float>& out) const {
    const int64_t n = head_.keys, d = head_.channels, rows = out.rows, tile = spec_.group_kv;
    out.o.assign(rows * d, 0);
    out.lse.assign(rows, -kInfinity);
    std::vector<float> maximum(rows, -kInfinity), sum(rows, 0), beta(rows);
    std::vector<float> p(rows * tile), product(rows * d);
    const float log2_levels = plan_.pv ? kLog2Levels : 0;
    const std::vector<float> ones(d, 1);

    for (int64_t first = 0; first < n; first += tile) {
      const int64_t columns = std::min(tile, n - first);
      std::fill(p.begin(), p.end(), 0.0f);
      for (int64_t i = 0; i < rows; ++i) {
        const VisibleKeys visible = head_.visible(out.first + i).within(first, columns);
        beta[i] = 0;
        if (visible.empty())
          continue;
        const float* x = scores_.data() + i * n;
        float largest = -kInfinity; // a NaN stays out of it and reaches the sum
        for (int64_t j : visible)
          largest = std::max(largest, x[j]);
        largest *= row_factor_[i];
        const float new_maximum = std::max(maximum[i], largest);
        const float alpha = maximum[i] == -kInfinity ? 0 : std::exp2(maximum[i] - new_maximum);
        beta[i] = std::exp2(largest - new_maximum);
        maximum[i] = new_maximum;
        float tile_sum = 0;
        for (int64_t j : visible) {
          const float value = exp2_fused(x[j], row_factor_[i], log2_levels - largest);
          tile_sum += value;
          p[i * tile + j - first] = plan_.pv ? unsigned_level(value) : rounded(value);
        }
        sum[i] = sum[i] * alpha + tile_sum * beta[i];
        for (int64_t c = 0; c < d; ++c)
          out.o[i * d + c] *= alpha;
      }
      const float* v = plan_.pv ? v_transposed_.levels.data() : head_.v;
      gemm(rows, d, columns, {p.data(), tile}, rows_of(v + first * d), product.data(), d);
      const float* scales =
          plan_.pv ? v_transposed_.group_scale.data() + first / tile * d : ones.data();
      for (int64_t i = 0; i < rows; ++i)
        if (!head_.visible(out.first + i).within(first, columns).empty())
          add_scaled(&out.o[i * d], &product[i * d], 1, d, &beta[i], scales);
    }
    for (int64_t i = 0; i < rows; ++i) {
      if (head_.visible(out.first + i).empty())
        continue;
      for (int64_t c = 0; c < d; ++c)
        out.o[i * d + c] *= 1 / sum[i];
      out.lse[i] = kLn2 * (maximum[i] + std::log2(sum[i]) - log2_levels) + shift_[i];
    }
  }

  /// With the constant scale 1/255: a row's own maximum is 1 there.
  static float unsigned_level(float p255) {
    return std::isnan(p255) ? 0 : std::nearbyint(std::clamp(p255, 0.0f, kUnsignedLevels));
  }

  /// P = exp(S - lse) from the scores and a raw lse.
  void probabilities(Panel<float>& out, const float* lse) const {
    const int64_t n = head_.keys;
    out.p.assign(out.rows * n, 0);
    for (int64_t i = 0; i < out.rows; ++i) {
      const float log2_lse = lse[i] == -kInfinity ? kInfinity : (lse[i] - shift_[i]) * kLog2E;
      for (int64_t j : head_.visible(out.first + i))
        out.p[i * n + j] = exp2_fused(scores_[i * n + j], row_factor_[i], -log2_lse);
    }
  }

  /// delta, dP and dS = P (dP - delta).
  void score_gradients(Panel<float>& out) const {
    const int64_t n = head_.keys, d = head_.channels, rows = out.rows;
    const float* dout = head_.dout + out.first * d;
    const float* o = head_.given_o ? head_.given_o + out.first * d : out.o.data();
    out.delta.resize(rows);
    for (int64_t i = 0; i < rows; ++i)
      out.delta[i] = dot(dout + i * d, o + i * d, d) - dlse(out.first + i);
    out.dp.resize(rows * n);
    if (plan_.dp) {
      const Copy douts = quantized_copy(dout, rows, d, spec_.group_q, over_channels());
      gemm(rows, n, d, rows_of(douts.levels.data()), rows_of(v_rows_.levels.data()).transposed(),
           out.dp.data(), n);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < n; ++j)
          out.dp[i * n + j] *= douts.token_scale[i] * v_rows_.token_scale[j];
    } else {
      gemm(rows, n, d, rows_of(dout), rows_of(head_.v).transposed(), out.dp.data(), n);
    }
    out.ds.assign(rows * n, 0);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j : head_.visible(out.first + i))
        out.ds[i * n + j] = out.p[i * n + j] * (out.dp[i * n + j] - out.delta[i]);
    }
  }

  /// dV, dK and dQ, one group of keys at a time.
  void products(Panel<float>& out) {
    const int64_t n = head_.keys, d = head_.channels, rows = out.rows, tile = spec_.group_kv;
    const float* q = head_.q + out.first * d;
    const float* dout = head_.dout + out.first * d;
    const Copy queries = quantized_copy(q, rows, d, spec_.group_q, over_tokens());
    const Copy douts = quantized_copy(dout, rows, d, spec_.group_q, over_tokens());
    out.dq.assign(rows * d, 0);
    std::vector<float> product(std::max(rows, tile) * d);

    // sum += X^T Y of the panel's columns from `first` on, in the quantised or the 16-bit way.
    const auto over_queries = [&](const std::vector<float>& x, int64_t first, int64_t columns,
                                  bool int8, float levels, const Copy& copy, const float* original,
                                  float* sum) {
      if (!int8) {
        const std::vector<float> operand = rounded_tile(x.data() + first, rows, columns);
        gemm(columns, d, rows, MatrixView<float>{operand.data(), columns}.transposed(),
             rows_of(original), sum + first * d, d, true);
        return;
      }
      const Quantized operand = quantize(x.data() + first, rows, columns, n, over_tokens(), levels);
      gemm(columns, d, rows, MatrixView<float>{operand.levels.data(), columns}.transposed(),
           rows_of(copy.levels.data()), product.data(), d);
      const std::vector<float> scales =
          block_ ? std::vector<float>(columns, operand.row_scale[0]) : operand.column_scale;
      add_scaled(sum + first * d, product.data(), columns, d, scales.data(),
                 copy.group_scale.data());
    };

    for (int64_t first = 0; first < n; first += tile) {
      const int64_t columns = std::min(tile, n - first);
      if (head_.visible(out.first, rows).within(first, columns).empty())
        continue;
      over_queries(out.p, first, columns, plan_.dv, kUnsignedLevels, douts, dout, dv.data());
      over_queries(out.ds, first, columns, plan_.dk, kSignedLevels, queries, q, dk.data());
      if (plan_.dq) {
        const Quantized ds =
            quantize(out.ds.data() + first, rows, columns, n, over_channels(), kSignedLevels);
        gemm(rows, d, columns, {ds.levels.data(), columns},
             rows_of(k_transposed_.levels.data() + first * d), product.data(), d);
        add_scaled(out.dq.data(), product.data(), rows, d, ds.row_scale.data(),
                   k_transposed_.group_scale.data() + first / tile * d);
      } else {
        const std::vector<float> ds = rounded_tile(out.ds.data() + first, rows, columns);
        gemm(rows, d, columns, {ds.data(), columns}, rows_of(head_.k + first * d), out.dq.data(), d,
             true);
      }
    }
    // The row sums of dS are dlse, and smoothed keys lack their mean.
    const bool lacks_mean = plan_.dq && spec_.smooth_k && head_.dlse;
    for (int64_t i = 0; i < rows * d; ++i) {
      out.dq[i] *= head_.softmax_scale;
      if (lacks_mean && !head_.visible(out.first + i / d).empty())
        out.dq[i] += head_.softmax_scale * dlse(out.first + i / d) * mean_[i % d];
    }
    if (round_outputs_)
      round(out.dq);
  }

  float dlse(int64_t query) const { return head_.dlse ? head_.dlse[query] : 0; }

  std::vector<float> rounded_tile(const float* x, int64_t rows, int64_t columns) const {
    std::vector<float> result(rows * columns);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        result[i * columns + j] = rounded(x[i * head_.keys + j]);
    return result;
  }

  Head head_;
  AttentionSpec spec_;
  ProductPlan plan_;
  bool round_outputs_, block_;
  bool shifts_; ///< the scores are those of smoothed keys
  std::vector<float> mean_, smoothed_k_;
  Copy k_scores_, k_transposed_, v_transposed_, v_rows_;
  std::vector<float> scores_, row_factor_, shift_; ///< of the current panel
};

} // namespace

std::unique_ptr<HeadComputation<float>> emulated_head(const Head& head, const AttentionSpec& spec,
                                                      const ProductPlan& plan, bool round_outputs) {
  return std::make_unique<EmulatedHead>(head, spec, plan, round_outputs);
}

ProductPlan plan_of(Precision precision) {
  ProductPlan plan;
  plan.s = precision != Precision::qk16;
  return plan;
}

Outputs<float> emulate(const Inputs& in, const AttentionSpec& spec, const ProductPlan& plan,
                       bool keep_matrices, bool round_outputs, const std::vector<float>* given_o,
                       const std::vector<float>* given_lse) {
  check(in, spec);
  const size_t rows = in.problem.batch * in.problem.heads * in.problem.seq_q;
  if ((given_o && given_o->size() != rows * in.head_dim) ||
      (given_lse && given_lse->size() != rows))
    throw SpecError("given_o and given_lse must have the sizes of the forward's outputs, " +
                    std::to_string(rows * in.head_dim) + " and " + std::to_string(rows));
  auto out = run_heads<float>(in, keep_matrices, spec.group_q, [&](int64_t index) {
    Head head = head_of(in, spec, index);
    if (given_o)
      head.given_o = given_o->data() + index * head.queries * head.channels;
    if (given_lse)
      head.given_lse = given_lse->data() + index * head.queries;
    return emulated_head(head, spec, plan, round_outputs);
  });
  if (round_outputs)
    for (auto* gradient : {&out.dk, &out.dv})
      for (float& x : *gradient)
        x = round_to(spec.dtype, x);
  return out;
}

} // namespace sagebwd::reference
