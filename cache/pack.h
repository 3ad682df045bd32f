//===- pack.h - Many entries in one read-only file ------------------------===//
//
// A pack has compiled kernels and tuning records, an index and a manifest. A machine with NVRTC
// builds it for machines that must not compile. Equal contents give the same bytes, in any order of
// building.
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

/// A pack cannot be read or written. The message names the file and says what is wrong with it and
/// what to do.
class PackError : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

/// An open pack; thread-safe. The file may be replaced or removed while the pack is open.
class Pack {
public:
  /// Reads and checks the header and the index. Items are checked when they are read. Raises
  /// PackError if there is no such file, or if it is not a pack, has another format version, is
  /// truncated, belongs to a user other than this user, root and the `trusted` users, or is
  /// writable for others (a cubin is code).
  static std::shared_ptr<const Pack> open(const std::string& path,
                                          const std::vector<uint32_t>& trusted = {});
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  const std::string& path() const;
  const std::vector<std::string>& digests() const; ///< of the keys in the pack, sorted
  /// The bytes of an item, as they were added; nothing if the pack has no such digest. Raises
  /// PackError if the file is shorter than its index says.
  std::optional<std::string> read(const std::string& digest) const;
  /// The manifest as JSON: format, archs and lowest_driver; and for each item its kind ("kernel" or
  /// "tuning"), digest, bytes and the fields of its key. Raises PackError if it does not match its
  /// checksum.
  std::string manifest() const;

private:
  struct File;
  explicit Pack(std::unique_ptr<File>);
  std::unique_ptr<File> file_;
};

/// The packs of a path: the file itself, or the files *.pack of a folder, sorted by name. Raises
/// PackError if a folder has none, or if users other than its owner may write to it; the owner must
/// be this user, root or one of the `trusted` users.
std::vector<std::string> packs_at(const std::string& path,
                                  const std::vector<uint32_t>& trusted = {});
/// The packs in a folder that packs_at() leaves out, because their names do not end in .pack.
std::vector<std::string> packs_left_out_at(const std::string& path);

/// Publishes a pack of serialized entries and tuning records, whole or not at all; an earlier file
/// stays until then. Returns the pack's size in bytes. Raises PackError.
uint64_t write_pack(const std::string& path, const std::vector<std::string>& items);
/// Raises PackError if there is something at the path that must not be replaced by a pack. Call it
/// before minutes are spent on building the items.
void check_pack_path(const std::string& path);

} // namespace sagebwd
