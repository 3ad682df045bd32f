//===- whole_file.cpp - Files that appear whole or not at all --------------===//

#include "cache/whole_file.h"
#include "cache/posix.h"

#include "llvm/ADT/StringExtras.h"

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <sys/random.h>

namespace sagebwd {

namespace {

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

bool write_all(int fd, const std::vector<const std::string*>& parts) {
  for (const std::string* part : parts)
    if (!write_all(fd, *part))
      return false;
  return true;
}

} // namespace

std::string objection_to(const struct stat& info, const std::string& path) {
  // No cubin comes near it; a sparse file of terabytes must not end the process.
  constexpr off_t kLongestFile = off_t(256) << 20;
  if (S_ISDIR(info.st_mode))
    return "it is a directory";
  if (!S_ISREG(info.st_mode))
    return "it is no regular file";
  if (info.st_uid != ::geteuid())
    return "it belongs to user " + std::to_string(info.st_uid);
  if (info.st_mode & (S_IWGRP | S_IWOTH))
    return "other users may write it; run: chmod go-w '" + path + "'";
  if (info.st_size > kLongestFile)
    return "it is longer than any kernel";
  return "";
}

std::string unique_name(const std::string& prefix) {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof(random), 0) != sizeof(random))
    random = reinterpret_cast<uintptr_t>(&random); // O_EXCL decides in any case
  return prefix + std::to_string(::getpid()) + "-" + llvm::utohexstr(random, /*LowerCase=*/true);
}

int replace_file(int folder, const std::string& name, const std::string& prefix,
                 const std::vector<const std::string*>& parts, mode_t mode) {
  const std::string temporary = unique_name(prefix);
  Descriptor file(::openat(folder, temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!file)
    return errno;
  lock_byte(file.get(), F_WRLCK, 0); // before the first byte: see is_leftover()
  if (write_all(file.get(), parts) && ::fsync(file.get()) == 0 &&
      ::renameat(folder, temporary.c_str(), folder, name.c_str()) == 0)
    return file.close() ? 0 : errno;
  const int error = errno;
  ::unlinkat(folder, temporary.c_str(), 0);
  return error;
}

bool is_leftover(int file) {
  constexpr time_t kMinute = 60, kDay = 24 * 3600;
  struct stat info; // from before the lock is looked at
  if (::fstat(file, &info) != 0)
    return false;
  const time_t age = std::abs(::time(nullptr) - info.st_mtime); // a clock may have jumped
  switch (probe_byte(file, 0)) {
  case LockStatus::taken:
    return info.st_size > 0 || age > kMinute;
  case LockStatus::busy:
    return false;
  case LockStatus::unavailable:
    break;
  }
  return age > kDay; // who takes so long is gone
}

uint64_t sweep_leftovers(int folder, const std::string& path, const std::string& prefix) {
  uint64_t swept = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator item(path, error), end; !error && item != end;
       item.increment(error)) {
    const std::string name = item->path().filename();
    if (name.rfind(prefix, 0) != 0)
      continue;
    Descriptor file(::openat(folder, name.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file && is_leftover(file.get()) && ::unlinkat(folder, name.c_str(), 0) == 0)
      ++swept;
  }
  return swept;
}

} // namespace sagebwd
