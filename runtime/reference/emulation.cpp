//===- emulation.cpp - Compute attention as the kernels do ----------------===//
//
// Every quantiser is bit for bit that of the kernels, integer products are exact, and everything
// else is FP32. The last bits may differ from a kernel's, because kernels leave open: the order of
// FP32 sums, exp2 and log2 (here nearly exact), and the reciprocals of the maxima of P and dS.
//
//===----------------------------------------------------------------------===//
#include "generator/pointwise.h"
#include "runtime/reference/emulated_scores.h"
#include "runtime/reference/gemm.h"
#include "runtime/reference/half_sums.h"
#include "runtime/reference/quantizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

namespace sagebwd::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2Levels = 7.99435344f; ///< log2(255)
constexpr float kReferenceSlack = 16; ///< log2 of the factor by which P may exceed 1 in a group

/// 2^(x * scale + addend); the exponent is rounded once, as by a fused multiply-add.
float exp2_fused(float x, float scale, float addend) {
  return std::exp2(static_cast<float>(static_cast<double>(x) * scale + addend));
}

class EmulatedHead final : public HeadComputation<float> {
public:
  EmulatedHead(const Head& head, const AttentionSpec& spec, const ProductPlan& plan,
               bool round_outputs)
      : HeadComputation(head), head_(head), spec_(spec), plan_(plan), round_outputs_(round_outputs),
        block_(grouping_of(spec.granularity).one_scale), sinks_(spec.sink_keys),
        copies_(head, spec, plan) {
    if (head.dout && sums_dp_in_fp16(spec) && !plan.dp)
      centred_values_.emplace(head.v, head.keys, head.channels, width(spec));
  }

  Panel<float> panel(int64_t first, int64_t rows) override {
    Panel<float> out{first, rows};
    scores_ = {head_, spec_, plan_, copies_, first, rows};
    forward(out);
    if (round_outputs_)
      round(out.o);
    const bool backward = head_.dout;
    probabilities(out, backward && head_.given_lse ? head_.given_lse + first : out.lse.data());
    if (backward) {
      score_gradients(out);
      products(out);
    }
    show_matrices(out);
    return out;
  }

private:
  /// How operands share scales, for products over channels and over tokens.
  Sharing over_channels() const { return block_ ? Sharing::whole : Sharing::row; }
  Sharing over_tokens() const { return block_ ? Sharing::whole : Sharing::column; }
  MatrixView<float> rows_of(const float* tensor) const { return {tensor, head_.channels}; }
  float rounded(float x) const { return round_to(spec_.dtype, x); }
  void round(std::vector<float>& tensor) const {
    for (float& x : tensor)
      x = rounded(x);
  }

  /// The keys that a query sees, without sinks; sees_sink(): whether it sees the first key.
  VisibleKeys others(int64_t query, int64_t count = 1) const {
    return head_.visible(query, count).within(sinks_, head_.keys - sinks_);
  }
  bool sees_sink(int64_t query) const { return !head_.visible(query).within(0, sinks_).empty(); }

  void forward(Panel<float>& out) const {
    const int64_t n = head_.keys, d = head_.channels, rows = out.rows, tile = spec_.group_kv;
    out.o.assign(rows * d, 0);
    out.lse.assign(rows, -kInfinity);
    out.largest.assign(rows, -kInfinity);
    std::vector<float> reference(rows, -kInfinity), sum(rows, 0), beta(rows);
    std::vector<float> p(rows * tile), product(rows * d);
    const float levels = plan_.pv ? kUnsignedLevels : 1, log2_levels = plan_.pv ? kLog2Levels : 0;
    const std::vector<float> ones(d, 1);
    for (int64_t i = 0; i < rows; ++i)
      if (sees_sink(out.first + i)) {
        reference[i] = out.largest[i] = scores_.of_sink[i];
        sum[i] = levels;
        for (int64_t c = 0; c < d; ++c)
          out.o[i * d + c] = levels * (head_.v[c] - copies_.v_mean[c]);
      }

    for (int64_t first = 0; first < n; first += tile) {
      const int64_t columns = std::min(tile, n - first);
      std::fill(p.begin(), p.end(), 0.0f);
      for (int64_t i = 0; i < rows; ++i) {
        const VisibleKeys visible = others(out.first + i).within(first, columns);
        beta[i] = 0;
        if (visible.empty())
          continue;
        const float* x = scores_.x.data() + i * n;
        float largest = -kInfinity; // a NaN is not a maximum, but reaches the sum
        for (int64_t j : visible)
          largest = std::max(largest, x[j]);
        largest *= scores_.row_factor[i];
        out.largest[i] = std::max(out.largest[i], largest);
        if (largest > reference[i] + kReferenceSlack) {
          const float alpha = std::exp2(reference[i] - largest);
          sum[i] *= alpha;
          for (int64_t c = 0; c < d; ++c)
            out.o[i * d + c] *= alpha;
          reference[i] = largest;
        }
        beta[i] = std::exp2(largest - reference[i]);
        float tile_sum = 0;
        for (int64_t j : visible) {
          const float value = exp2_fused(x[j], scores_.row_factor[i], log2_levels - largest);
          tile_sum += value;
          p[i * tile + j - first] = plan_.pv ? unsigned_level(value) : rounded(value);
        }
        sum[i] += tile_sum * beta[i];
      }
      const float* v = plan_.pv ? copies_.v_transposed.token(first) : head_.v + first * d;
      gemm(rows, d, columns, {p.data(), tile}, rows_of(v), product.data(), d);
      const float* scales = plan_.pv ? copies_.v_transposed.scales_at(first) : ones.data();
      for (int64_t i = 0; i < rows; ++i)
        if (!others(out.first + i).within(first, columns).empty())
          add_scaled(&out.o[i * d], &product[i * d], 1, d, &beta[i], scales);
    }
    for (int64_t i = 0; i < rows; ++i) {
      if (head_.visible(out.first + i).empty())
        continue;
      for (int64_t c = 0; c < d; ++c)
        out.o[i * d + c] = std::fma(out.o[i * d + c], 1 / sum[i], copies_.v_mean[c]);
      out.lse[i] = kLn2 * (reference[i] + std::log2(sum[i]) - log2_levels) + scores_.shift[i];
      out.largest[i] = kLn2 * out.largest[i] + scores_.shift[i];
    }
  }

  /// The level for the constant scale 1/255: a row's own maximum is 1.
  static float unsigned_level(float p255) {
    return std::isnan(p255) ? 0 : std::nearbyint(std::clamp(p255, 0.0f, kUnsignedLevels));
  }

  /// The exponent e of a row: here P is stored as P 2^e, and dP as dP 2^-e.
  int exponent(const Panel<float>& out, int64_t row) const {
    return head_.dout ? copies_.exponents[out.first + row] : 0;
  }

  /// Computes P = exp(S - lse) from scores and a raw lse; separately for the first key.
  void probabilities(Panel<float>& out, const float* lse) {
    const int64_t n = head_.keys;
    out.p.assign(out.rows * n, 0);
    sink_p_.assign(out.rows, 0);
    for (int64_t i = 0; i < out.rows; ++i) {
      const float log2_lse =
          lse[i] == -kInfinity ? kInfinity : (lse[i] - scores_.shift[i]) * kLog2E;
      const float subtrahend = log2_lse - static_cast<float>(exponent(out, i));
      for (int64_t j : others(out.first + i))
        out.p[i * n + j] = exp2_fused(scores_.x[i * n + j], scores_.row_factor[i], -subtrahend);
      if (sees_sink(out.first + i))
        sink_p_[i] = std::exp2(scores_.of_sink[i] - log2_lse);
    }
  }

  /// Computes delta, dP and dS = P (dP - delta); separately for the first key.
  void score_gradients(Panel<float>& out) {
    const int64_t n = head_.keys, d = head_.channels, rows = out.rows;
    const float* dout = head_.dout + out.first * d;
    const float* scaled = copies_.douts.data() + out.first * d;
    const float* o = head_.given_o ? head_.given_o + out.first * d : out.o.data();
    out.delta.resize(rows);
    for (int64_t i = 0; i < rows; ++i)
      out.delta[i] = dot(dout + i * d, o + i * d, d) - head_.dlse_of(out.first + i);
    out.dp.resize(rows * n);
    std::vector<float> of_centre(rows, 0.0f); // what dP lacks
    if (centred_values_) {
      for (int64_t i = 0; i < rows; ++i)
        of_centre[i] = dot(dout + i * d, centred_values_->centre.data(), d);
      centred_values_->multiply(dout, rows, &copies_.exponents[out.first], out.dp.data());
    } else if (plan_.dp) {
      const Copy douts = copy_by_tokens(scaled, rows, d, block_ ? spec_.group_q : 1);
      gemm(rows, n, d, rows_of(douts.levels.data()),
           rows_of(copies_.v_rows.levels.data()).transposed(), out.dp.data(), n);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < n; ++j)
          out.dp[i * n + j] *= douts.token_scale[i] * copies_.v_rows.token_scale[j];
    } else {
      gemm(rows, n, d, rows_of(scaled), rows_of(head_.v).transposed(), out.dp.data(), n);
    }
    out.ds.assign(rows * n, 0);
    sink_dp_.resize(rows);
    sink_ds_.assign(rows, 0);
    for (int64_t i = 0; i < rows; ++i) {
      const int e = exponent(out, i);
      const float delta = std::ldexp(out.delta[i] - of_centre[i], -e);
      for (int64_t j : others(out.first + i))
        out.ds[i * n + j] = out.p[i * n + j] * (out.dp[i * n + j] - delta) *
                            (head_.score ? scores_.slope[i * n + j] : 1);
      for (int64_t j = 0; j < n && centred_values_; ++j) // for show_matrices()
        out.dp[i * n + j] += std::ldexp(of_centre[i], -e);
      sink_dp_[i] = dot(dout + i * d, head_.v, d);
      if (sees_sink(out.first + i))
        sink_ds_[i] = sink_p_[i] * (sink_dp_[i] - out.delta[i]);
    }
  }

  /// Computes dV, dK and dQ, one group of keys at a time.
  void products(Panel<float>& out) {
    const int64_t n = head_.keys, d = head_.channels, rows = out.rows, tile = spec_.group_kv;
    const float* q = head_.q + out.first * d;
    const float* dout = head_.dout + out.first * d;
    out.dq.assign(rows * d, 0);
    std::vector<float> product(std::max(rows, tile) * d);
    add_sink(out);

    // sum += X^T Y for the panel's columns from `first` on, quantised or in 16 bits.
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
           rows_of(copy.token(out.first)), product.data(), d);
      const std::vector<float> scales =
          block_ ? std::vector<float>(columns, operand.row_scale[0]) : operand.column_scale;
      add_scaled(sum + first * d, product.data(), columns, d, scales.data(),
                 copy.scales_at(out.first));
    };

    for (int64_t first = 0; first < n; first += tile) {
      const int64_t columns = std::min(tile, n - first);
      if (others(out.first, rows).within(first, columns).empty())
        continue;
      over_queries(out.p, first, columns, plan_.dv, kUnsignedLevels, copies_.dout_transposed, dout,
                   dv.data());
      over_queries(out.ds, first, columns, plan_.dk, kSignedLevels, copies_.q_transposed, q,
                   dk.data());
      add_mean_gradients(out, first, columns);
      if (plan_.dq) {
        const Quantized ds =
            quantize(out.ds.data() + first, rows, columns, n, over_channels(), kSignedLevels);
        gemm(rows, d, columns, {ds.levels.data(), columns},
             rows_of(copies_.k_transposed.token(first)), product.data(), d);
        add_scaled(out.dq.data(), product.data(), rows, d, ds.row_scale.data(),
                   copies_.k_transposed.scales_at(first));
      } else {
        const std::vector<float> ds = rounded_tile(out.ds.data() + first, rows, columns);
        gemm(rows, d, columns, {ds.data(), columns}, rows_of(copies_.k_rows.data() + first * d),
             out.dq.data(), d, true);
      }
    }
    // Rows of dS sum to dlse, unless a score function bends scores: with smoothed keys, dQ lacks
    // that times their mean.
    const bool bends = bends_scores(spec_);
    const bool lacks_mean = spec_.smooth_k && (head_.dlse || bends);
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = out.ds.begin() + i * n;
      const float sum = bends ? std::accumulate(row, row + n, 0.0f) : head_.dlse_of(out.first + i);
      const bool adds_mean = lacks_mean && !head_.visible(out.first + i).empty();
      for (int64_t c = 0; c < d; ++c)
        out.dq[i * d + c] =
            head_.softmax_scale * (out.dq[i * d + c] + (adds_mean ? sum * copies_.mean[c] : 0));
    }
    if (round_outputs_)
      round(out.dq);
  }

  /// Adds the part of dK that comes from the mean which the panel's queries lack.
  void add_mean_gradients(const Panel<float>& out, int64_t first, int64_t columns) {
    const float* mean = plan_.dk ? copies_.query_mean(out.first) : nullptr;
    const int64_t n = head_.keys, d = head_.channels;
    for (int64_t j = first; mean && j < first + columns; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < out.rows; ++i)
        sum += out.ds[i * n + j];
      for (int64_t c = 0; c < d; ++c)
        dk[j * d + c] += sum * mean[c];
    }
  }

  /// Adds the first key's part of dQ, dK and dV in FP32.
  void add_sink(Panel<float>& out) {
    const int64_t d = head_.channels;
    const float* key = copies_.smoothed_k.data();
    for (int64_t i = 0; i < out.rows; ++i) {
      if (!sees_sink(out.first + i))
        continue;
      const int64_t row = (out.first + i) * d;
      for (int64_t c = 0; c < d; ++c) {
        out.dq[i * d + c] += sink_ds_[i] * key[c];
        dk[c] += sink_ds_[i] * head_.q[row + c];
        dv[c] += sink_p_[i] * head_.dout[row + c];
      }
    }
  }

  /// Converts P, dP and dS for the caller: removes exponents, adds the first key.
  void show_matrices(Panel<float>& out) const {
    const int64_t n = head_.keys;
    for (int64_t i = 0; i < out.rows; ++i) {
      if (const int e = exponent(out, i); e != 0)
        for (int64_t j = i * n; j < (i + 1) * n; ++j) {
          out.p[j] = std::ldexp(out.p[j], -e);
          out.dp[j] = std::ldexp(out.dp[j], e);
        }
      if (sinks_ == 0)
        continue;
      out.p[i * n] = sink_p_[i];
      if (head_.dout) {
        out.dp[i * n] = sink_dp_[i];
        out.ds[i * n] = sink_ds_[i];
      }
    }
  }

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
  int64_t sinks_; ///< first keys that are computed separately
  HeadCopies copies_;
  std::optional<CentredValues> centred_values_;   ///< if dP is summed in FP16
  EmulatedScores scores_;                         ///< of the current panel
  std::vector<float> sink_p_, sink_dp_, sink_ds_; ///< of the first key
};

} // namespace

std::unique_ptr<HeadComputation<float>> emulated_head(const Head& head, const AttentionSpec& spec,
                                                      const ProductPlan& plan, bool round_outputs) {
  return std::make_unique<EmulatedHead>(head, spec, plan, round_outputs);
}

} // namespace sagebwd::reference
