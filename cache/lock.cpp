//===- lock.cpp - Locks on one byte of a file for each key ----------------===//

#include "cache/lock.h"
#include "cache/directory.h"
#include "cache/layout.h"
#include "cache/whole_file.h"

#include <algorithm>
#include <fstream>
#include <thread>

namespace sagebwd {

namespace {

/// The byte of a key. If two keys have the same byte, they only wait for each other.
off_t byte_of(const std::string& digest) {
  return static_cast<off_t>(std::stoull(digest.substr(0, 15), nullptr, 16));
}

/// Opens a file of zero length: bytes beyond the end of a file can be locked.
Descriptor open_lock_file(const std::string& directory, const char* name) {
  return Descriptor(::open((directory + "/" + name).c_str(),
                           O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
}

/// The process that holds a lock on a byte, as far as this machine can tell. fcntl names no process
/// for locks of open file descriptions, but /proc lists them for the descriptors of this user's
/// processes.
std::string holder_of(int fd, off_t byte) {
  struct stat info;
  if (::fstat(fd, &info) != 0)
    return "another process";
  const std::string inode = ":" + std::to_string(info.st_ino) + " ",
                    range = " " + std::to_string(byte) + " ";
  for (const std::string& process : names_of("/proc")) {
    const std::string folder = "/proc/" + process;
    // Empty for processes of other users.
    for (const std::string& file : names_of(folder + "/fdinfo")) {
      std::ifstream lines(folder + "/fdinfo/" + file);
      for (std::string line; std::getline(lines, line);)
        if (line.rfind("lock:", 0) == 0 && line.find("WRITE") != std::string::npos &&
            line.find(inode) != std::string::npos && line.find(range) != std::string::npos) {
          std::string name;
          std::getline(std::ifstream(folder + "/comm") >> std::ws, name);
          return "process " + process + " (" + name + ")";
        }
    }
  }
  return "another process";
}

} // namespace

KeyLock::KeyLock(const std::string& directory, const std::string& digest,
                 std::chrono::milliseconds limit, const std::function<bool()>& enough,
                 const OnWait& on_wait) {
  if (directory.empty() || !make_private_directory(directory).empty())
    return;
  Descriptor file = open_lock_file(directory, layout::kLocks);
  if (!file)
    return;
  byte_ = byte_of(digest);
  const auto start = std::chrono::steady_clock::now(), deadline = start + limit;
  bool said = !on_wait;
  // The first pause is 1 ms, because most waits take some tens of milliseconds.
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, kLongestPause)) {
    switch (lock_byte(file.get(), F_WRLCK, byte_)) {
    case LockStatus::taken:
      file_ = std::move(file);
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
    if (!said && now - start >= kSilence) {
      said = true;
      on_wait(holder_of(file.get(), byte_),
              std::chrono::duration_cast<std::chrono::milliseconds>(deadline - now));
    }
    std::this_thread::sleep_until(std::min(deadline, now + pause));
  }
}

KeyLock::~KeyLock() {
  if (file_) // a child that was forked meanwhile has the descriptor, too
    lock_byte(file_.get(), F_UNLCK, byte_);
}

void UseMarks::mark(const std::string& directory, const std::string& digest) {
  std::lock_guard lock(mutex_);
  if (!file_)
    file_ = open_lock_file(directory, layout::kUsers);
  // If this fails, the entry may be evicted, and is then compiled again.
  if (file_)
    lock_byte(file_.get(), F_RDLCK, byte_of(digest));
}

bool UseMarks::used(const std::string& directory, const std::string& digest) {
  Descriptor file(::open((directory + "/" + layout::kUsers).c_str(),
                         O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  return file && probe_byte(file.get(), byte_of(digest)) == LockStatus::busy;
}

} // namespace sagebwd
