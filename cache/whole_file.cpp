//===- whole_file.cpp - Read and write whole files ------------------------===//

#include "cache/whole_file.h"
#include "cache/layout.h"
#include "cache/posix.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/raw_ostream.h"

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <stdexcept>
#include <sys/random.h>

namespace sagebwd {

namespace fs = std::filesystem;

namespace {

/// While the object lives, a write of this thread beyond RLIMIT_FSIZE fails with EFBIG. By default
/// the signal SIGXFSZ would end the process, and this library must not change the process's
/// handler.
class WithoutSizeSignal {
public:
  WithoutSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~WithoutSizeSignal() {
    const timespec at_once = {};
    if (!was_pending_) // otherwise the signal was not caused here
      sigtimedwait(&signal_, nullptr, &at_once);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSizeSignal(const WithoutSizeSignal&) = delete;
  WithoutSizeSignal& operator=(const WithoutSizeSignal&) = delete;

private:
  sigset_t signal_, before_;
  bool was_pending_;
};

/// Writes all parts. Returns 0 or an errno.
int write_all(int file, const std::vector<const std::string*>& parts) {
  llvm::raw_fd_ostream stream(file, /*shouldClose=*/false, /*unbuffered=*/true);
  for (const std::string* part : parts)
    stream << *part;
  const int error = stream.error().value();
  stream.clear_error(); // otherwise the destructor would end the process
  return error;
}

/// Syncs a file. Returns 0 or an errno. Some network and user-space file systems cannot sync and
/// say so; this is not an error.
int synced(int file) {
  if (::fsync(file) == 0 || errno == EINVAL || errno == ENOSYS || errno == ENOTSUP)
    return 0;
  return errno;
}

fs::path folder_of(const fs::path& file) {
  return file.has_parent_path() ? file.parent_path() : fs::path(".");
}

bool is_leftover(int file) {
  constexpr time_t kMinute = 60, kDay = 24 * 3600;
  struct stat info; // read before the lock is tested
  if (::fstat(file, &info) != 0)
    return false;
  const time_t age = std::abs(::time(nullptr) - info.st_mtime); // the clock may have jumped
  const LockStatus lock = probe_byte(file, 0);
  if (lock == LockStatus::busy)
    return false;
  if (lock == LockStatus::taken)
    return info.st_size > 0 || age > kMinute;
  return age > kDay; // no writer takes a day
}

} // namespace

bool read_at(int file, uint64_t offset, uint64_t size, std::string& bytes) {
  bytes.resize(size);
  for (uint64_t done = 0; done < size;) {
    ssize_t count =
        ::pread(file, bytes.data() + done, size - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR)
      continue;
    if (count <= 0) {
      errno = count < 0 ? errno : 0;
      return false;
    }
    done += static_cast<uint64_t>(count);
  }
  return true;
}

std::string read_input(const std::string& path) {
  constexpr uint64_t kLongest = uint64_t{64} << 20;
  auto fail = [&](const std::string& why) {
    throw std::runtime_error(path + " cannot be read: " + why);
  };
  Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat info;
  if (!file || ::fstat(file.get(), &info) != 0)
    fail(error_text(errno));
  if (!S_ISREG(info.st_mode))
    fail("it is no regular file");
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > kLongest)
    fail("it has " + std::to_string(size) + " bytes, more than any file that is read here");
  std::string bytes;
  if (!read_at(file.get(), 0, size, bytes))
    fail(errno ? error_text(errno) : "it became shorter meanwhile");
  return bytes;
}

std::vector<std::string> names_of(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator item(folder, error), end; !error && item != end;
       item.increment(error))
    names.push_back(item->path().filename());
  return names;
}

std::string unique_name(const std::string& prefix) {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof(random), 0) != sizeof(random))
    random = reinterpret_cast<uintptr_t>(&random); // the name may repeat, which O_EXCL detects
  return prefix + std::to_string(::getpid()) + "-" + llvm::utohexstr(random, /*LowerCase=*/true);
}

bool is_unique_name(const std::string& name, const std::string& prefix) {
  llvm::StringRef rest(name);
  if (!rest.consume_front(prefix))
    return false;
  const auto [process, random] = rest.split('-');
  return !process.empty() && !random.empty() && llvm::all_of(process, llvm::isDigit) &&
         llvm::all_of(random, llvm::isHexDigit);
}

int replace_file(int folder, const std::string& name, const std::string& prefix,
                 const std::vector<const std::string*>& parts, mode_t mode) {
  const WithoutSizeSignal blocked;
  const std::string temporary = unique_name(prefix);
  Descriptor file(::openat(folder, temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!file)
    return errno;
  lock_byte(file.get(), F_WRLCK, 0); // before the first byte: see is_leftover()
  int error = write_all(file.get(), parts);
  error = error ? error : synced(file.get());
  if (error == 0 && ::renameat(folder, temporary.c_str(), folder, name.c_str()) == 0)
    return file.close() ? 0 : errno;
  error = error ? error : errno;
  ::unlinkat(folder, temporary.c_str(), 0);
  return error;
}

std::string reason_not_to_write(const std::string& path) {
  std::error_code ignored;
  const fs::path target(path);
  if (path.find('\0') != std::string::npos)
    return "the path begins with '" + std::string(path.c_str()) + "' and holds a NUL; name a file";
  if (target.filename().empty() || target.filename() == "." || target.filename() == "..")
    return "'" + path + "' is no file's name; name a file";
  // A rename would replace a device or a link by a file.
  if (const auto status = fs::symlink_status(target, ignored);
      exists(status) && !is_regular_file(status))
    return path + " is there and is no regular file; name another file";
  if (const fs::path folder = folder_of(target); !is_directory(fs::status(folder, ignored)))
    return path + " cannot be written: there is no folder " + folder.string() +
           "; make it, or name another file";
  return "";
}

std::string write_output(const std::string& path, const std::vector<const std::string*>& parts) {
  if (std::string why = reason_not_to_write(path); !why.empty())
    return why;
  const fs::path target(path);
  const std::string name = target.filename(), folder_path = folder_of(target);
  Descriptor folder = open_directory(folder_path);
  if (!folder)
    return path + " is not written: its folder cannot be opened: " + error_text(errno);
  leftovers(folder.get(), folder_path, layout::temporary_of(name), /*remove=*/true);
  if (const int error = replace_file(folder.get(), name, layout::temporary_of(name), parts, 0644))
    return path + " is not written: " + error_text(error) +
           (is_full(error) ? "; free some space and run it again" : "");
  ::fsync(folder.get());
  return "";
}

uint64_t leftovers(int folder, const std::string& path, const std::string& prefix, bool remove) {
  uint64_t count = 0;
  for (const std::string& name : names_of(path)) {
    // Skip a file of another program that begins with the prefix.
    if (!is_unique_name(name, prefix))
      continue;
    Descriptor file(::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    count +=
        file && is_leftover(file.get()) && (!remove || ::unlinkat(folder, name.c_str(), 0) == 0);
  }
  return count;
}

} // namespace sagebwd
