//===- tile_choice.h - Choose the tiles of an operation on a device -------===//
#pragma once

#include "generator/operation.h"
#include "runtime/tuner/tuner.h"

#include <optional>
#include <vector>

namespace sagebwd {

/// The tile of a kernel: by the mode, the default tile, the tile of a record, or the tile that
/// tuning now finds. Under TuneMode::tune, ranks other than 0 wait for a record of rank 0. If no
/// record comes or tuning fails, the default tile is used, with one warning. Raises TuneError under
/// TuneMode::frozen if there is no record.
TileConfig chosen_tile(TuneMode, KernelKind, const TuneRequest&, const TuneSurroundings&);

/// The tiles of one operation on one device: always the operation's own, or chosen by mode and
/// records. Only bucket() and generation() are thread-safe.
class TileChoice {
public:
  /// If `own_tiles`, the caller has given the operation's tiles, and records are ignored. Raises
  /// SpecError for an unknown word in SAGEBWD_TUNE.
  TileChoice(const Operation&, int device, int sm_count, bool own_tiles);

  static constexpr size_t kBuckets = 256;
  /// The bucket of a problem; problems of one bucket have the same tiles. Allocates no memory and
  /// reads no file.
  size_t bucket(Pass, const Problem&) const;
  /// A number that rises when records change.
  uint64_t generation() const { return records_ ? records_->generation() : 0; }

  /// The kernels of a pass with the tiles for a problem. If `may_tune` is false, only existing
  /// records are used. Raises TuneError under TuneMode::frozen if there is no record.
  std::vector<KernelSpec> kernels(Pass, const Problem&, bool may_tune = true);
  /// Whether the default tile may replace a tuned tile.
  bool may_fall_back() const { return mode_ != TuneMode::frozen; }

  TileConfig tile(KernelKind, const Problem&, bool may_tune = true);

private:
  /// Whether records play no role. A fused backward has no records: records are of the kernels of a
  /// split backward and of the forward.
  bool fixed(Pass pass) const {
    return own_tiles_ || mode_ == TuneMode::off || (pass == Pass::backward && operation_.fused());
  }

  Operation operation_;
  int device_, sm_count_;
  bool own_tiles_;
  TuneMode mode_;
  Records* records_ = nullptr; ///< null if records play no role
  std::optional<TuneSurroundings> surroundings_;
};

} // namespace sagebwd
