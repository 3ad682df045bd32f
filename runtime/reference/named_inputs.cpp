//===- named_inputs.cpp - Random inputs of named distributions ------------===//
#include "runtime/reference/named_inputs.h"

#include "runtime/compile_width.h"
#include "runtime/parallel_for.h"
#include "runtime/reference/random.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>

namespace sagebwd::reference {
namespace {

/// The streams of random numbers; each kind of number has its own. The first four are the tensors.
enum Stream : uint32_t {
  kQueries,
  kKeys,
  kValues,
  kGradients,
  kGradientRows,
  kChannelFactors,
  kChannelOffsets,
  kQueryGains,
  kKeyGains,
  kLatents,
  kQueriesOfLatents,
  kKeysOfLatents,
  kValuesOfLatents,
};

/// The size of gradients that reach attention in training: small, because the loss is not a sum
/// over tokens.
constexpr double kGradientSize = 1e-4;

/// The offsets that all channels of a key, and of a query, have in common.
constexpr double kAlternation = 8, kCommonOffset = 4;

/// A small number, far enough above the smallest normal number that its gradients are normal.
double tiny(DType dtype) { return dtype == DType::bf16 ? 1e-30 : 1e-3; }

/// A tensor of (batch * heads, tokens, channels).
class Rows {
public:
  Rows(std::vector<float>& values, int64_t tokens, int channels)
      : values_(values), tokens_(tokens), channels_(channels) {}

  int64_t count() const { return static_cast<int64_t>(values_.size()) / channels_; }
  float* row(int64_t index) const { return values_.data() + index * channels_; }
  /// Calls `visit` with each row, its head and its token.
  template <typename Visit> void each(const Visit& visit) const {
    for (int64_t i = 0; i < count(); ++i)
      visit(row(i), i / tokens_, i % tokens_);
  }
  /// Calls `visit` with the rows of one token in every head.
  template <typename Visit> void of_token(int64_t token, const Visit& visit) const {
    for (int64_t i = token; i < count(); i += tokens_)
      visit(row(i));
  }

private:
  std::vector<float>& values_;
  int64_t tokens_;
  int channels_;
};

void scale(float* row, int channels, double factor) {
  for (int c = 0; c < channels; ++c)
    row[c] = static_cast<float>(row[c] * factor);
}

/// Divides a row by its root mean square.
void normalise(float* row, int channels) {
  const double squares = std::inner_product(row, row + channels, row, 0.0);
  scale(row, channels, std::sqrt(channels / squares));
}

/// Tensors of normal numbers, which a distribution then changes.
class Draft {
public:
  Draft(const InputKind& kind, const Problem& problem, int head_dim, uint64_t seed)
      : problem_(problem), channels_(head_dim), seed_(seed), kind_(kind) {
    in_.problem = problem;
    in_.head_dim = head_dim;
    const int64_t queries = problem.batch * problem.heads * problem.seq_q * head_dim;
    const int64_t keys = problem.batch * problem.heads_kv * problem.seq_kv * head_dim;
    parallel_for(4, usable_cores(), [&](int64_t i) {
      *tensors_[i] =
          normal(i == kQueries || i == kGradients ? queries : keys,
                 i == kQueries || i == kKeys ? kind.sigma : 1, seed, static_cast<uint32_t>(i));
    });
  }

  void shape(DType);
  Inputs rounded(DType);

private:
  std::vector<float> draw(int64_t count, Stream stream, double sigma = 1) const {
    return normal(count, sigma, seed_, stream);
  }
  /// `count` values exp(sigma r) of normal numbers r.
  std::vector<float> log_normal(int64_t count, Stream stream, double sigma) const {
    std::vector<float> values = draw(count, stream, sigma);
    for (float& x : values)
      x = static_cast<float>(std::exp(static_cast<double>(x)));
    return values;
  }

  void small_gradients(double sigma_of_rows);
  void offset_keys(double);
  void outlier_channels();
  void heavy_channels();
  void sink(int64_t key);
  void local();
  void qk_norm(double gain);
  void massive_tokens();
  void padded();
  void alternating_keys();

  const Problem& problem_;
  const int channels_;
  const uint64_t seed_;
  const InputKind kind_;
  Inputs in_;
  const std::array<std::vector<float>*, 4> tensors_ = {&in_.q, &in_.k, &in_.v, &in_.dout};
  const Rows q_{in_.q, problem_.seq_q, channels_}, k_{in_.k, problem_.seq_kv, channels_},
      v_{in_.v, problem_.seq_kv, channels_}, dout_{in_.dout, problem_.seq_q, channels_};
};

/// Gives rows of dO log-normal sizes.
void Draft::small_gradients(double sigma_of_rows) {
  const std::vector<float> sizes = log_normal(dout_.count(), kGradientRows, sigma_of_rows);
  for (int64_t i = 0; i < dout_.count(); ++i)
    scale(dout_.row(i), channels_, kGradientSize * sizes[i]);
}

void Draft::offset_keys(double offset) {
  for (size_t i = 0; i < in_.k.size(); ++i)
    in_.k[i] = static_cast<float>(in_.k[i] + (i % channels_ % 2 ? -offset : offset));
}

void Draft::outlier_channels() {
  const std::vector<float> factors = log_normal(channels_, kChannelFactors, 0.8);
  const std::vector<float> offsets = draw(channels_, kChannelOffsets, 3);
  const double norm =
      std::sqrt(std::inner_product(factors.begin(), factors.end(), factors.begin(), 0.0));
  q_.each([&](float* row, int64_t, int64_t) {
    for (int c = 0; c < channels_; ++c)
      row[c] *= factors[c];
    normalise(row, channels_);
  });
  k_.each([&](float* row, int64_t, int64_t) {
    for (int c = 0; c < channels_; ++c)
      row[c] = static_cast<float>(row[c] * factors[c] / norm * std::sqrt(channels_) + offsets[c]);
  });
  small_gradients(1.5);
}

void Draft::heavy_channels() {
  constexpr int kHeavy = 4;
  const std::vector<float> ranks = draw(channels_, kChannelFactors);
  std::vector<int> channels(channels_);
  std::iota(channels.begin(), channels.end(), 0);
  std::partial_sort(channels.begin(), channels.begin() + kHeavy, channels.end(),
                    [&](int a, int b) { return ranks[a] < ranks[b]; });
  channels.resize(kHeavy);
  for (int c : channels) {
    q_.each([&](float* row, int64_t, int64_t) { row[c] *= 12; });
    k_.each([&](float* row, int64_t, int64_t) { row[c] = row[c] * 3 + 20; });
  }
  small_gradients(0);
}

/// Gives a key half of the mass of a query that sees all keys: the exponentials of the other scores
/// add up to N e^0.5, and the sink's score is ln N + 0.5. The sink lies along four channels in
/// which all queries are similar and the other keys are small.
void Draft::sink(int64_t key) {
  constexpr int kAlong = 4;
  constexpr double kOfQueries = 2, kSpread = 0.3;
  q_.each([&](float* row, int64_t, int64_t) {
    for (int c = 0; c < kAlong; ++c)
      row[c] = static_cast<float>(kOfQueries + kSpread * row[c]);
  });
  k_.each([&](float* row, int64_t, int64_t) { scale(row, kAlong, kSpread); });
  const double score = std::log(static_cast<double>(problem_.seq_kv)) + 0.5;
  const double in_a_channel = score * std::sqrt(channels_) / (kAlong * kOfQueries);
  k_.of_token(key,
              [&](float* row) { std::fill(row, row + kAlong, static_cast<float>(in_a_channel)); });
}

/// Scores up to 8 that fall off with the distance, as with rotary embeddings.
void Draft::local() {
  constexpr int kWaves = 16;
  const double amplitude = std::sqrt(8 * std::sqrt(channels_) / kWaves);
  const auto write = [&](float* row, int64_t, int64_t token) {
    for (int i = 0; i < kWaves; ++i) {
      const double angle = static_cast<double>(token) * std::pow(4000.0, -i / 16.0);
      row[2 * i] = static_cast<float>(amplitude * std::cos(angle));
      row[2 * i + 1] = static_cast<float>(amplitude * std::sin(angle));
    }
  };
  q_.each(write);
  k_.each(write);
  small_gradients(1);
}

/// Tokens share latent features of low rank, channels differ in size, and each head's keys have a
/// mean. Then rows are normalised, and channels get gains.
void Draft::qk_norm(double gain) {
  constexpr int kRank = 16;
  const int64_t tokens = std::max(problem_.seq_q, problem_.seq_kv);
  const int64_t group = problem_.heads / problem_.heads_kv;
  const int64_t heads_kv = problem_.batch * problem_.heads_kv;
  const std::vector<float> latents = draw(heads_kv * tokens * kRank, kLatents);
  const std::vector<float> factors = log_normal(channels_, kChannelFactors, 0.5);
  const std::vector<float> means = draw(heads_kv * channels_, kChannelOffsets);

  const auto add_latents = [&](const Rows& rows, int64_t heads_a_latent, Stream stream,
                               double weight) {
    const std::vector<float> projection = draw(int64_t{kRank} * channels_, stream, weight);
    rows.each([&](float* row, int64_t head, int64_t token) {
      const float* latent =
          latents.data() + (head / heads_a_latent * tokens + token) * int64_t{kRank};
      for (int r = 0; r < kRank; ++r)
        for (int c = 0; c < channels_; ++c)
          row[c] += latent[r] * projection[r * channels_ + c];
    });
  };
  add_latents(q_, group, kQueriesOfLatents, 0.1);
  add_latents(k_, 1, kKeysOfLatents, 0.1);
  add_latents(v_, 1, kValuesOfLatents, 0.25);

  const std::vector<float> query_gains = log_normal(channels_, kQueryGains, 0.3);
  const std::vector<float> key_gains = log_normal(channels_, kKeyGains, 0.3);
  const auto finish = [&](float* row, const float* mean, const std::vector<float>& gains) {
    for (int c = 0; c < channels_; ++c)
      row[c] = (row[c] + (mean ? mean[c] : 0)) * factors[c];
    normalise(row, channels_);
    for (int c = 0; c < channels_; ++c)
      row[c] = static_cast<float>(row[c] * gain * gains[c]);
  };
  q_.each([&](float* row, int64_t, int64_t) { finish(row, nullptr, query_gains); });
  k_.each([&](float* row, int64_t head, int64_t) {
    finish(row, means.data() + head * channels_, key_gains);
  });
  small_gradients(1);
}

/// Makes the values and gradients of a few tokens huge; other channels give them high scores.
void Draft::massive_tokens() {
  const auto tokens = [](int64_t length) {
    return std::set<int64_t>{length / 40, 3 * length / 8, 5 * length / 8,
                             std::max<int64_t>(length - 50, 0)};
  };
  constexpr double kFactor = 20;
  for (int64_t token : tokens(problem_.seq_q)) {
    q_.of_token(token, [](float* row) { scale(row + 2, 2, 10); });
    dout_.of_token(token, [&](float* row) { scale(row, channels_, kFactor); });
  }
  for (int64_t token : tokens(problem_.seq_kv)) {
    k_.of_token(token, [](float* row) { row[0] += 15, row[1] += 15; });
    v_.of_token(token, [&](float* row) { scale(row, channels_, kFactor); });
  }
}

/// Some units of channels' scales are all zeros; the others have small numbers.
void Draft::padded() {
  small_gradients(0);
  const auto keep = [&](const Rows& rows, int64_t first, int64_t end) {
    rows.each([&](float* row, int64_t, int64_t token) {
      if (token < first || token >= end)
        std::fill(row, row + channels_, 0.0f);
    });
  };
  keep(v_, 0, (problem_.seq_kv * 3 + 4) / 5);
  keep(dout_, problem_.seq_q / 5, (problem_.seq_q * 3 + 4) / 5);
}

/// Adds an offset to all channels of every key, with the opposite sign for every other key.
void Draft::alternating_keys() {
  k_.each([&](float* row, int64_t, int64_t token) {
    for (int c = 0; c < channels_; ++c)
      row[c] = static_cast<float>(row[c] + (token % 2 ? -kAlternation : kAlternation));
  });
}

void Draft::shape(DType dtype) {
  switch (kind_.distribution) {
  case Distribution::gaussian:
    if (kind_.key_offset != 0)
      offset_keys(kind_.key_offset);
    return;
  case Distribution::outlier_channels:
    return outlier_channels();
  case Distribution::heavy_channels:
    return heavy_channels();
  case Distribution::sink:
    sink(0);
    v_.of_token(0, [&](float* row) { scale(row, channels_, 0.05); });
    return small_gradients(1);
  case Distribution::sink_last:
    return sink(problem_.seq_kv - 1);
  case Distribution::large_first_key:
    return k_.of_token(0, [&](float* row) { scale(row, channels_, 30); });
  case Distribution::local:
    return local();
  case Distribution::qk_norm:
    return qk_norm(3);
  case Distribution::qk_norm_unit:
    return qk_norm(1);
  case Distribution::massive_tokens:
    return massive_tokens();
  case Distribution::padded:
    return padded();
  case Distribution::alternating_keys:
    return alternating_keys();
  case Distribution::common_offset:
    for (std::vector<float>* x : {&in_.q, &in_.k})
      for (float& value : *x)
        value = static_cast<float>(value + kCommonOffset);
    return;
  case Distribution::tiny_values:
    return v_.each([&](float* row, int64_t, int64_t) { scale(row, channels_, tiny(dtype)); });
  }
}

Inputs Draft::rounded(DType dtype) {
  parallel_for(4, usable_cores(), [&](int64_t i) {
    std::vector<float>& values = *tensors_[i];
    for (size_t first = 0; first < values.size(); first += 1 << 20) {
      check_interrupt();
      const size_t end = std::min(values.size(), first + (1 << 20));
      for (size_t at = first; at < end; ++at)
        values[at] = round_to(dtype, values[at]);
    }
  });
  return std::move(in_);
}

} // namespace

const DistributionFacts& facts_of(Distribution distribution) {
  using enum Causal;
  // The order is that of the enumeration.
  static constexpr DistributionFacts kFacts[] = {
      {"q and k have the standard deviation sigma, v and dO have 1 (untrained models)", 1, none},
      {"channels and rows of dO have log-normal sizes, and keys have an offset", 1, none},
      {"four channels are large: 12 times in q, 3 times and + 20 in k; dO is small", 4, top_left},
      {"the first key takes half of the weight, and its value is near zero (language models)", 4,
       top_left},
      {"the last key takes half of the weight (a register token)", 4, none},
      {"the first key is 30 times as long (beginning-of-text tokens)", 1, top_left},
      {"scores fall off with the distance of tokens (rotary embeddings)", 32, top_left},
      {"rows are normalised, with gains of 3 (QK-norm, late in training)", 1, top_left},
      {"rows are normalised, with gains of 1 (QK-norm, at the start)", 1, top_left},
      {"four tokens have 20 times as large values and gradients (massive activations)", 4, none},
      {"the last two fifths of v and dO and the first fifth of dO are zeros (padding, prompts)", 1,
       none},
      {"keys alternate between 8 and -8 in every channel (a rotation may gather them in one)", 1,
       none},
      {"q and k have an offset of 4 in every channel", 1, none},
      {"v is about 1e-30, in fp16 1e-3 (an absolute limit would take it for zeros)", 1, none},
  };
  static_assert(std::size(kFacts) == std::size(Words<Distribution>::all));
  return kFacts[static_cast<size_t>(distribution)];
}

Inputs named_inputs(const InputKind& kind, const Problem& problem, int head_dim, DType dtype,
                    uint64_t seed) {
  const std::string name(to_string(kind.distribution));
  if (kind.distribution != Distribution::gaussian && (kind.sigma != 1 || kind.key_offset != 0))
    throw SpecError("sigma and key offset are parameters of the inputs 'gaussian': '" + name +
                    "' has none; leave them out");
  if (const int least = facts_of(kind.distribution).least_channels; head_dim < least)
    throw SpecError("the inputs '" + name + "' need a head dimension of at least " +
                    std::to_string(least) + "; it is " + std::to_string(head_dim));
  check_size_of_inputs(problem, head_dim);
  Draft draft(kind, problem, head_dim, seed);
  draft.shape(dtype);
  return draft.rounded(dtype);
}

Inputs random_inputs(const Problem& problem, int head_dim, DType dtype, double sigma,
                     uint64_t seed) {
  return named_inputs({Distribution::gaussian, sigma}, problem, head_dim, dtype, seed);
}

} // namespace sagebwd::reference
