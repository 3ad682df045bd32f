//===- lock.cpp - One byte of a file for each key --------------------------===//

#include "cache/lock.h"
#include "cache/directory.h"
#include "cache/posix.h"

#include <algorithm>
#include <thread>

namespace sagebwd {

namespace {

/// Two keys on one byte would only wait for each other.
off_t byte_of(const std::string& digest) {
  return static_cast<off_t>(std::stoull(digest.substr(0, 15), nullptr, 16));
}

/// A file of zero length: bytes beyond the end of a file can be locked.
Descriptor open_lock_file(const std::string& directory, const char* name) {
  return Descriptor(::open((directory + "/" + name).c_str(),
                           O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
}

constexpr const char* kLocks = "locks";
constexpr const char* kUsers = "users";

} // namespace

KeyLock::KeyLock(const std::string& directory, const std::string& digest,
                 std::chrono::milliseconds limit, const std::function<bool()>& enough) {
  if (directory.empty() || !make_private_directory(directory).empty())
    return;
  Descriptor file = open_lock_file(directory, kLocks);
  if (!file)
    return;
  byte_ = byte_of(digest);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  // A millisecond at first, as most of what is waited for takes tens of them.
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, kLongestPause)) {
    switch (lock_byte(file.get(), F_WRLCK, byte_)) {
    case LockStatus::taken:
      held_ = true;
      fd_ = file.release();
      return;
    case LockStatus::unavailable:
      return;
    case LockStatus::busy:
      waited_ = true;
    }
    if (enough())
      return;
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      timed_out_ = true;
      return;
    }
    std::this_thread::sleep_until(std::min(deadline, now + pause));
  }
}

KeyLock::~KeyLock() {
  if (fd_ < 0)
    return;
  lock_byte(fd_, F_UNLCK, byte_); // a child that was forked meanwhile has the descriptor too
  ::close(fd_);
}

UseMarks::~UseMarks() {
  if (fd_ >= 0)
    ::close(fd_);
}

void UseMarks::mark(const std::string& directory, const std::string& digest) {
  std::lock_guard lock(mutex_);
  if (fd_ < 0)
    fd_ = open_lock_file(directory, kUsers).release();
  if (fd_ >= 0)
    lock_byte(fd_, F_RDLCK, byte_of(digest)); // without it the entry may be evicted and comes anew
}

bool UseMarks::used(const std::string& directory, const std::string& digest) {
  Descriptor file(
      ::open((directory + "/" + kUsers).c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  return file && probe_byte(file.get(), byte_of(digest)) == LockStatus::busy;
}

} // namespace sagebwd
