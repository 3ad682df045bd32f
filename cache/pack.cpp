//===- pack.cpp - Many entries in one read-only file ----------------------===//
//
// The format of the file: a Seal over index and rows; the manifest (JSON); the items in the order
// of the rows, without gaps, to the end of the file. So given items have exactly one layout.
// Opening reads only up to the rows; each item has its own checksum.
//
//===----------------------------------------------------------------------===//

#include "cache/pack.h"
#include "cache/bounded_json.h"
#include "cache/item.h"
#include "cache/layout.h"
#include "cache/posix.h"
#include "cache/untrusted.h"
#include "cache/whole_file.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/Support/FormatVariadic.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

namespace sagebwd {

namespace {

constexpr Magic kPackMagic = {'S', 'A', 'G', 'E', 'B', 'W', 'D', 'P'};
constexpr uint32_t kPackFormat = 1;

struct Index {
  ulittle32_t count; ///< the number of items
  ulittle64_t manifest_bytes;
  Sha256Digest manifest_checksum;
};
/// The place of an item. Rows are sorted by digest.
struct Row {
  Sha256Digest digest;
  ulittle64_t offset, bytes;
};
constexpr size_t kRowsAt = sizeof(Seal) + sizeof(Index);
static_assert(kRowsAt == 88 && sizeof(Row) == 48);

/// Limits for what a hostile file can make this process allocate. All are far above any real pack.
constexpr uint64_t kMostItems = 1 << 18, kLongestManifest = uint64_t{512} << 20,
                   kLongestItem = uint64_t{256} << 20;

constexpr std::string_view kPackSuffix = ".pack";
constexpr const char* kAgain = "; copy it again, or build it again with 'sagebwd prebuild'";

//===--- Reading ----------------------------------------------------------===//

/// Whether a user number stands for all accounts without a number in this user namespace.
bool is_unmapped(uid_t user) {
  uint64_t inside = 0, outside = 0, count = 0, overflow = 65534;
  std::ifstream("/proc/self/uid_map") >> inside >> outside >> count;
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  // A full map is that of the whole system.
  return user == overflow && count != 0 && count < UINT32_MAX;
}

/// Why a file or folder that another user may have made must not be used, or empty.
std::string reason_not_to_trust(const struct stat& info, const std::string& path,
                                const std::vector<uint32_t>& trusted) {
  const std::string quoted = shell_quoted(path), owner = std::to_string(info.st_uid);
  const bool ours = info.st_uid == ::geteuid() || info.st_uid == 0;
  if (!ours && !llvm::is_contained(trusted, info.st_uid) && is_unmapped(info.st_uid))
    return "its owner has no number in this user namespace (as in a rootless container), where "
           "user " +
           owner +
           " stands for every such account, and a pack holds code: SAGEBWD_TRUSTED_OWNERS=" +
           owner + " would trust them all; make a copy of your own with cp, or map the owner";
  if (!ours && !llvm::is_contained(trusted, info.st_uid))
    return "it belongs to user " + owner + ", who is neither user " + std::to_string(::geteuid()) +
           " of this process nor root, and a pack holds code; if you trust that user with " +
           "whatever your processes may do, set SAGEBWD_TRUSTED_OWNERS=" + owner +
           "; else make a copy of your own with cp, or as root run: chown root " + quoted;
  if (info.st_mode & (S_IWGRP | S_IWOTH))
    return "other users may write it, and a pack holds code; if you trust what is in it now, " +
           ("let its owner run: chmod go-w " + quoted) +
           (S_ISDIR(info.st_mode) ? " (one account then writes the folder, and all others read it)"
                                  : "");
  return "";
}

/// Advice for files that were made under a umask such as 077.
std::string to_let_read(const std::string& path, const char* mode) {
  return std::string("; let its owner run: chmod ") + mode + " " + shell_quoted(path) +
         " (and a+x its folders, if they are closed)";
}

/// Why a file must not be used, or empty.
std::string reason_to_refuse_pack(const struct stat& info, const std::string& path,
                                  const std::vector<uint32_t>& trusted) {
  if (!S_ISREG(info.st_mode))
    return S_ISDIR(info.st_mode) ? "it is a directory, not a pack" : "it is no regular file";
  return reason_not_to_trust(info, path, trusted);
}

} // namespace

struct Pack::File {
  std::string path;
  Descriptor descriptor;
  uint64_t bytes = 0, manifest_offset = 0;
  Index index;
  std::vector<Row> rows;
  std::vector<std::string> digests;

  void read_index();
  std::string read(uint64_t offset, uint64_t size) const {
    std::string found;
    if (!read_at(descriptor.get(), offset, size, found))
      fail("it was truncated while in use, or cannot be read" + std::string(kAgain));
    return found;
  }
  [[noreturn]] void fail(const std::string& what) const { throw PackError(path + ": " + what); }
};

void Pack::File::read_index() {
  std::string head, row_bytes;
  if (bytes < kRowsAt || !read_at(descriptor.get(), 0, kRowsAt, head))
    fail(std::string("it is shorter than a pack's header: truncated, or no pack") + kAgain);
  const auto seal = read_as<Seal>(head);
  if (seal.magic != kPackMagic)
    fail("it is no pack of sagebwd; 'sagebwd prebuild' and 'sagebwd cache export' write packs");
  if (seal.version != kPackFormat)
    fail("it was written by " +
         std::string(seal.version > kPackFormat ? "a newer" : "another, older") +
         " version of sagebwd (pack format " + std::to_string(seal.version) + ", this one reads " +
         std::to_string(kPackFormat) +
         "); use that version, or build the pack again with this one's 'sagebwd prebuild'");

  index = read_as<Index>(llvm::StringRef(head).drop_front(sizeof(Seal)));
  const std::string truncated = std::string("it is truncated or corrupt") + kAgain;
  manifest_offset = kRowsAt + uint64_t{index.count} * sizeof(Row);
  if (index.count > kMostItems || index.manifest_bytes > kLongestManifest ||
      manifest_offset > bytes ||
      !read_at(descriptor.get(), kRowsAt, index.count * sizeof(Row), row_bytes))
    fail(truncated);
  if (seal.checksum != sha256(head.substr(sizeof(Seal)) + row_bytes))
    fail("the checksum of its index does not match: " + truncated);

  uint64_t end = manifest_offset + index.manifest_bytes;
  for (llvm::StringRef rest = row_bytes; !rest.empty(); rest = rest.drop_front(sizeof(Row))) {
    const Row& row = rows.emplace_back(read_as<Row>(rest));
    std::string digest = llvm::toHex(row.digest, /*LowerCase=*/true);
    if (row.offset != end || row.bytes > kLongestItem ||
        (!digests.empty() && digest <= digests.back()))
      fail("its index is wrong: " + truncated);
    end += row.bytes; // cannot overflow: at most kMostItems * kLongestItem
    digests.push_back(std::move(digest));
  }
  if (end != bytes)
    fail("it has " + std::to_string(bytes) + " bytes where its index says " + std::to_string(end) +
         ": " + truncated);
}

std::shared_ptr<const Pack> Pack::open(const std::string& path,
                                       const std::vector<uint32_t>& trusted) {
  auto file = std::make_unique<File>();
  file->path = path;
  // With O_NONBLOCK, opening a FIFO does not wait for its writer. A link may be opened, because the
  // checks look at the file that it leads to.
  file->descriptor = Descriptor(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat info;
  if (!file->descriptor || ::fstat(file->descriptor.get(), &info) != 0) {
    const int error = errno;
    file->fail("the pack cannot be opened: " + error_text(error) +
               (error == ENOENT   ? "; write it with 'sagebwd prebuild', or correct the path (in "
                                    "SAGEBWD_CACHE_PACKS colons separate paths)"
                : error == EACCES ? to_let_read(path, "a+r")
                                  : ""));
  }
  if (std::string why = reason_to_refuse_pack(info, path, trusted); !why.empty())
    file->fail(why);
  file->bytes = static_cast<uint64_t>(info.st_size);
  file->read_index();
  return std::shared_ptr<const Pack>(new Pack(std::move(file)));
}

namespace {

bool begins_as_pack(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  std::string start;
  return file && read_at(file.get(), 0, kPackMagic.size(), start) &&
         std::equal(start.begin(), start.end(), kPackMagic.begin());
}

} // namespace

std::vector<std::string> packs_left_out_at(const std::string& path) {
  std::vector<std::string> left_out;
  for (const std::string& name : open_directory(path) ? names_of(path) : std::vector<std::string>())
    if (!name.ends_with(kPackSuffix) && !name.starts_with("."))
      if (const std::string file = (std::filesystem::path(path) / name).string();
          begins_as_pack(file))
        left_out.push_back(file);
  std::sort(left_out.begin(), left_out.end());
  return left_out;
}

std::vector<std::string> packs_at(const std::string& path, const std::vector<uint32_t>& trusted) {
  const Descriptor folder = open_directory(path);
  struct stat info;
  if (!folder && (errno != EACCES || ::stat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)))
    return {path}; // Pack::open reports what is wrong
  const auto fail = [&](const std::string& why) { throw PackError(path + ": " + why); };
  if (!folder)
    fail("the folder of packs cannot be read: " + error_text(EACCES) + to_let_read(path, "a+rx"));
  ::fstat(folder.get(), &info);
  if (std::string why = reason_not_to_trust(info, path, trusted); !why.empty())
    fail(why);
  std::vector<std::string> packs;
  bool kernels = false; // kernels as in a cache directory
  std::string unnamed;  // a pack that is not read because of its name
  for (const std::string& name : names_of(path)) {
    kernels |= layout::kind_of(name) == layout::Kind::kernel;
    if (name.ends_with(kPackSuffix) && !name.starts_with("."))
      packs.push_back((std::filesystem::path(path) / name).string());
    else if (begins_as_pack((std::filesystem::path(path) / name).string()))
      unnamed = name;
  }
  if (packs.empty())
    fail("there is no pack in this folder, that is, no file *.pack" +
         std::string(!unnamed.empty() ? "; '" + unnamed + "' is one: its owner renames it to '" +
                                            unnamed + std::string(kPackSuffix) + "'"
                     : kernels ? "; it is a cache directory, whose owner makes a pack of it with "
                                 "'sagebwd cache export --out FILE.pack'"
                               : "; 'sagebwd prebuild --out FILE.pack' writes one"));
  std::sort(packs.begin(), packs.end());
  return packs;
}

Pack::Pack(std::unique_ptr<File> file) : file_(std::move(file)) {}
Pack::~Pack() = default;

const std::string& Pack::path() const { return file_->path; }
const std::vector<std::string>& Pack::digests() const { return file_->digests; }

std::optional<std::string> Pack::read(const std::string& digest) const {
  const auto found = std::lower_bound(file_->digests.begin(), file_->digests.end(), digest);
  if (found == file_->digests.end() || *found != digest)
    return std::nullopt;
  const Row& row = file_->rows[static_cast<size_t>(found - file_->digests.begin())];
  return file_->read(row.offset, row.bytes);
}

std::string Pack::manifest() const {
  std::string text = file_->read(file_->manifest_offset, file_->index.manifest_bytes);
  if (sha256(text) != file_->index.manifest_checksum)
    file_->fail("its manifest is corrupt: the checksum does not match" + std::string(kAgain));
  return text;
}

//===--- Writing ----------------------------------------------------------===//

namespace {

/// Compares architectures by number: sm_90a comes before sm_100.
struct ByNumber {
  bool operator()(const std::string& a, const std::string& b) const {
    return llvm::StringRef(a).compare_numeric(b) < 0;
  }
};

/// The contents of a pack that is about to be written. They depend only on the items, not on their
/// order or number of copies.
struct PackContents {
  std::map<std::string, const std::string*> items; ///< by digest; the caller keeps the bytes
  std::string manifest;
};

llvm::json::Object describe(const Item& item, size_t bytes) {
  llvm::json::Object object{{"kind", item.kernel ? "kernel" : "tuning"},
                            {"digest", item.key.digest},
                            {"bytes", bytes},
                            {"compiler", item.compiler},
                            {"fields", as_json(item.key.fields)}};
  if (item.kernel) {
    object["kernel"] = item.name;
    object["lowest_driver"] = item.lowest_driver;
  } else {
    object["tile"] = item.tile;
  }
  return object;
}

/// Collects items. Returns why one of them is neither a sound entry nor a sound record, or that two
/// differ under one digest; or empty.
std::string gather(const std::vector<std::string>& items, PackContents& contents) {
  std::map<std::string, llvm::json::Object> descriptions;
  std::set<std::string, ByNumber> archs;
  int lowest_driver = 0;
  for (const std::string& bytes : items) {
    Item item;
    item.kernel = is_kernel(bytes);
    if (std::string why = inspect_item(bytes, item); !why.empty())
      return "item " + std::to_string(&bytes - items.data() + 1) +
             " is neither a compiled kernel nor a tuning record: " + why;
    auto [place, first] = contents.items.try_emplace(item.key.digest, &bytes);
    if (!first && *place->second != bytes)
      return "two different items have one key, " + item.key.digest +
             ": two compilers made them, or two tunings; keep one of them";
    archs.insert(item.arch);
    lowest_driver = std::max(lowest_driver, item.lowest_driver);
    descriptions.emplace(item.key.digest, describe(item, bytes.size()));
  }
  llvm::json::Array array;
  for (auto& [digest, description] : descriptions)
    array.push_back(std::move(description));
  llvm::json::Object manifest{{"format", kPackFormat},
                              {"archs", llvm::json::Array(archs)},
                              {"lowest_driver", lowest_driver},
                              {"items", std::move(array)}};
  contents.manifest = llvm::formatv("{0}", llvm::json::Value(std::move(manifest)));
  return "";
}

/// Everything in the file before the items.
std::string head_of(const PackContents& contents) {
  const auto count = static_cast<uint32_t>(contents.items.size());
  const size_t manifest_bytes = contents.manifest.size();
  std::string body =
      bytes_of(Index{ulittle32_t(count), ulittle64_t(manifest_bytes), sha256(contents.manifest)});
  uint64_t offset = kRowsAt + count * sizeof(Row) + manifest_bytes;
  for (const auto& [digest, bytes] : contents.items) {
    body += bytes_of(Row{read_as<Sha256Digest>(llvm::fromHex(digest)), ulittle64_t(offset),
                         ulittle64_t(bytes->size())});
    offset += bytes->size();
  }
  return bytes_of(Seal{kPackMagic, ulittle32_t(kPackFormat), sha256(body)}) + body +
         contents.manifest;
}

} // namespace

void check_pack_path(const std::string& path) {
  if (path == "-")
    throw PackError("packs go into files, not to standard output: name a file ('./-' if that is "
                    "its name)");
  if (path.find(':') != std::string::npos)
    throw PackError("'" + path +
                    "' has a colon, and colons separate the paths in SAGEBWD_CACHE_PACKS: give the "
                    "pack a name without one");
  if (std::string why = reason_not_to_write(path); !why.empty())
    throw PackError(why);
  Magic start;
  std::ifstream file(path, std::ios::binary);
  file.read(start.data(), start.size());
  if (file.gcount() > 0 && (!file || start != kPackMagic))
    throw PackError(path + " is there and is no pack; remove it, or name another file");
}

uint64_t write_pack(const std::string& path, const std::vector<std::string>& items) {
  check_pack_path(path);
  auto fail = [&](const std::string& what) { throw PackError(path + " is not written: " + what); };
  PackContents contents;
  if (std::string why = gather(items, contents); !why.empty())
    fail(why);
  if (contents.items.size() > kMostItems || contents.manifest.size() > kLongestManifest)
    fail("a pack holds at most " + std::to_string(kMostItems) + " items, these are " +
         std::to_string(contents.items.size()) + "; write several");
  const std::string head = head_of(contents);
  std::vector<const std::string*> parts = {&head};
  uint64_t bytes = head.size();
  for (const auto& [digest, item] : contents.items) {
    if (item->size() > kLongestItem)
      fail("the item " + digest + " has more than " + std::to_string(kLongestItem) + " bytes");
    parts.push_back(item);
    bytes += item->size();
  }
  if (std::string why = write_output(path, parts); !why.empty())
    throw PackError(why);
  return bytes;
}

} // namespace sagebwd
