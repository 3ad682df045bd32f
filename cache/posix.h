//===- posix.h - Descriptors and single-byte locks ------------------------===//
#pragma once

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace sagebwd {

class Descriptor {
public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0)
      ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  /// Closes the file; some file systems report a failed write only now.
  bool close() { return ::close(std::exchange(fd_, -1)) == 0; }

private:
  int fd_;
};

inline Descriptor open_directory(const std::string& path) {
  return Descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

inline std::string error_text(int error) { return std::strerror(error); }

/// Whether the disk, or what a quota leaves of it, is full.
inline bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }

/// The path in a form that a shell reads as one word.
inline std::string shell_quoted(const std::string& path) {
  std::string quoted = "'";
  for (char c : path)
    quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

/// The result for a lock on one byte. Locks belong to the open file description: they exclude
/// threads and processes alike, and end with the last descriptor.
enum class LockStatus { taken, busy, unavailable };

inline struct flock lock_of_byte(short type, off_t byte) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

inline LockStatus lock_byte(int fd, short type, off_t byte) {
  struct flock lock = lock_of_byte(type, byte);
  if (::fcntl(fd, F_OFD_SETLK, &lock) == 0)
    return LockStatus::taken;
  return errno == EAGAIN || errno == EACCES ? LockStatus::busy : LockStatus::unavailable;
}

/// The result that a write lock would have, without an attempt to lock, which other processes could
/// notice.
inline LockStatus probe_byte(int fd, off_t byte) {
  struct flock lock = lock_of_byte(F_WRLCK, byte);
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0)
    return LockStatus::unavailable;
  return lock.l_type == F_UNLCK ? LockStatus::taken : LockStatus::busy;
}

} // namespace sagebwd
