//===- spilling_kernel.h - A kernel whose registers do not suffice ---------===//
#pragma once

namespace sagebwd::test {

/// 128 values live across a barrier, in 32 registers: more than is tolerated has to be spilled.
inline constexpr const char* kSpilling = R"(
extern "C" __global__ __launch_bounds__(1024, 2) void spilling(float* p) {
  float r[128];
#pragma unroll
  for (int i = 0; i < 128; i++) r[i] = p[i * 97];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; i++) p[i * 31] = r[i] * r[127 - i];
}
)";

} // namespace sagebwd::test
