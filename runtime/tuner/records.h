//===- records.h - The tuning records: which tile won for which key -------===//
#pragma once

#include "cache/store.h"
#include "runtime/tuner/bucket.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace sagebwd {

/// The facts about a GPU on which timings depend; a record's key contains them.
struct Gpu {
  std::string name; ///< e.g. "NVIDIA H200"
  int sm_count = 0;
  Arch arch;          ///< the architecture for which kernels are compiled
  std::string driver; ///< the driver's CUDA version, e.g. "13.0"

  // The members below are not a part of a key: which GPU it is, and its memory.
  std::string uuid;          ///< empty: unknown
  uint64_t memory_bytes = 0; ///< 0: unknown
};
/// Raises LibraryError, DriverError, or SpecError if no kernel runs on the GPU.
Gpu gpu_of(int device);

/// The key of an attention kernel's record; the spec must be resolved. Specs that share a kernel
/// share its records.
CacheKey record_key(KernelKind, const ResolvedSpec&, const Gpu&, const Bucket&);

/// The tile of a record, checked against the kernel of the record. Raises SpecError if the kernel
/// has no such tile: the record was written by hand, or by a version with other tiles.
TileConfig tile_of(const TuningRecord&, KernelKind, const ResolvedSpec&, const Arch&);

/// Tuning records: those in memory first, then those in a store's directory and packs. Thread-safe.
class Records {
public:
  explicit Records(CacheStore& store) : store_(store) {}

  /// Finds a record. Records that were found before come from memory.
  std::optional<TuningRecord> find(const CacheKey&);
  /// Finds a record on disk again, so that records which other processes have kept meanwhile are
  /// found.
  std::optional<TuningRecord> reload(const CacheKey&);
  /// Keeps a record. Returns false if there is no directory: the record then exists only in this
  /// process.
  bool keep(const TuningRecord&);

  /// Remembers, while this object lives, that a key could not be tuned.
  void give_up(const CacheKey&);
  bool is_given_up(const CacheKey&);

  struct Merged {
    size_t added = 0, kept = 0, replaced = 0;
  };
  /// Adds records of other machines. Records that exist stay, unless `overwrite`. Raises SpecError
  /// for a record whose tile no kernel of this version has, and TuneError if a record cannot be
  /// kept; no existing record is lost.
  Merged merge(const std::vector<TuningRecord>&, bool overwrite);

  /// All records, each once: those of the directory first, by digest. If a file cannot be read,
  /// `problems` gets the reason; if `problems` is null, TuneError is raised.
  std::vector<TuningRecord> all(std::vector<std::string>* problems = nullptr);

  /// The text of a file with these records, for merge() elsewhere. Raises TuneError if there are
  /// none.
  std::string exported(const std::vector<TuningRecord>&) const;
  /// The path of the directory, or "no directory (WHY)".
  std::string place() const;

  /// A number that rises whenever a record is kept. A caller that remembers results must ask again
  /// if it has changed.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  CacheStore& store() { return store_; }

private:
  CacheStore& store_;
  ForkSafeMutex mutex_;
  std::unordered_map<std::string, TuningRecord> known_; ///< the key is the digest
  std::set<std::string> given_up_;                      ///< digests
  std::atomic<uint64_t> generation_{0};
};

/// The records of the process, in user_store().
Records& user_records();

} // namespace sagebwd
