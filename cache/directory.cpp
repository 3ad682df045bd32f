//===- directory.cpp - Whole files in a private directory ------------------===//

#include "cache/directory.h"

#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/FileSystem.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

namespace sagebwd {

namespace {

/// No cubin comes near it; a sparse file of terabytes must not end the process.
constexpr off_t kLongestFile = off_t(256) << 20;

class Descriptor {
public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0)
      ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  /// File systems may report a failed write only here.
  bool close() {
    int result = ::close(fd_);
    fd_ = -1;
    return result == 0;
  }

private:
  int fd_;
};

int open_directory(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

std::string error_text(int error) { return std::strerror(error); }

/// Of an open directory, so that what is checked is what is used.
std::string reason_to_refuse(int fd, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0)
    return path + " cannot be examined: " + error_text(errno);
  if (info.st_uid != ::geteuid())
    return path + " belongs to user " + std::to_string(info.st_uid) + ", not to user " +
           std::to_string(::geteuid()) + " who runs this process";
  if (info.st_mode & (S_IWGRP | S_IWOTH))
    return path + " may be written by other users; run: chmod go-w '" + path + "'";
  return "";
}

bool write_all(int fd, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    ssize_t count = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      return false;
    done += static_cast<size_t>(count);
  }
  return true;
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

/// Unique among threads, processes, and hosts that share the file system.
std::string temporary_name() {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof(random), 0) != sizeof(random))
    random = reinterpret_cast<uintptr_t>(&random); // O_EXCL decides in any case
  return ".tmp-" + std::to_string(::getpid()) + "-" + llvm::utohexstr(random, /*LowerCase=*/true);
}

void remove_at(int directory, const std::string& name) {
  // rmdir takes an empty directory only; a full one stays and is a miss for ever.
  if (::unlinkat(directory, name.c_str(), 0) != 0 && (errno == EISDIR || errno == EPERM))
    ::unlinkat(directory, name.c_str(), AT_REMOVEDIR);
}

} // namespace

std::string default_cache_directory() {
  auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (std::string path = variable("SAGEBWD_CACHE_DIR"); !path.empty()) {
    std::error_code error;
    std::filesystem::path absolute = std::filesystem::absolute(path, error);
    return error ? path : absolute.string();
  }
  // The XDG base directory specification: a relative path is invalid and ignored.
  if (std::string path = variable("XDG_CACHE_HOME"); !path.empty() && path[0] == '/')
    return path + "/sagebwd";
  if (std::string path = variable("HOME"); !path.empty() && path[0] == '/')
    return path + "/.cache/sagebwd";
  return "";
}

std::string reason_to_refuse(const std::string& path) {
  Descriptor directory(open_directory(path));
  if (directory)
    return reason_to_refuse(directory.get(), path);
  if (errno == ENOENT)
    return "";
  return path + " cannot be opened as a directory: " + error_text(errno);
}

ReadStatus read_file(const std::string& path, const std::string& name, std::string& bytes) {
  Descriptor directory(open_directory(path));
  if (!directory || !reason_to_refuse(directory.get(), path).empty())
    return ReadStatus::absent;
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  Descriptor file(
      ::openat(directory.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info;
  bool link_or_socket = !file && (errno == ELOOP || errno == ENXIO);
  if (!link_or_socket && (!file || ::fstat(file.get(), &info) != 0))
    return ReadStatus::absent; // too many open files, say: no reason to remove anything
  if (link_or_socket || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid() ||
      (info.st_mode & (S_IWGRP | S_IWOTH)) || info.st_size > kLongestFile) {
    remove_at(directory.get(), name);
    return ReadStatus::removed;
  }
  return read_all(file.get(), static_cast<size_t>(info.st_size), bytes) ? ReadStatus::ok
                                                                        : ReadStatus::absent;
}

void remove_file(const std::string& path, const std::string& name) {
  Descriptor directory(open_directory(path));
  if (directory)
    remove_at(directory.get(), name);
}

std::string publish_file(const std::string& path, const std::string& name,
                         const std::string& bytes) {
  if (std::error_code error = llvm::sys::fs::create_directories(path, /*IgnoreExisting=*/true,
                                                                llvm::sys::fs::perms::owner_all))
    return path + " cannot be created: " + error.message();
  Descriptor directory(open_directory(path));
  if (!directory)
    return path + " cannot be opened: " + error_text(errno);
  if (std::string reason = reason_to_refuse(directory.get(), path); !reason.empty())
    return reason;

  std::string temporary = temporary_name();
  Descriptor file(::openat(directory.get(), temporary.c_str(),
                           O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file)
    return "a file cannot be created in " + path + ": " + error_text(errno);
  if (!write_all(file.get(), bytes) || ::fsync(file.get()) != 0 || !file.close() ||
      ::renameat(directory.get(), temporary.c_str(), directory.get(), name.c_str()) != 0) {
    int error = errno;
    ::unlinkat(directory.get(), temporary.c_str(), 0);
    return name + " cannot be written in " + path + ": " + error_text(error);
  }
  return "";
}

} // namespace sagebwd
