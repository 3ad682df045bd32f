//===- mixture.cpp - SLA2's attention on the CPU ----------------------------===//
#include "runtime/reference/mixture.h"

#include "runtime/compile_width.h"
#include "runtime/parallel_for.h"
#include "runtime/reference/head.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace sagebwd::reference {
namespace {

using Values = std::vector<double>;

/// What the keys of a block, or of several, add to linear attention: phi(K)^T V and phi(K)^T 1; or
/// the gradients of those.
struct Sums {
  Values matrix, vector;
  explicit Sums(int64_t channels) : matrix(channels * channels), vector(channels) {}
  void add(const Sums& other) {
    for (size_t i = 0; i < matrix.size(); ++i)
      matrix[i] += other.matrix[i];
    for (size_t i = 0; i < vector.size(); ++i)
      vector[i] += other.vector[i];
  }
};

double inner_product(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += a[i] * b[i];
  return sum;
}

/// Linear attention of all heads. Query heads are numbered over all sequences, and so are key
/// heads.
class LinearAttention {
public:
  LinearAttention(const Inputs& in, const AttentionSpec& spec)
      : out(in.q.size()), in_(in), spec_(spec), p_(in.problem), d_(in.head_dim),
        lists_(list_blocks(Tokens::queries, spec, p_)),
        blocks_(list_blocks(Tokens::keys, spec, p_)), f_(phi_of(in.q, {})),
        g_(phi_of(in.k, spec.smooth_k ? mean_of_keys() : Values())) {
    for_key_heads([&](int64_t kv) {
      std::vector<Sums> states(blocks_, Sums(d_));
      for (int64_t key = 0; key < p_.seq_kv; ++key)
        add_outer(states[key / spec_.sparse_kv], &g_[(kv * p_.seq_kv + key) * d_], value(kv, key));
      for_lists(kv, [&](int64_t head, int64_t list) {
        const Sums sums = sum_of(states, [&](int64_t block) { return sees(head, list, block); });
        for_queries(list, [&](int64_t query) { form_output(sums, head * p_.seq_q + query); });
      });
    });
  }

  /// Adds what a gradient of `out` gives q, k and v.
  template <typename T> void add_gradients(const Values& dout, Outputs<T>& to) const {
    for_key_heads([&](int64_t kv) {
      std::vector<Sums> states(blocks_, Sums(d_)), of_states(blocks_, Sums(d_));
      for (int64_t key = 0; key < p_.seq_kv; ++key)
        add_outer(states[key / spec_.sparse_kv], &g_[(kv * p_.seq_kv + key) * d_], value(kv, key));
      for_lists(kv, [&](int64_t head, int64_t list) {
        const auto visible = [&](int64_t block) { return sees(head, list, block); };
        const Sums sums = sum_of(states, visible);
        Sums of_sums(d_);
        for_queries(list, [&](int64_t query) {
          add_gradients_of_query(sums, dout, head * p_.seq_q + query, of_sums, to.dq);
        });
        for (int64_t block = 0; block < blocks_; ++block)
          if (visible(block))
            of_states[block].add(of_sums);
      });
      add_gradients_of_keys(kv, of_states, to);
    });
  }

  Values out;

  /// What a query lists: nothing, and everything if then no key is left.
  bool is_listed(int64_t head, int64_t list, int64_t block) const {
    return in_.listed[(head * lists_ + list) * blocks_ + block] != 0;
  }
  bool lists_nothing(int64_t head, int64_t list) const { return listed(head, list) == 0; }
  bool leaves_nothing(int64_t head, int64_t list) const {
    return spec_.linear == LinearKeys::complement && listed(head, list) == blocks_;
  }

private:
  int64_t listed(int64_t head, int64_t list) const {
    int64_t count = 0;
    for (int64_t block = 0; block < blocks_; ++block)
      count += is_listed(head, list, block);
    return count;
  }
  bool sees(int64_t head, int64_t list, int64_t block) const {
    return spec_.linear == LinearKeys::all || !is_listed(head, list, block);
  }
  const float* value(int64_t kv, int64_t key) const { return &in_.v[(kv * p_.seq_kv + key) * d_]; }

  template <typename Work> void for_key_heads(const Work& work) const {
    parallel_for(p_.batch * p_.heads_kv, usable_cores(), work);
  }
  template <typename Work> void for_lists(int64_t kv, const Work& work) const {
    const int64_t group = p_.heads / p_.heads_kv;
    for (int64_t head = kv * group; head < (kv + 1) * group; ++head)
      for (int64_t list = 0; list < lists_; ++list)
        work(head, list);
  }
  template <typename Work> void for_queries(int64_t list, const Work& work) const {
    const int64_t end = std::min(p_.seq_q, (list + 1) * spec_.sparse_q);
    for (int64_t query = list * spec_.sparse_q; query < end; ++query)
      work(query);
  }

  Values mean_of_keys() const {
    Values mean(p_.batch * p_.heads_kv * d_);
    for (size_t i = 0; i < in_.k.size(); ++i)
      mean[i / (p_.seq_kv * d_) * d_ + i % d_] += in_.k[i] / static_cast<double>(p_.seq_kv);
    return mean;
  }
  /// The softmax over channels of each token, less its head's mean if there are means.
  Values phi_of(const std::vector<float>& x, const Values& means) const {
    Values phi(x.begin(), x.end());
    for (size_t row = 0; row < phi.size(); row += d_) {
      double* of = &phi[row];
      const double* mean = means.empty() ? nullptr : &means[row / (p_.seq_kv * d_) * d_];
      for (int64_t c = 0; mean && c < d_; ++c)
        of[c] -= mean[c];
      const double most = *std::max_element(of, of + d_);
      double sum = 0;
      for (int64_t c = 0; c < d_; ++c)
        sum += of[c] = std::exp(of[c] - most);
      for (int64_t c = 0; c < d_; ++c)
        of[c] /= sum;
    }
    return phi;
  }

  template <typename T> void add_outer(Sums& to, const double* f, const T* x) const {
    for (int64_t c = 0; c < d_; ++c) {
      to.vector[c] += f[c];
      for (int64_t e = 0; e < d_; ++e)
        to.matrix[c * d_ + e] += f[c] * x[e];
    }
  }
  template <typename Visible>
  Sums sum_of(const std::vector<Sums>& states, const Visible& visible) const {
    Sums sums(d_);
    for (int64_t block = 0; block < blocks_; ++block)
      if (visible(block))
        sums.add(states[block]);
    return sums;
  }

  void form_output(const Sums& sums, int64_t row) {
    const double* f = &f_[row * d_];
    const double u = inner_product(f, sums.vector.data(), d_);
    for (int64_t c = 0; c < d_ && u != 0; ++c)
      for (int64_t e = 0; e < d_; ++e)
        out[row * d_ + e] += f[c] * sums.matrix[c * d_ + e] / u;
  }

  template <typename T>
  void add_gradients_of_query(const Sums& sums, const Values& dout, int64_t row, Sums& of_sums,
                              std::vector<T>& dq) const {
    const double *f = &f_[row * d_], *of_out = &dout[row * d_];
    const double u = inner_product(f, sums.vector.data(), d_);
    if (u == 0)
      return;
    const double delta = inner_product(of_out, &out[row * d_], d_);
    Values df(d_);
    for (int64_t c = 0; c < d_; ++c) {
      df[c] = (inner_product(of_out, &sums.matrix[c * d_], d_) - delta * sums.vector[c]) / u;
      of_sums.vector[c] -= f[c] / u * delta;
      for (int64_t e = 0; e < d_; ++e)
        of_sums.matrix[c * d_ + e] += f[c] / u * of_out[e];
    }
    add_through_phi(f, df, &dq[row * d_]);
  }

  template <typename T>
  void add_gradients_of_keys(int64_t kv, const std::vector<Sums>& of_states, Outputs<T>& to) const {
    Values dk(p_.seq_kv * d_), mean(d_), dg(d_);
    for (int64_t key = 0; key < p_.seq_kv; ++key) {
      const Sums& of = of_states[key / spec_.sparse_kv];
      const int64_t row = kv * p_.seq_kv + key;
      const double* g = &g_[row * d_];
      for (int64_t c = 0; c < d_; ++c) {
        dg[c] = of.vector[c];
        for (int64_t e = 0; e < d_; ++e) {
          dg[c] += of.matrix[c * d_ + e] * value(kv, key)[e];
          to.dv[row * d_ + e] += static_cast<T>(g[c] * of.matrix[c * d_ + e]);
        }
      }
      add_through_phi(g, dg, &dk[key * d_]);
      for (int64_t c = 0; c < d_ && spec_.smooth_k; ++c)
        mean[c] += dk[key * d_ + c] / static_cast<double>(p_.seq_kv);
    }
    for (int64_t i = 0; i < p_.seq_kv * d_; ++i) {
      if constexpr (std::is_same_v<T, float>) // kernels keep it in 16 bits until the mean is known
        dk[i] = round_to(spec_.dtype, static_cast<float>(dk[i]));
      to.dk[kv * p_.seq_kv * d_ + i] += static_cast<T>(dk[i] - mean[i % d_]);
    }
  }

  template <typename T> void add_through_phi(const double* f, const Values& df, T* to) const {
    const double inner = inner_product(f, df.data(), d_);
    for (int64_t c = 0; c < d_; ++c)
      to[c] += static_cast<T>(f[c] * (df[c] - inner));
  }

  const Inputs& in_;
  const AttentionSpec spec_;
  const Problem p_;
  const int64_t d_, lists_, blocks_;
  const Values f_, g_;
};

void check_shares(const Inputs& in) {
  const auto rows = static_cast<size_t>(in.problem.batch * in.problem.heads * in.problem.seq_q);
  if (in.shares.size() != rows || in.dout.empty())
    throw SpecError("a mixture needs dout, and shares of " + std::to_string(rows) +
                    " queries; given are " + std::to_string(in.shares.size()));
}

/// `attend` gives exact attention of the inputs, with gradients if they have dout.
template <typename T, typename Attend>
Outputs<T> mixture(const Inputs& in, const AttentionSpec& spec, const Attend& attend) {
  check_shares(in);
  Inputs inputs = in;
  inputs.dout.clear(), inputs.dlse.clear();
  const Outputs<T> exact = attend(inputs);
  inputs.dout = in.dout, inputs.dlse = in.dlse;
  inputs.dlse.resize(exact.lse.size());
  const LinearAttention linear(in, spec);
  const int64_t d = in.head_dim, queries = in.problem.seq_q;
  Values of_linear(in.dout.begin(), in.dout.end()), out(in.dout.size());
  std::vector<T> dshares(exact.lse.size());
  for (int64_t row = 0; row < static_cast<int64_t>(dshares.size()); ++row) {
    const int64_t head = row / queries, list = row % queries / spec.sparse_q;
    const bool nothing = linear.lists_nothing(head, list);
    const bool everything = linear.leaves_nothing(head, list);
    const double x = exact.lse[row] - double{in.shares[row]};
    const double given = in.of_rest ? 1 / (1 + std::exp(-x)) : in.shares[row];
    const double beside = in.of_rest ? 1 / (1 + std::exp(x)) : 1 - given;
    const double share = nothing ? 0 : everything ? 1 : given;
    const double left = nothing ? 1 : everything ? 0 : beside;
    double apart = 0;
    for (int64_t i = row * d; i < (row + 1) * d; ++i) {
      apart += in.dout[i] * (exact.o[i] - linear.out[i]);
      out[i] = share * exact.o[i] + left * linear.out[i];
      inputs.dout[i] = static_cast<float>(share * in.dout[i]);
      of_linear[i] *= left;
    }
    if (nothing || everything)
      continue;
    const double of_lse = in.of_rest ? share * left * apart : 0;
    inputs.dlse[row] += static_cast<float>(of_lse);
    dshares[row] = static_cast<T>(in.of_rest ? -of_lse : apart);
  }
  Outputs<T> result = attend(inputs);
  linear.add_gradients(of_linear, result);
  result.o.assign(out.begin(), out.end());
  result.dshares = std::move(dshares);
  return result;
}

AttentionSpec without_linear(AttentionSpec spec) {
  spec.linear = LinearKeys::none;
  return spec;
}

} // namespace

Outputs<double> exact_mixture(const Inputs& in, const AttentionSpec& spec) {
  const AttentionSpec listed = without_linear(spec);
  return mixture<double>(in, spec, [&](const Inputs& inputs) { return exact(inputs, listed); });
}

Outputs<float> emulated_mixture(const Inputs& in, const AttentionSpec& spec) {
  const AttentionSpec listed = without_linear(spec);
  const auto rounded = [&](std::vector<float>& values) {
    for (float& x : values)
      x = round_to(spec.dtype, x);
  };
  auto result = mixture<float>(in, spec, [&](Inputs inputs) {
    rounded(inputs.dout);
    return emulate(inputs, listed, plan_of(spec.precision), /*keep_matrices=*/false,
                   /*round_outputs=*/true);
  });
  for (auto* tensor : {&result.o, &result.dq, &result.dk, &result.dv})
    rounded(*tensor);
  return result;
}

} // namespace sagebwd::reference
