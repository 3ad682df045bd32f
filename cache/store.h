//===- store.h - The layers of the cache on disk --------------------------===//
//
// The user's directory, then read-only packs, each named by itself or in a shared folder. A bad
// kernel is unlinked, counted and treated as a miss; a directory that cannot be used costs one
// warning, never a call.
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
  std::atomic<uint64_t> memory_hits{0}; ///< this process had it already
  std::atomic<uint64_t> hits{0};        ///< from the directory
  std::atomic<uint64_t> pack_hits{0};
  std::atomic<uint64_t> misses{0};   ///< in the directory and all packs
  std::atomic<uint64_t> waits{0};    ///< for another process that was compiling it
  std::atomic<uint64_t> timeouts{0}; ///< of such waits: it was compiled all the same
  std::atomic<uint64_t> heals{0};    ///< bad files removed
  std::atomic<uint64_t> evictions{0};
  std::atomic<uint64_t> publish_failures{0};
  std::atomic<uint64_t> compiles{0};
  std::atomic<uint64_t> compile_us{0}; ///< summed over threads
};
/// Name and value of each, in one order everywhere.
std::vector<std::pair<const char*, uint64_t>> listed(const CacheCounters&);

/// "memory_hits=12 hits=13 ...".
std::string to_string(const CacheCounters&);

struct StoreOptions {
  std::string directory;                     ///< empty: none
  std::vector<std::string> packs = {};       ///< files, and folders of such
  std::vector<uint32_t> trusted_owners = {}; ///< of packs, beside this user and root
  uint64_t byte_limit = uint64_t{1} << 30;   ///< of the directory's entries; 0: none
  std::chrono::milliseconds lock_limit{60000};
  /// Called many times a second while another process is waited for; what it raises ends the wait.
  std::function<void()> check_interrupt = nullptr;
  /// Whether bad kernels are removed. Not by who cannot make them again; tuning records never are.
  bool heal = true;
  /// What follows where the directory cannot be written, for the one warning of it.
  std::string if_not_kept = "Every process compiles them again; set SAGEBWD_CACHE_DIR to a "
                            "directory of your own to keep them.";
};

class CacheStore {
public:
  /// Nothing is created before the first publish, no pack opened before the first miss in the
  /// directory. A directory that another user owns or that others may write is refused: a cubin is
  /// code.
  explicit CacheStore(StoreOptions options);
  /// With the other options as they are by default.
  explicit CacheStore(std::string directory)
      : CacheStore(StoreOptions{.directory = std::move(directory)}) {}

  /// What a caller may have against a sound entry; empty: nothing.
  using Accept = std::function<bool(const CacheEntry&)>;
  /// Raises PackError for a named pack that cannot be used. `place`, where given, takes the
  /// directory or pack that has the entry.
  std::optional<CacheEntry> load(const CacheKey&, const Accept& = nullptr,
                                 std::string* place = nullptr);
  /// The same in the directory alone, once the right to compile is had: another may have published
  /// since. Counts no second miss.
  std::optional<CacheEntry> load_again(const CacheKey&, const Accept& = nullptr);
  /// False where it could not be kept; the caller goes on with the bytes it has. Evicts the least
  /// recently used entries beyond the byte limit.
  bool publish(const CacheKey&, const CacheEntry&);
  /// The right to compile a key; see KeyLock. Ends early once another has published an entry.
  KeyLock lock(const CacheKey&, const KeyLock::OnWait& = nullptr);

  /// Why a kernel that lies in the directory is not used, or empty.
  std::string objection(const CacheKey&) const;

  /// A record that is bad or that others may write costs one warning and stays where it is.
  std::optional<TuningRecord> load_record(const CacheKey&);
  bool publish_record(const TuningRecord&);

  const std::string& directory() const { return options_.directory; }
  const StoreOptions& options() const { return options_; }
  /// Why the directory is not used, or empty.
  const std::string& disabled_reason() const { return disabled_reason_; }
  /// In the order in which they are asked. Raises PackError.
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
  ForkSafeMutex mutex_; ///< of what follows
  std::vector<std::shared_ptr<const Pack>> packs_;
  bool packs_open_ = false;
  uint64_t unwatched_bytes_ = 0; ///< to publish before the directory is looked over again
  std::atomic<bool> warned_{false}, record_warned_{false};
};

} // namespace sagebwd
