//===- tile_choice.cpp - The tiles of one operation on one device ------------===//

#include "runtime/tuner/tile_choice.h"

#include <cstdio>

namespace sagebwd {
namespace {

TileConfig tile_in(const Tiles& tiles, KernelKind kind) {
  switch (kind) {
  case KernelKind::forward:
    return tiles.forward;
  case KernelKind::backward_dq:
    return tiles.backward_dq;
  case KernelKind::backward_dkv:
    return tiles.backward_dkv;
  default:
    return {};
  }
}

} // namespace

TileChoice::TileChoice(const AttentionSpec& spec, const Arch& arch, int device, int sm_count,
                       const std::optional<Tiles>& given)
    : spec_(spec), arch_(arch), device_(device), sm_count_(sm_count), given_(given),
      mode_(settings().tune) {
  if (!fixed())
    records_ = &user_records();
}

size_t TileChoice::bucket(Pass pass, const Problem& problem) const {
  if (fixed())
    return 0;
  const bool forward = pass == Pass::forward;
  const Bucket of_queries =
      bucket_of(forward ? KernelKind::forward : KernelKind::backward_dq, problem, sm_count_);
  const bool keys_full = !forward && bucket_of(KernelKind::backward_dkv, problem, sm_count_).full;
  static_assert(kBuckets == 256); // 8 classes of lengths (512 to 65536) twice, 2 flags
  return ((size_t{of_queries.seq_q} * 8 + of_queries.seq_kv) * 2 + of_queries.full) * 2 + keys_full;
}

const TuneSurroundings& TileChoice::surroundings(TuneMode mode) {
  auto& known = mode == TuneMode::tune ? surroundings_to_tune_ : surroundings_;
  if (!known)
    known.emplace(surroundings_of(device_, mode));
  return *known;
}

TileConfig TileChoice::tile(KernelKind kind, const Problem& problem, TuneMode mode) {
  if (given_)
    return tile_in(*given_, kind);
  const TuneSurroundings& around = surroundings(mode);
  TuneRequest request;
  request.spec = spec_;
  request.problem = problem;
  request.device = device_;
  bool said = false;
  request.progress = [&](const TuneProgress& progress) {
    if (progress.stage == "compiling" && progress.done == progress.total && !said) {
      said = true;
      std::fprintf(stderr, "sagebwd: tuning %s of %s (SAGEBWD_TUNE=tune), %d candidates\n",
                   std::string(to_string(kind)).c_str(), to_string(spec_).c_str(), progress.total);
    }
  };
  return chosen_tile(mode, kind, request, around);
}

TileConfig TileChoice::tile(KernelKind kind, const Problem& problem) {
  return kind < KernelKind::forward ? TileConfig{} : tile(kind, problem, mode_);
}

std::vector<KernelSpec> TileChoice::kernels(Pass pass, const Problem& problem, TuneMode mode) {
  if (fixed())
    return by_default(pass);
  Tiles tiles;
  if (pass == Pass::forward) {
    tiles.forward = tile(KernelKind::forward, problem, mode);
  } else {
    tiles.backward_dq = tile(KernelKind::backward_dq, problem, mode);
    tiles.backward_dkv = tile(KernelKind::backward_dkv, problem, mode);
  }
  return kernels_of(pass, spec_, arch_, tiles);
}

std::vector<KernelSpec> TileChoice::kernels(Pass pass, const Problem& problem) {
  return kernels(pass, problem, mode_);
}

std::vector<KernelSpec> TileChoice::without_tuning(Pass pass, const Problem& problem) {
  return kernels(pass, problem, mode_ == TuneMode::tune ? TuneMode::use : mode_);
}

std::vector<KernelSpec> TileChoice::by_default(Pass pass) const {
  return given_ ? kernels_of(pass, spec_, arch_, *given_) : kernels_of(pass, spec_, arch_);
}

} // namespace sagebwd
