//===- tile_choice.cpp - The tiles of one operation on one device ------------===//

#include "runtime/tuner/tile_choice.h"

#include "generator/space.h"

#include <cstdio>

namespace sagebwd {
TileChoice::TileChoice(const ResolvedSpec& spec, const Arch& arch, int device, int sm_count,
                       const std::optional<Tiles>& given)
    : spec_(spec), arch_(arch), device_(device), sm_count_(sm_count), given_(given),
      mode_(tune_mode()) {
  if (!fixed())
    records_ = &user_records();
}

size_t TileChoice::bucket(Pass pass, const Problem& problem) const {
  if (fixed())
    return 0;
  size_t index = 0; // of two kernels at most, whether each fills the GPU; then 8 classes of lengths
  for (KernelKind kind : tiled_kernels(pass))
    index = index * 2 + bucket_of(kind, problem, sm_count_).full;
  const Bucket lengths = bucket_of(tiled_kernels(pass).front(), problem, sm_count_);
  static_assert(kBuckets == 4 * 8 * 8);
  return (index * 8 + lengths.seq_q) * 8 + lengths.seq_kv;
}

const TuneSurroundings& TileChoice::surroundings(TuneMode mode) {
  auto& known = mode == TuneMode::tune ? surroundings_to_tune_ : surroundings_;
  if (!known)
    known.emplace(surroundings_of(device_, mode));
  return *known;
}

TileConfig TileChoice::tile(KernelKind kind, const Problem& problem, TuneMode mode) {
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
                   std::string(to_string(kind)).c_str(), to_string(*spec_).c_str(), progress.total);
    }
  };
  return chosen_tile(mode, kind, request, around);
}

TileConfig TileChoice::tile(KernelKind kind, const Problem& problem) {
  if (!given_)
    return tile(kind, problem, mode_);
  const auto found = given_->find(kind);
  return found == given_->end() ? default_tile(kind, spec_, arch_) : found->second;
}

std::vector<KernelSpec> TileChoice::kernels(Pass pass, const Problem& problem, TuneMode mode) {
  if (fixed())
    return by_default(pass);
  Tiles tiles;
  for (KernelKind kind : tiled_kernels(pass))
    tiles[kind] = tile(kind, problem, mode);
  return kernels_of(pass, spec_, arch_, tiles);
}

std::vector<KernelSpec> TileChoice::kernels(Pass pass, const Problem& problem) {
  return kernels(pass, problem, mode_);
}

std::vector<KernelSpec> TileChoice::without_tuning(Pass pass, const Problem& problem) {
  return kernels(pass, problem, mode_ == TuneMode::tune ? TuneMode::use : mode_);
}

std::vector<KernelSpec> TileChoice::by_default(Pass pass) const {
  return kernels_of(pass, spec_, arch_, given_.value_or(Tiles{}));
}

} // namespace sagebwd
