//===- records.h - Which tile won for what ----------------------------------===//
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

/// What a GPU's timings depend on, as a record's key holds it.
struct Gpu {
  std::string name; ///< e.g. "NVIDIA H200"
  int sm_count = 0;
  Arch arch;          ///< that its kernels are compiled for
  std::string driver; ///< CUDA version, e.g. "13.0"

  // Which one it is, and what fits there; no part of a key.
  std::string uuid;          ///< empty: not known
  uint64_t memory_bytes = 0; ///< 0: not known
};
/// Raises LibraryError, DriverError, or SpecError for a GPU that no kernel runs on.
Gpu gpu_of(int device);

/// Of an attention kernel; the spec must be resolved. Specs that share a kernel share its records.
CacheKey record_key(KernelKind, const ResolvedSpec&, const Gpu&, const Bucket&);

/// The tile of a record, checked against the kernel it is for. Raises SpecError: it was made by
/// hand, or by a version with other tiles.
TileConfig tile_of(const TuningRecord&, KernelKind, const ResolvedSpec&, const Arch&);

/// Records in memory, then in a store's directory and packs. Thread-safe.
class Records {
public:
  explicit Records(CacheStore& store) : store_(store) {}

  /// What is found once is not looked for again.
  std::optional<TuningRecord> find(const CacheKey&);
  /// What other processes keep meanwhile is seen here.
  std::optional<TuningRecord> reload(const CacheKey&);
  /// False where it stays in this process, for there is no directory to keep it in.
  bool keep(const TuningRecord&);

  /// What could not be tuned, for as long as this lives.
  void give_up(const CacheKey&);
  bool is_given_up(const CacheKey&);

  struct Merged {
    size_t added = 0, kept = 0, replaced = 0;
  };
  /// Records of others: those there already stay, unless `overwrite`. Raises SpecError for a record
  /// whose tile no kernel of this version has, TuneError where one cannot be kept; nothing is lost.
  Merged merge(const std::vector<TuningRecord>&, bool overwrite);

  /// All there are, directory first, each once, by digest. `problems` takes what could not be read;
  /// without it, that raises TuneError.
  std::vector<TuningRecord> all(std::vector<std::string>* problems = nullptr);

  /// The text of a file of these, for merge() elsewhere. Raises TuneError where there are none.
  std::string exported(const std::vector<TuningRecord>&) const;
  /// The directory, or "no directory (WHY)".
  std::string place() const;

  /// Rises whenever a record is kept: who remembers an answer asks again.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  CacheStore& store() { return store_; }

private:
  CacheStore& store_;
  ForkSafeMutex mutex_;
  std::unordered_map<std::string, TuningRecord> known_; ///< by digest
  std::set<std::string> given_up_;                      ///< likewise
  std::atomic<uint64_t> generation_{0};
};

/// The process's records, over user_store().
Records& user_records();

} // namespace sagebwd
