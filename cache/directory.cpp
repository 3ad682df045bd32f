//===- directory.cpp - Whole files in a private directory -----------------===//

#include "cache/directory.h"
#include "cache/layout.h"
#include "cache/posix.h"
#include "cache/whole_file.h"

#include "llvm/Support/FileSystem.h"
#include "llvm/Support/Path.h"

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string_view>

namespace sagebwd {

namespace fs = std::filesystem;

namespace {

/// A file's mtime is used as the time of its last use, because atime depends on mount options.
/// Stamps younger than this many seconds are not renewed, so that most hits do not write.
constexpr time_t kStampSeconds = 600;

/// Whether a directory belongs to the system or is a home folder. Root may write everywhere, so the
/// mode does not protect them.
bool is_of_the_system(const std::string& path) {
  static constexpr std::string_view roots[] = {
      "/bin",   "/boot",      "/dev",     "/etc",    "/home", "/lib",  "/lib32",
      "/lib64", "/libx32",    "/media",   "/mnt",    "/opt",  "/proc", "/root",
      "/run",   "/sbin",      "/srv",     "/sys",    "/tmp",  "/usr",  "/usr/local",
      "/var",   "/var/cache", "/var/lib", "/var/tmp"};
  static constexpr std::string_view whole[] = {"/bin",  "/boot",  "/dev",   "/etc",
                                               "/lib",  "/lib32", "/lib64", "/libx32",
                                               "/proc", "/sbin",  "/sys",   "/usr"};
  const auto among = [](const auto& list, const std::string& path) {
    return std::find(std::begin(list), std::end(list), path) != std::end(list);
  };
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error)
    return false; // the directory does not exist yet
  const char* home = std::getenv("HOME");
  if (real == "/" || among(roots, real) || (home && *home && fs::equivalent(real, home, error)))
    return true;
  const bool in_use = file_exists(path, layout::kLocks) || file_exists(path, layout::kUsers);
  const std::string top = "/" + (++real.begin())->string();
  return !in_use && among(whole, top) && !fs::is_empty(real, error);
}

/// A directory to use instead of one that must not be used: below it, if others cannot rename
/// folders there.
std::string advised_instead(const struct stat& info, const std::string& path) {
  const char* home = std::getenv("HOME");
  const fs::path place = (info.st_mode & S_ISVTX) || !home || !*home
                             ? fs::path(path) / ("sagebwd-" + std::to_string(::geteuid()))
                             : fs::path(home) / ".cache/sagebwd";
  return "name a directory of your own instead, such as " + shell_quoted(place);
}

/// Advice for users who want to share a cache.
constexpr const char* kToShare =
    "; to share kernels, name a folder of packs in SAGEBWD_CACHE_PACKS ('sagebwd prebuild' or "
    "'sagebwd cache export' writes packs)";

/// Why an open directory must not be used. The check uses the descriptor, so that the directory
/// that is checked is the one that is used.
std::string reason_to_refuse(int fd, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0)
    return path + " cannot be examined: " + error_text(errno);
  if (info.st_uid != ::geteuid())
    return path + " belongs to user " + std::to_string(info.st_uid) + ", not to user " +
           std::to_string(::geteuid()) + " who runs this process" + kToShare;
  if (!(info.st_mode & (S_IWGRP | S_IWOTH)))
    return is_of_the_system(path)
               ? path + " is a directory of the system, or a home; " + advised_instead(info, path)
               : "";
  const bool not_ours_alone = (info.st_mode & (S_ISVTX | S_ISGID)) || is_of_the_system(path);
  bool foreign = false, writable = false; // the files in the directory
  for (const std::string& name : names_of(path)) {
    foreign |= layout::kind_of(name) == layout::Kind::foreign;
    struct stat item;
    writable |= ::lstat((path + "/" + name).c_str(), &item) == 0 && !S_ISLNK(item.st_mode) &&
                (item.st_mode & (S_IWGRP | S_IWOTH));
  }
  const std::string what = path + " may be written by other users; ";
  if (foreign || not_ours_alone) // this process must not change the mode of such a directory
    return what + advised_instead(info, path) + kToShare;
  return what + "run: chmod " + (writable ? "-R " : "") + "go-w " + shell_quoted(path) + kToShare;
}

/// Why a directory that does not exist cannot be made, or empty: the nearest one above it decides.
std::string reason_not_to_make(const std::string& path) {
  std::string above = path;
  do
    above = std::string(llvm::sys::path::parent_path(above));
  while (!above.empty() && ::access(above.c_str(), F_OK) != 0);
  return ::access(above.empty() ? "." : above.c_str(), W_OK | X_OK) == 0
             ? ""
             : path + " cannot be created: " + error_text(errno);
}

/// Opens a directory. Closed if it does not exist or must not be used; `why` gets the reason of the
/// latter, or why it cannot be made.
Descriptor open_ours(const std::string& path, std::string* why = nullptr) {
  Descriptor directory = open_directory(path);
  std::string reason;
  if (directory)
    reason = reason_to_refuse(directory.get(), path);
  else if (errno == ENOENT)
    reason = reason_not_to_make(path);
  else
    reason = path + " cannot be opened as a directory: " + error_text(errno);
  if (why)
    *why = reason;
  return reason.empty() ? std::move(directory) : Descriptor();
}

/// Why a file must not be trusted, or empty.
std::string objection_to(const struct stat& info, const std::string& path) {
  // No cubin is nearly as long. The limit keeps a sparse file of terabytes from ending the process.
  constexpr off_t kLongestFile = off_t(256) << 20;
  if (S_ISDIR(info.st_mode))
    return "it is a directory";
  if (!S_ISREG(info.st_mode))
    return "it is no regular file";
  if (info.st_uid != ::geteuid())
    return "it belongs to user " + std::to_string(info.st_uid);
  if (info.st_mode & (S_IWGRP | S_IWOTH))
    return "other users may write it; run: chmod go-w " + shell_quoted(path);
  if (info.st_size > kLongestFile)
    return "it is longer than any kernel";
  return "";
}

} // namespace

std::string reason_to_refuse(const std::string& path) {
  std::string why;
  open_ours(path, &why);
  return why;
}

std::string reason_not_writable(const std::string& path) {
  return ::access(path.c_str(), W_OK | X_OK) == 0 || errno == ENOENT
             ? ""
             : path + " cannot be written: " + error_text(errno);
}

std::vector<std::string> names_in(const std::string& path) {
  return reason_to_refuse(path).empty() ? names_of(path) : std::vector<std::string>();
}

std::chrono::system_clock::time_point last_use_of(const struct stat& info) {
  using Clock = std::chrono::system_clock;
  // Some file systems have stamps after the year 2262, at which 64 bits of nanoseconds end.
  constexpr time_t kLastSecond = INT64_MAX / std::nano::den - 1;
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(
      std::chrono::seconds(std::clamp(info.st_mtim.tv_sec, -kLastSecond, kLastSecond)) +
      std::chrono::nanoseconds(info.st_mtim.tv_nsec)));
}

FileRead read_file(const std::string& path, const std::string& name, bool use) {
  FileRead read;
  auto ends_as = [&](FileRead::Status status, const std::string& why) {
    read.status = status;
    read.why = why;
    return std::move(read);
  };
  const Descriptor directory = open_ours(path);
  if (!directory)
    return read;
  // With O_NONBLOCK, opening a FIFO does not wait for its writer.
  Descriptor file(
      ::openat(directory.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info;
  if (!file || ::fstat(file.get(), &info) != 0) {
    const int error = errno;
    if (error == ELOOP || error == ENXIO)
      return ends_as(FileRead::refused,
                     error == ELOOP ? "it is a symbolic link" : "it is a socket");
    if (error == ENOENT)
      return read;
    return ends_as(FileRead::unreadable, "it cannot be read: " + error_text(error));
  }
  read.size = static_cast<uint64_t>(info.st_size);
  read.last_use = last_use_of(info);
  if (std::string why = objection_to(info, path + "/" + name); !why.empty())
    return ends_as(FileRead::refused, why);
  if (!read_at(file.get(), 0, read.size, read.bytes))
    return ends_as(FileRead::unreadable,
                   errno ? "it cannot be read: " + error_text(errno) : "it is truncated");
  const time_t age = ::time(nullptr) - info.st_mtime;
  if (use && (age < 0 || age > kStampSeconds))
    // Stamping fails on a read-only file system, where nothing is evicted.
    ::futimens(file.get(), nullptr);
  read.status = FileRead::ok;
  return read;
}

bool file_exists(const std::string& path, const std::string& name) {
  struct stat info;
  return ::lstat((path + "/" + name).c_str(), &info) == 0;
}

bool remove_file(const std::string& path, const std::string& name) {
  const Descriptor directory = open_directory(path);
  if (!directory)
    return false;
  if (::unlinkat(directory.get(), name.c_str(), 0) == 0)
    return true;
  if (errno != EISDIR && errno != EPERM)
    return false;
  // rmdir removes only an empty directory. A directory with files is moved aside, because its files
  // must not be deleted.
  const std::string aside = unique_name(name + ".aside-");
  return ::unlinkat(directory.get(), name.c_str(), AT_REMOVEDIR) == 0 ||
         ::renameat(directory.get(), name.c_str(), directory.get(), aside.c_str()) == 0;
}

std::string make_private_directory(const std::string& path) {
  if (std::error_code error = llvm::sys::fs::create_directories(path, /*IgnoreExisting=*/true,
                                                                llvm::sys::fs::perms::owner_all))
    return path + " cannot be created: " + error.message();
  return reason_to_refuse(path);
}

std::string publish_file(const std::string& path, const std::string& name,
                         const std::string& bytes) {
  if (std::string reason = make_private_directory(path); !reason.empty())
    return reason;
  std::string why;
  const Descriptor directory = open_ours(path, &why);
  if (!directory)
    return why.empty() ? path + " cannot be opened: " + error_text(ENOENT) : why;
  const int error = replace_file(directory.get(), name, layout::kTemporary, {&bytes}, 0600);
  return error == 0 ? ""
                    : name + " is not kept in " + path + ": " + error_text(error) +
                          (is_full(error) ? "; free some space there" : "");
}

uint64_t leftovers(const std::string& path, bool remove) {
  const Descriptor directory = open_ours(path);
  return directory ? leftovers(directory.get(), path, layout::kTemporary, remove) : 0;
}

} // namespace sagebwd
