//===- verify_front.cpp - Norm and RoPE of a case of 'verify' ---------------===//
#include "tools/verify_front.h"

#include "runtime/front_end.h"
#include "runtime/reference/front.h"
#include "tools/distance.h"

#include <cmath>
#include <random>

namespace sagebwd::tools {
namespace {

using reference::FrontInputs;
using Draw = std::mt19937; // whose numbers are the same on every machine

int64_t drawn_from(Draw& draw, int64_t low, int64_t high) {
  return low + draw() % (high - low + 1);
}
std::vector<float> drawn_numbers(Draw& draw, int64_t count, float low, float high) {
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers)
    number = low + (high - low) * static_cast<float>(draw() >> 8) * 0x1p-24f;
  return numbers;
}

/// This is what both sides have in common.
struct Common {
  int begin = 0, channels = 0; ///< that RoPE rotates
  bool interleaved = false;
  float eps = 0;
};

Common drawn_common(Draw& draw, int head_dim) {
  constexpr float kEps[] = {1e-6f, 1e-5f, 1e-2f};
  Common common{.interleaved = drawn_from(draw, 0, 1) == 1, .eps = kEps[drawn_from(draw, 0, 2)]};
  if (drawn_from(draw, 0, 4) == 0) // no RoPE
    return common;
  const int step = common.interleaved ? 4 : 8;
  const bool whole = drawn_from(draw, 0, 1) == 1 && head_dim % step == 0;
  common.channels =
      whole ? head_dim : step * static_cast<int>(drawn_from(draw, 1, head_dim / step));
  common.begin = 4 * static_cast<int>(drawn_from(draw, 0, (head_dim - common.channels) / 4));
  return common;
}

FrontInputs drawn_side(Draw& draw, const VerifyCase& drawn, const Common& common, int64_t heads,
                       int64_t tokens, std::vector<float> x, std::vector<float> dy) {
  const int64_t batch = drawn.problem.batch, head_dim = drawn.spec.head_dim;
  FrontInputs in{batch, heads, tokens, static_cast<int>(head_dim), std::move(x), std::move(dy)};
  const int64_t norm = drawn_from(draw, 0, 4); // none, own, own with gain, given, given per head
  in.normed = norm > 0, in.eps = common.eps;
  if (norm >= 2 && drawn_from(draw, 0, 3) > 0)
    in.gain = drawn_numbers(draw, (drawn_from(draw, 0, 1) ? heads : 1) * head_dim, -0.5f, 2);
  if (norm >= 3)
    in.inv_rms = drawn_numbers(draw, batch * (norm == 4 ? heads : 1) * tokens, 0.2f, 2);
  if (common.channels > 0) {
    // Angles come times a factor, as YaRN has one.
    const std::vector<float> angles =
        drawn_numbers(draw, batch * tokens * common.channels / 2, -3.14f, 3.14f);
    for (float angle : angles) {
      in.cos.push_back(1.1f * std::cos(angle));
      in.sin.push_back(1.1f * std::sin(angle));
    }
  }
  in.rope_begin = common.begin, in.interleaved = common.interleaved;
  return in;
}

/// One side on the device.
struct SideOnGpu {
  const FrontInputs& in;
  DeviceTensor x, y, dx;
  Buffer gain, inv_rms, cos, sin, dgain, gain_parts, dinv_rms;

  SideOnGpu(const FrontInputs& given, DType dtype, Layout layout, int64_t part_floats)
      : in(given), x(tensor(dtype, layout)), y(tensor(dtype, layout)), dx(tensor(dtype, layout)),
        gain(floats(in.gain.size())), inv_rms(floats(in.inv_rms.size())),
        cos(floats(in.cos.size())), sin(floats(in.sin.size())), dgain(floats(in.gain.size())),
        gain_parts(floats(static_cast<size_t>(part_floats))),
        dinv_rms(floats(static_cast<size_t>(in.batch * in.heads * in.tokens))) {
    x.upload(in.x);
    gain.upload(in.gain), inv_rms.upload(in.inv_rms);
    cos.upload(in.cos), sin.upload(in.sin);
  }
  static Buffer floats(size_t count) { return Buffer(count * sizeof(float)); }
  DeviceTensor tensor(DType dtype, Layout layout) const {
    return DeviceTensor(dtype, in.batch, in.heads, in.tokens, in.head_dim, layout, kPoison);
  }

  FrontSide side() const {
    FrontSide made;
    made.x = x.view(), made.y = y.view(), made.normed = in.normed;
    const auto rows = static_cast<size_t>(in.batch * in.tokens);
    if (!in.gain.empty())
      made.gain = gain.as<float>(), made.gain_per_head = in.gain.size() > size_t(in.head_dim);
    if (!in.inv_rms.empty())
      made.inv_rms = inv_rms.as<float>(), made.inv_rms_per_head = in.inv_rms.size() > rows;
    const auto pairs = static_cast<int64_t>(in.cos.size() / rows);
    if (pairs > 0)
      made.rope = {cos.as<float>(), sin.as<float>(), in.tokens * pairs, pairs};
    return made;
  }
  FrontSideGradients gradients() const {
    FrontSideGradients made;
    made.dx = dx.view();
    if (!in.gain.empty())
      made.dgain = dgain.as<float>(), made.gain_parts = gain_parts.as<float>();
    if (!in.inv_rms.empty())
      made.dinv_rms = dinv_rms.as<float>();
    return made;
  }
  void check_guards(Faults& faults) const {
    dgain.check_guards("front dgain", faults), gain_parts.check_guards("front parts", faults);
    dinv_rms.check_guards("front d1/rms", faults);
  }
};

/// FP32's part of an error, relative to the tensor's norm.
constexpr double kOfFp32 = 2e-5, kOfSums = 1e-4;
/// This is allowed of a number whose terms cancel, relative to these.
constexpr double kOfTerms = 1e-6;

/// `least`: an error that every number may have.
Verdict judge_front(std::string tensor, const std::vector<float>& run,
                    const std::vector<double>& exact, double bound, double least) {
  Verdict verdict{.tensor = std::move(tensor)};
  const Distance found = distance(run, exact);
  const double scale = std::max(norm(exact), 1e-30);
  verdict.finite = std::isfinite(found.error);
  verdict.rel_l2 = verdict.to_emulation = verdict.finite ? found.error / scale : INFINITY;
  verdict.bound = bound + least * std::sqrt(static_cast<double>(exact.size())) / scale;
  return verdict;
}

/// A tensor that is rounded once errs by half of the last bit at most. The mean over many numbers
/// is under a half of that; the fewer there are, the more chance adds to it, but it ends at the
/// whole. FP16 has an absolute error near zero as well.
Verdict judge_rounded(std::string tensor, DType dtype, const std::vector<float>& run,
                      const std::vector<double>& exact) {
  const bool is_fp16 = dtype == DType::fp16;
  const double last = is_fp16 ? 0x1p-11 : 0x1p-8;
  const double chance = 4 / std::sqrt(std::max<double>(1, static_cast<double>(exact.size())));
  return judge_front(std::move(tensor), run, exact, last / 2 * std::min(2.0, 1 + chance) + kOfFp32,
                     is_fp16 ? 0x1p-25 : 0);
}

} // namespace

std::vector<Verdict> check_front_on_gpu(int device, const VerifyCase& drawn, Faults& faults) {
  const AttentionSpec spec{.head_dim = drawn.spec.head_dim, .dtype = drawn.spec.dtype};
  const Attention operation(spec, device);
  const driver::DeviceScope scope(device);
  const Problem& p = drawn.problem;
  const reference::Inputs inputs = reference::named_inputs({drawn.inputs, drawn.sigma}, p,
                                                           spec.head_dim, spec.dtype, drawn.seed);
  Draw draw(static_cast<uint32_t>(drawn.seed ^ (drawn.seed >> 32) ^ 0xf207));
  const Common common = drawn_common(draw, spec.head_dim);
  const FrontInputs of_q = drawn_side(draw, drawn, common, p.heads, p.seq_q, inputs.q, inputs.dout);
  const FrontInputs of_k =
      drawn_side(draw, drawn, common, p.heads_kv, p.seq_kv, inputs.k, inputs.v);
  const auto parts = [&](Tokens tokens) { return front_part_floats(tokens, operation.spec(), p); };
  SideOnGpu q(of_q, spec.dtype, drawn.layout, parts(Tokens::queries));
  SideOnGpu k(of_k, spec.dtype, drawn.layout, parts(Tokens::keys));
  const FrontCall call{.problem = p,
                       .q = q.side(),
                       .k = k.side(),
                       .norm_eps = common.eps,
                       .rope_begin = common.begin,
                       .rope_channels = common.channels,
                       .rope_interleaved = common.interleaved};
  driver::synchronize();
  front(call, operation);
  driver::synchronize();
  const auto exact_q = reference::exact_front(of_q), exact_k = reference::exact_front(of_k);
  std::vector<Verdict> verdicts = {
      judge_rounded("front Q", spec.dtype, q.y.download("front Q", faults), exact_q.y),
      judge_rounded("front K", spec.dtype, k.y.download("front K", faults), exact_k.y)};
  q.y.upload(of_q.dy), k.y.upload(of_k.dy);
  driver::synchronize();
  front_gradients({.of = call, .q = q.gradients(), .k = k.gradients()}, operation);
  driver::synchronize();
  verdicts.push_back(
      judge_rounded("front dQ", spec.dtype, q.dx.download("front dQ", faults), exact_q.dx));
  verdicts.push_back(
      judge_rounded("front dK", spec.dtype, k.dx.download("front dK", faults), exact_k.dx));
  for (const auto& [side, exact] : {std::pair{&q, &exact_q}, {&k, &exact_k}}) {
    const FrontInputs& in = side->in;
    const double x = longest_token(in.x, in.head_dim), dy = longest_token(in.dy, in.head_dim);
    const double rows = static_cast<double>(in.batch * in.heads * in.tokens);
    // Gains, 1/rms and angles are 2 at most, and a normed vector is as long as the root of D.
    const double normed = std::max(2 * x, std::sqrt(double(in.head_dim)));
    if (!exact->dgain.empty())
      verdicts.push_back(judge_front("front dgain", side->dgain.download<float>(), exact->dgain,
                                     kOfSums, kOfTerms * std::sqrt(rows) * 2 * dy * normed));
    if (!exact->dinv_rms.empty())
      verdicts.push_back(judge_front("front d1/rms", side->dinv_rms.download<float>(),
                                     exact->dinv_rms, kOfSums, kOfTerms * 4 * dy * x));
    side->check_guards(faults);
  }
  return verdicts;
}

} // namespace sagebwd::tools
