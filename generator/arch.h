//===- arch.h - GPU architectures -------------------------------------------===//
#pragma once

#include <string_view>
#include <vector>

namespace sagebwd {

/// One GPU architecture that kernels are compiled for. The generator decides by these facts. Only
/// the table in ptxas.cpp names single architectures, because each has a scheduler of its own.
struct Arch {
  std::string_view name; ///< NVRTC's name, e.g. "sm_90a"
  int major;             ///< compute capability
  int minor;
  int max_shared_bytes; ///< the most shared memory one block may use
  int first_cuda;       ///< the first CUDA version that supports the architecture, e.g. 12080
  int registers_per_sm = 65536;

  bool has_wgmma() const { return major == 9; }
  bool is_blackwell() const { return major >= 10; }
  bool is_thor() const { return major == 11; }
  bool is_consumer_blackwell() const { return major == 12; }
  bool emulates_int8() const { return major == 10 && minor == 3; } ///< without products of its own
  /// Whether tensor cores bind the backward of mma.sync. GeForce GPUs have a quarter of their INT8
  /// rate for 16-bit products with FP32 sums, and their professional siblings half of it; others
  /// have half of it and relatively slower elementwise instructions.
  bool is_bound_by_tensor_cores() const {
    return is_consumer_blackwell() || (major == 8 && (minor == 6 || minor == 9));
  }

  bool operator==(const Arch& other) const { return name == other.name; }
};

const std::vector<Arch>& all_archs();
/// Raises SpecError for every other name, and says which architecture it may mean.
const Arch& find_arch(std::string_view name);
const Arch& arch_for_capability(int major, int minor); ///< raises SpecError

} // namespace sagebwd
