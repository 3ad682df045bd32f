//===- attention.cpp - Trainable INT8 attention from C++ -------------------===//
//
// Forward and backward on the GPU, without Python, checked against FP64 on the CPU. Without a GPU
// it compiles the kernels and says so. All of it is in this file, to be copied; what the project
// itself runs kernels with is runtime/on_gpu.h.
//
//   target_link_libraries(your_program PRIVATE sagebwd::sagebwd)
//
//===----------------------------------------------------------------------===//
#include "sagebwd/runtime/attention.h"
#include "sagebwd/generator/operation.h"
#include "sagebwd/runtime/driver/driver.h"
#include "sagebwd/runtime/kernels.h"
#include "sagebwd/runtime/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

using namespace sagebwd;

namespace {

/// Device memory for a contiguous (batch, head, token, channel) tensor of 16-bit elements.
struct DeviceTensor {
  DeviceTensor(int64_t batch, int64_t heads, int64_t tokens, int head_dim)
      : count(batch * heads * tokens * head_dim),
        memory(driver::allocate(2 * count)), view{reinterpret_cast<void*>(memory),
                                                  heads * tokens * head_dim, tokens * head_dim,
                                                  head_dim} {}
  ~DeviceTensor() { driver::release(memory); }
  DeviceTensor(const DeviceTensor&) = delete;

  void upload(DType dtype, const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    for (float value : values)
      bits.push_back(reference::encode(dtype, value));
    driver::copy_to_device(memory, bits.data(), 2 * count);
  }
  std::vector<float> download(DType dtype) const {
    std::vector<uint16_t> bits(count);
    driver::copy_to_host(bits.data(), memory, 2 * count);
    std::vector<float> values;
    for (uint16_t element : bits)
      values.push_back(reference::decode(dtype, element));
    return values;
  }

  size_t count;
  driver::Pointer memory;
  Tensor view;
};

/// Without a GPU: what a cluster's build machine does.
int compile_only(const AttentionSpec& spec) {
  printf("No GPU here: %s\nCompiling for sm_80 instead:\n", driver::unavailable().c_str());
  const Arch& arch = find_arch("sm_80");
  for (const auto& kernel : build_all(Operation(resolved(spec), arch).distinct_kernels()))
    printf("  %-72s %3d registers%s\n", kernel->entry.kernel_name.c_str(), kernel->entry.registers,
           kernel->cached ? ", from the cache" : "");
  return 0;
}

void print_error(const char* name, const std::vector<float>& x, const std::vector<double>& exact) {
  reference::ErrorFigures figures = reference::compare(x, exact);
  printf("  %-3s cosine %.5f, relative L2 error %.4f\n", name, figures.cosine, figures.rel_l2);
}

int run() {
  AttentionSpec spec;
  spec.head_dim = 128;
  spec.dtype = DType::bf16;
  spec.causal = Causal::top_left;
  if (!driver::unavailable().empty())
    return compile_only(spec);

  // Eight query heads share two key/value heads.
  Problem problem{/*batch=*/1, /*heads=*/8, /*heads_kv=*/2, /*seq_q=*/1024, /*seq_kv=*/1024};
  reference::Inputs inputs = reference::random_inputs(problem, spec.head_dim, spec.dtype,
                                                      /*sigma=*/1, /*seed=*/0);

  const int device = 0;
  driver::DeviceScope scope(device);
  Attention attention(spec, device);
  attention.warmup(); // compiles or loads every kernel; the calls below only launch

  auto like_q = [&] {
    return DeviceTensor(problem.batch, problem.heads, problem.seq_q, spec.head_dim);
  };
  auto like_k = [&] {
    return DeviceTensor(problem.batch, problem.heads_kv, problem.seq_kv, spec.head_dim);
  };
  DeviceTensor q = like_q(), k = like_k(), v = like_k(), out = like_q();
  DeviceTensor dout = like_q(), dq = like_q(), dk = like_k(), dv = like_k();
  q.upload(spec.dtype, inputs.q);
  k.upload(spec.dtype, inputs.k);
  v.upload(spec.dtype, inputs.v);
  dout.upload(spec.dtype, inputs.dout);
  driver::Pointer lse = driver::allocate(sizeof(float) * problem.heads * problem.seq_q);

  // The library allocates nothing: it says how much it needs. Both passes may share it.
  const size_t workspace_bytes = std::max(attention.forward_workspace_bytes(problem),
                                          attention.backward_workspace_bytes(problem));
  driver::Pointer workspace = driver::allocate(workspace_bytes);
  driver::Stream stream = driver::create_stream();

  ForwardArgs forward;
  forward.problem = problem;
  forward.q = q.view;
  forward.k = k.view;
  forward.v = v.view;
  forward.out = out.view;
  forward.lse = reinterpret_cast<float*>(lse);
  forward.softmax_scale = 1 / std::sqrt(static_cast<float>(spec.head_dim));
  forward.workspace = reinterpret_cast<void*>(workspace);
  forward.workspace_bytes = workspace_bytes;
  forward.stream = stream;

  BackwardArgs backward;
  backward.problem = problem;
  backward.q = q.view;
  backward.k = k.view;
  backward.v = v.view;
  backward.out = out.view;
  backward.dout = dout.view;
  backward.lse = forward.lse;
  backward.dq = dq.view;
  backward.dk = dk.view;
  backward.dv = dv.view;
  backward.softmax_scale = forward.softmax_scale;
  backward.workspace = forward.workspace;
  backward.workspace_bytes = workspace_bytes;
  backward.stream = stream;

  driver::Event start = driver::create_event(), stop = driver::create_event();
  for (int repeat = 0; repeat < 3; ++repeat) { // the last is timed
    driver::record(start, stream);
    attention.forward(forward);
    attention.backward(backward);
    driver::record(stop, stream);
  }
  const float ms = driver::elapsed_ms(start, stop);

  printf("%s on %s, %s\nforward and backward in %.3f ms; against FP64:\n",
         to_string(attention.spec()).c_str(), driver::device_info(device).name.c_str(),
         std::string(attention.arch().name).c_str(), ms);
  reference::Outputs<double> exact = reference::exact(inputs, spec);
  print_error("O", out.download(spec.dtype), exact.o);
  print_error("dQ", dq.download(spec.dtype), exact.dq);
  print_error("dK", dk.download(spec.dtype), exact.dk);
  print_error("dV", dv.download(spec.dtype), exact.dv);

  driver::destroy_event(start);
  driver::destroy_event(stop);
  driver::destroy_stream(stream);
  driver::release(workspace);
  driver::release(lse);
  return 0;
}

} // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    fprintf(stderr, "attention_example: %s\n", error.what());
    return 1;
  }
}
