//===- quantize_test.cpp - The pre-passes' copies, each on its own ---------===//
#include "generator/definition.h"
#include "generator/operation.h"
#include "tests/gpu/cases.h"
#include "tests/gpu/copies.h"
#include "tests/gpu/launched.h"

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

const Problem kProblems[] = {{2, 4, 2, 330, 600}, {1, 1, 1, 1, 1}, {1, 3, 1, 65, 4200}};
/// The caller's tensors have this layout, and the strides differ between them.
constexpr Layout kLayout = {.bshd = true, .padding = 24};

struct Copies {
  int head_dim;
  Granularity granularity;
  Precision precision;
};

std::vector<Copies> all_copies() {
  std::vector<Copies> all;
  for (int head_dim : kWidths)
    for (Granularity granularity : {Granularity::row, Granularity::block})
      for (const auto& [precision, name] : Words<Precision>::all)
        all.push_back({head_dim, granularity, precision});
  std::erase_if(all, [](const Copies& copies) { // see check_very_wide()
    const bool formats =
        copies.precision == Precision::six_of_seven || copies.precision == Precision::gradients16;
    return copies.head_dim > 256 && (!formats || copies.granularity != Granularity::row);
  });
  for (int head_dim : {40, 96, 184, 264})
    all.push_back({head_dim, Granularity::row, Precision::six_of_seven});
  all.push_back({112, Granularity::block, Precision::six_of_seven});
  all.push_back({72, Granularity::row, Precision::gradients16});
  return all;
}

std::string copies_name(const testing::TestParamInfo<Copies>& info) {
  std::string name = "D" + std::to_string(info.param.head_dim) + "_" +
                     std::string(to_string(info.param.granularity)) + "_" +
                     std::string(to_string(info.param.precision));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<AttentionSpec> specs_of(const Copies& copies) {
  AttentionSpec s;
  s.head_dim = copies.head_dim, s.granularity = copies.granularity, s.precision = copies.precision;
  std::vector<AttentionSpec> all = {s};
  s.dtype = DType::fp16;
  s.smooth_k = s.rotate = false;
  all.push_back(s);
  if (copies.granularity == Granularity::row) {
    s.smooth_k = true, s.sink_keys = 0;
    all.push_back(s);
  }
  if (s.head_dim > 256)
    return all;
  if (which_int8(s.precision).s) {
    s.smooth_q = true, s.sink_keys = -1; // mean_scores of a separate key are zeros
    all.push_back(s);
  }
  if (width(s) == 64 && copies.precision == Precision::six_of_seven) {
    all.push_back(all[0]);
    all.back().smooth_v = true;
  }
  // Above 128 channels mma.sync has no backward of 16-bit queries under `block`.
  const bool widest =
      width(s) > kWidestFused && grouping_of(s.granularity).one_scale && !which_int8(s.precision).s;
  for (size_t i = 0; i < (widest ? 0 : 2); ++i) {
    all.push_back(all[i]);
    all.back().dp_sums = DpSums::fp16;
  }
  return all;
}

/// The kernels without tiles, which run before the others.
void run_pre_pass(PrePassRun& run, const Arch& arch) {
  const Problem& p = run.in.problem;
  const Buffer workspace(workspace_bytes(run.pass, run.spec, p));
  OperandValues values{};
  place_workspace(run.pass, run.spec, p, workspace.pointer(), values);
  set(values, Operand::softmax_scale, *run.in.softmax_scale);
  std::vector<std::unique_ptr<DeviceTensor>> tensors;
  const auto put = [&](Operand operand, const std::vector<float>& x) {
    const Tokens of = caller_tensor(operand).tokens;
    tensors.push_back(std::make_unique<DeviceTensor>(run.spec->dtype, p.batch, heads_of(of, p),
                                                     tokens_of(of, p), run.spec->head_dim, kLayout,
                                                     kPoison));
    tensors.back()->upload(x);
    const Tensor& view = tensors.back()->view();
    set_tensor(values, operand, reinterpret_cast<uint64_t>(view.data),
               {view.stride_b, view.stride_h, view.stride_s});
  };
  put(Operand::q, run.in.q);
  put(Operand::k, run.in.k);
  put(Operand::v, run.in.v);
  Buffer lse(run.lse.size() * sizeof(float)), dlse(run.in.dlse.size() * sizeof(float));
  if (run.pass == Pass::backward) {
    put(Operand::dout, run.in.dout);
    put(Operand::out, run.out);
    lse.upload(run.lse);
    dlse.upload(run.in.dlse);
    set(values, Operand::lse, lse.pointer());
    set(values, Operand::dlse, dlse.pointer());
  }
  const Tiles tiles = sums_dp_in_fp16(run.spec) ? mma_tiles(run.spec) : Tiles();
  std::vector<KernelSpec> kernels = Operation(run.spec, arch, tiles).kernels(run.pass);
  std::erase_if(kernels, [](const KernelSpec& k) { return definition_of(k).tiling != nullptr; });
  launch_alone(kernels, p, values, workspace);
  run.workspace = workspace.download<std::byte>();
}

class Quantize : public OnGpu {};
class QuantizeAll : public OnGpu, public testing::WithParamInterface<Copies> {};

TEST_P(QuantizeAll, WritesEveryCopy) {
  const driver::DeviceInfo info = driver::device_info(0);
  const Arch& arch = arch_for_capability(info.major, info.minor);
  for (const AttentionSpec& spec : specs_of(GetParam()))
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const Problem& p : kProblems) {
        PrePassRun run = pre_pass_run(pass, spec, p);
        SCOPED_TRACE(to_string(*run.spec) + ", " + std::string(to_string(pass)) +
                     ", M = " + std::to_string(p.seq_q));
        run_pre_pass(run, arch);
        CopiesCheck(run).expect_all();
        if (HasFailure())
          return; // the other cases would say the same
      }
}

INSTANTIATE_TEST_SUITE_P(Gpu, QuantizeAll, testing::ValuesIn(all_copies()), copies_name);

/// Channels and units of zeros, as all inputs here have them, take their scale from their head.
TEST_F(Quantize, TensorsFarFromOne) {
  const driver::DeviceInfo info = driver::device_info(0);
  const Arch& arch = arch_for_capability(info.major, info.minor);
  for (int octaves : {-90, -58, 80})
    for (Pass pass : {Pass::forward, Pass::backward})
      for (const Problem& p : {kProblems[0], kProblems[2]}) {
        PrePassRun run = pre_pass_run(pass, {.head_dim = 64}, p);
        for (float& x : run.in.q) // scores stay
          x = std::ldexp(x, -octaves);
        for (std::vector<float>* tensor : {&run.in.k, &run.in.v})
          for (float& x : *tensor)
            x = std::ldexp(x, octaves);
        SCOPED_TRACE(std::string(to_string(pass)) + ", 2^" + std::to_string(octaves) +
                     ", M = " + std::to_string(p.seq_q));
        run_pre_pass(run, arch);
        CopiesCheck(run).expect_all();
        if (HasFailure())
          return;
      }
}

/// The launch is the same computation wherever blocks happen to run.
TEST_F(Quantize, GivesTheSameBitsAgain) {
  const driver::DeviceInfo info = driver::device_info(0);
  const Arch& arch = arch_for_capability(info.major, info.minor);
  for (Pass pass : {Pass::forward, Pass::backward}) {
    PrePassRun run = pre_pass_run(pass, {}, kProblems[0]);
    run_pre_pass(run, arch);
    const std::vector<std::byte> first = run.workspace;
    run_pre_pass(run, arch);
    EXPECT_TRUE(run.workspace == first) << to_string(pass);
  }
}

} // namespace
