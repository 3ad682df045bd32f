//===- attention_state.h - What the calls of an operation share -----------===//
#pragma once

#include "generator/operation.h"
#include "runtime/attention.h"
#include "runtime/loaded_kernels.h"
#include "runtime/tuner/tile_choice.h"

#include <array>
#include <atomic>
#include <mutex>

namespace sagebwd {

/// An operation on a device: its tiles, and the kernels that ran before.
struct Attention::State {
  Operation operation;
  int device = 0;
  TileChoice tiles;
  std::mutex mutex;
  /// The kernels that ran before, by bucket. Never freed: another thread may be running them.
  struct Launches {
    uint64_t generation; ///< of the tuning records by which the kernels were chosen
    std::vector<LoadedKernel> kernels;
  };
  std::vector<std::unique_ptr<const Launches>> all_launches;
  std::array<std::atomic<const Launches*>, TileChoice::kBuckets> launches[2] = {};

  State(const Operation& of, int ordinal, const driver::DeviceInfo& info, bool own_tiles)
      : operation(of), device(ordinal), tiles(operation, ordinal, info.sm_count, own_tiles) {}

  const std::vector<LoadedKernel>& kernels(Pass, const Problem&, driver::Stream);
  /// Returns nothing if kernels are not loaded yet and `may_load` is false.
  std::optional<std::vector<LoadedKernel>> load(const std::vector<KernelSpec>&, bool may_load);
  std::vector<LoadedKernel> load_chosen(Pass, const Problem&);
  std::vector<LoadedKernel> load_while_capturing(Pass, const Problem&);
};

} // namespace sagebwd
