//===- tile_choice.h - The tiles of one operation on one device -------------===//
#pragma once

#include "generator/operation.h"
#include "runtime/tuner/tuner.h"

#include <optional>
#include <vector>

namespace sagebwd {

/// Which tile a kernel runs with: by the mode the default's, a record's, or the one that tuning now
/// finds. Under TuneMode::tune, ranks but 0 wait for a record of rank 0; where none comes, or
/// tuning fails, the default is taken with one warning. Raises TuneError: frozen, and no record.
TileConfig chosen_tile(TuneMode, KernelKind, const TuneRequest&, const TuneSurroundings&);

/// By the mode and the records, or always the operation's own. bucket() and generation() are
/// thread-safe, the others are not.
class TileChoice {
public:
  /// `own_tiles`: the operation's tiles were given, and no others are looked for. Raises SpecError
  /// for an unknown SAGEBWD_TUNE.
  TileChoice(const Operation&, int device, int sm_count, bool own_tiles);

  static constexpr size_t kBuckets = 256;
  /// Problems of one bucket have the same tiles. Allocates nothing, and reads no file.
  size_t bucket(Pass, const Problem&) const;
  /// Rises when records change.
  uint64_t generation() const { return records_ ? records_->generation() : 0; }

  /// The kernels of a pass with the tiles for a problem; where it may not tune, by the records
  /// there are. Raises TuneError: frozen, and none.
  std::vector<KernelSpec> kernels(Pass, const Problem&, bool may_tune = true);
  /// Whether the default may stand in for a tuned tile.
  bool may_fall_back() const { return mode_ != TuneMode::frozen; }

  TileConfig tile(KernelKind, const Problem&, bool may_tune = true);

private:
  /// Records are of the split backward's kernels.
  bool fixed(Pass pass) const {
    return own_tiles_ || mode_ == TuneMode::off || (pass == Pass::backward && operation_.fused());
  }

  Operation operation_;
  int device_, sm_count_;
  bool own_tiles_;
  TuneMode mode_;
  Records* records_ = nullptr; ///< where they may matter
  std::optional<TuneSurroundings> surroundings_;
};

} // namespace sagebwd
