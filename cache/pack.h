//===- pack.h - Many entries in one read-only file ------------------------===//
//
// What a machine with NVRTC builds for machines that may not compile: compiled kernels and tuning
// records, one index, one manifest. The same contents give the same bytes, in whatever order they
// were made.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace sagebwd {

/// A pack that cannot be read or written. The message names the file, says what is wrong with it
/// and what to do.
class PackError : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

/// An open pack; thread-safe. Its file may be replaced or removed while it is open.
class Pack {
public:
  /// Reads and checks the header and the index, not the contents: they are checked as they are
  /// read. Raises PackError: no such file, no pack, another format version, truncated, owned by
  /// neither this user, root nor one of the `trusted` users, or writable by others (a cubin is
  /// code).
  static std::shared_ptr<const Pack> open(const std::string& path,
                                          const std::vector<uint32_t>& trusted = {});
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  const std::string& path() const;
  const std::vector<std::string>& digests() const; ///< of the keys it holds, sorted
  /// The bytes kept under a key's digest, as they were added; nothing where there are none.
  /// Raises PackError where the file is shorter than its index says.
  std::optional<std::string> read(const std::string& digest) const;
  /// JSON: format, archs, lowest_driver, and of each item its kind ("kernel" or "tuning"), digest,
  /// bytes, and the fields of its key. Raises PackError where it does not match its checksum.
  std::string manifest() const;

private:
  struct File;
  explicit Pack(std::unique_ptr<File>);
  std::unique_ptr<File> file_;
};

/// The packs that a path names: the file itself, or the files *.pack of a folder, by name. Raises
/// PackError for a folder that has none, or to which somebody else may write than its owner: this
/// user, root or one of the `trusted` users.
std::vector<std::string> packs_at(const std::string& path,
                                  const std::vector<uint32_t>& trusted = {});
/// The packs in a folder that packs_at() leaves out, because their names do not end in .pack.
std::vector<std::string> packs_left_out_at(const std::string& path);

/// Publishes a pack of serialized entries and tuning records, whole or not at all; an earlier file
/// stays until then. Returns its size in bytes. Raises PackError.
uint64_t write_pack(const std::string& path, const std::vector<std::string>& items);
/// Raises PackError for a path at which there is something that must not be replaced by a pack: for
/// those who are about to spend minutes on its items.
void check_pack_path(const std::string& path);

} // namespace sagebwd
