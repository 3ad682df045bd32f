//===- directory.cpp - Whole files in a private directory ------------------===//

#include "cache/directory.h"
#include "cache/posix.h"
#include "cache/whole_file.h"

#include "llvm/Support/FileSystem.h"

#include <ctime>
#include <filesystem>

namespace sagebwd {

namespace {

/// Stamps younger than this are left as they are: a hit need not write.
constexpr time_t kStampSeconds = 600;

constexpr const char* kTemporary = ".tmp-";

/// Whether others may write files of a directory too.
bool holds_writable_files(const std::string& path) {
  std::error_code error;
  for (std::filesystem::directory_iterator item(path, error), end; !error && item != end;
       item.increment(error)) {
    struct stat info;
    if (::lstat(item->path().c_str(), &info) == 0 && !S_ISLNK(info.st_mode) &&
        (info.st_mode & (S_IWGRP | S_IWOTH)))
      return true;
  }
  return false;
}

/// Of an open directory, so that what is checked is what is used.
std::string reason_to_refuse(int fd, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0)
    return path + " cannot be examined: " + error_text(errno);
  if (info.st_uid != ::geteuid())
    return path + " belongs to user " + std::to_string(info.st_uid) + ", not to user " +
           std::to_string(::geteuid()) + " who runs this process";
  if (info.st_mode & (S_IWGRP | S_IWOTH))
    return path + " may be written by other users; run: chmod " +
           (holds_writable_files(path) ? "-R " : "") + "go-w '" + path + "'";
  return "";
}

/// False on an error, and where the file ends before or after `size` bytes.
bool read_all(int fd, size_t size, std::string& bytes) {
  bytes.resize(size);
  size_t done = 0;
  while (done < size) {
    ssize_t count = ::read(fd, bytes.data() + done, size - done);
    if (count < 0 && errno == EINTR)
      continue;
    if (count <= 0)
      return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

bool remove_at(int directory, const std::string& name) {
  if (::unlinkat(directory, name.c_str(), 0) == 0)
    return true;
  if (errno != EISDIR && errno != EPERM)
    return false;
  // rmdir takes an empty directory only. What a full one holds is not ours to delete.
  return ::unlinkat(directory, name.c_str(), AT_REMOVEDIR) == 0 ||
         ::renameat(directory, name.c_str(), directory, unique_name(name + ".aside-").c_str()) == 0;
}

/// Our own stamp: a file's atime depends on mount options, its mtime is nobody else's here.
void stamp_use(int file, const struct stat& info) {
  time_t age = ::time(nullptr) - info.st_mtime;
  if (age < 0 || age > kStampSeconds)
    ::futimens(file, nullptr); // fails on a read-only file system, where nothing is evicted either
}

} // namespace

std::string reason_to_refuse(const std::string& path) {
  Descriptor directory = open_directory(path);
  if (directory)
    return reason_to_refuse(directory.get(), path);
  if (errno == ENOENT)
    return "";
  return path + " cannot be opened as a directory: " + error_text(errno);
}

std::string reason_not_writable(const std::string& path) {
  return ::access(path.c_str(), W_OK | X_OK) == 0 || errno == ENOENT
             ? ""
             : path + " cannot be written: " + error_text(errno);
}

ReadStatus read_file(const std::string& path, const std::string& name, std::string& bytes,
                     std::string* why) {
  Descriptor directory = open_directory(path);
  if (!directory || !reason_to_refuse(directory.get(), path).empty())
    return ReadStatus::absent;
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  Descriptor file(
      ::openat(directory.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info;
  bool link_or_socket = !file && (errno == ELOOP || errno == ENXIO);
  if (!link_or_socket && (!file || ::fstat(file.get(), &info) != 0))
    return ReadStatus::absent; // too many open files, say: no reason to remove anything
  const std::string objection =
      link_or_socket ? "it is a symbolic link or a socket" : objection_to(info, path + "/" + name);
  if (!objection.empty()) {
    if (why)
      *why = objection;
    return ReadStatus::refused;
  }
  if (!read_all(file.get(), static_cast<size_t>(info.st_size), bytes))
    return ReadStatus::absent;
  stamp_use(file.get(), info);
  return ReadStatus::ok;
}

bool file_exists(const std::string& path, const std::string& name) {
  struct stat info;
  return ::lstat((path + "/" + name).c_str(), &info) == 0;
}

bool remove_file(const std::string& path, const std::string& name) {
  Descriptor directory = open_directory(path);
  return directory && remove_at(directory.get(), name);
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
  Descriptor directory = open_directory(path);
  if (!directory)
    return path + " cannot be opened: " + error_text(errno);
  if (std::string reason = reason_to_refuse(directory.get(), path); !reason.empty())
    return reason;

  const int error = replace_file(directory.get(), name, kTemporary, {&bytes}, 0600);
  return error == 0 ? "" : name + " is not kept in " + path + ": " + error_text(error);
}

uint64_t sweep_leftovers(const std::string& path) {
  Descriptor directory = open_directory(path);
  if (!directory || !reason_to_refuse(directory.get(), path).empty())
    return 0;
  return sweep_leftovers(directory.get(), path, kTemporary);
}

} // namespace sagebwd
