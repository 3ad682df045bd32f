//===- store.h - The layers of the cache on disk --------------------------===//
//
// The layers are the user's directory, then read-only packs, which are named singly or by a shared
// folder. A bad kernel is removed, counted and treated as a miss. If the directory cannot be used,
// this causes one warning and never an error.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "cache/entry.h"
#include "cache/lock.h"
#include "cache/pack.h"
#include "cache/record.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace sagebwd {

struct CacheCounters {
  std::atomic<uint64_t> memory_hits{0}; ///< kernels that this process had in memory
  std::atomic<uint64_t> hits{0};        ///< kernels found in the directory
  std::atomic<uint64_t> pack_hits{0};
  std::atomic<uint64_t> misses{0}; ///< kernels in neither the directory nor a pack
  std::atomic<uint64_t> waits{0};  ///< waits for another process that was compiling the kernel
  /// Waits that ended by the time limit; the kernel was then compiled here, too.
  std::atomic<uint64_t> timeouts{0};
  std::atomic<uint64_t> heals{0}; ///< bad files that were removed
  std::atomic<uint64_t> evictions{0};
  std::atomic<uint64_t> publish_failures{0};
  std::atomic<uint64_t> compiles{0};
  std::atomic<uint64_t> compile_us{0}; ///< microseconds, summed over threads
};
/// The name and value of each counter, always in the same order.
std::vector<std::pair<const char*, uint64_t>> listed(const CacheCounters&);

/// The counters as text, e.g. "memory_hits=12 hits=13 ...".
std::string to_string(const CacheCounters&);

struct StoreOptions {
  std::string directory;                     ///< empty: no directory
  std::vector<std::string> packs = {};       ///< files, and folders of packs
  std::vector<uint32_t> trusted_owners = {}; ///< of packs, in addition to this user and root
  uint64_t byte_limit = uint64_t{1} << 30;   ///< for the directory's kernels; 0: no limit
  std::chrono::milliseconds lock_limit{60000};
  /// Called many times a second during a wait for another process. An error that it raises ends the
  /// wait.
  std::function<void()> check_interrupt = nullptr;
  /// Whether bad kernels are removed; false if this process cannot build them again. Tuning records
  /// are never removed.
  bool heal = true;
  /// The end of the warning that the directory cannot be written.
  std::string if_not_kept = "Every process compiles them again; to keep them, set "
                            "SAGEBWD_CACHE_DIR to a directory of your own with space for them.";
};

class CacheStore {
public:
  /// Nothing is created before the first publish, and no pack is opened before the first miss in
  /// the directory. A directory that another user owns or that others may write is refused, because
  /// a cubin is code.
  explicit CacheStore(StoreOptions options);
  /// A store with the default options in a directory.
  explicit CacheStore(std::string directory)
      : CacheStore(StoreOptions{.directory = std::move(directory)}) {}

  /// Returns whether the caller can use a sound entry; null accepts every entry.
  using Accept = std::function<bool(const CacheEntry&)>;
  /// Finds an entry in the directory or a pack. `place`, if given, gets the path where it was
  /// found. Raises PackError if a named pack cannot be used.
  std::optional<CacheEntry> load(const CacheKey&, const Accept& = nullptr,
                                 std::string* place = nullptr);
  /// Finds an entry in the directory alone, after lock(): another process may have published it
  /// since. A miss is not counted again.
  std::optional<CacheEntry> load_again(const CacheKey&, const Accept& = nullptr);
  /// Keeps an entry in the directory and evicts the least recently used entries above the byte
  /// limit. Returns false if it could not be kept; the caller then goes on with its own bytes.
  bool publish(const CacheKey&, const CacheEntry&);
  /// The exclusive right to compile a key; see KeyLock. The wait ends early if another process
  /// publishes an entry.
  KeyLock lock(const CacheKey&, const KeyLock::OnWait& = nullptr);

  /// Why a kernel in the directory is not used, or empty.
  std::string objection(const CacheKey&) const;

  /// Finds a tuning record. A record that is bad or that others may write causes one warning, and
  /// stays.
  std::optional<TuningRecord> load_record(const CacheKey&);
  bool publish_record(const TuningRecord&);

  const std::string& directory() const { return options_.directory; }
  const StoreOptions& options() const { return options_; }
  /// Why the directory is not used, or empty.
  const std::string& disabled_reason() const { return disabled_reason_; }
  /// The packs in the order in which load() reads them. Raises PackError.
  const std::vector<std::shared_ptr<const Pack>>& packs();
  const CacheCounters& counters() const { return counters_; }
  CacheCounters& counters() { return counters_; }

private:
  std::optional<CacheEntry> find_in_directory(const CacheKey&, const Accept&);
  std::optional<CacheEntry> find_in_packs(const CacheKey&, const Accept&, std::string* place);
  void stay_within_limit(uint64_t published_bytes);
  bool keep(const std::string& file, const std::string& bytes);

  StoreOptions options_;
  std::string disabled_reason_;
  CacheCounters counters_;
  UseMarks used_;
  ForkSafeMutex mutex_; ///< guards the members below
  std::vector<std::shared_ptr<const Pack>> packs_;
  bool packs_open_ = false;
  /// The bytes that may be published before the directory's size is computed again.
  uint64_t unwatched_bytes_ = 0;
  std::atomic<bool> warned_{false}, record_warned_{false};
};

} // namespace sagebwd
