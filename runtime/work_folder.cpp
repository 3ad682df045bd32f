//===- work_folder.cpp - The folder of an interrupted prebuild ------------===//

#include "runtime/work_folder.h"

#include "cache/directory.h"
#include "cache/layout.h"
#include "cache/pack.h"
#include "cache/posix.h"

#include <filesystem>

namespace sagebwd {

namespace fs = std::filesystem;

namespace {

/// Whether the open lock file is still the file at this path: the lock file of a folder that was
/// removed meanwhile excludes nobody.
bool is_at(int fd, const std::string& path) {
  struct stat opened, named;
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

/// Calls `visit` with each file of a folder and its kind, by its name.
template <typename Visit> void visit_files(const std::string& folder, Visit visit) {
  std::error_code ignored;
  for (fs::directory_iterator item(folder, ignored), end; !ignored && item != end;
       item.increment(ignored))
    visit(item->path(), layout::kind_of(item->path().filename()));
}

bool holds_kernels(const std::string& path) {
  bool found = false;
  visit_files(path, [&](auto&, layout::Kind kind) { found |= kind == layout::Kind::kernel; });
  return found;
}

constexpr const char* kRemedy = "; remove it, or name another file";

/// Why the existing folder must not be used, and emptied at the end; or empty.
std::string reason_to_leave_alone(const std::string& path) {
  std::error_code ignored;
  if (fs::is_symlink(fs::symlink_status(path, ignored)))
    return path + " is a link" + kRemedy;
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) {
    if (!S_ISDIR(info.st_mode))
      return path + " is there and is no folder" + kRemedy;
    if (info.st_uid != ::geteuid())
      return path + " belongs to user " + std::to_string(info.st_uid) + kRemedy;
  }
  if (holds_kernels(path) && !fs::exists(path + "/" + layout::kWorkLock, ignored))
    return path + " holds kernels and is no work folder of a prebuild, for it has no " +
           layout::kWorkLock + "; move it away, or name another file";
  return "";
}

} // namespace

WorkFolder::WorkFolder(const std::string& output) : path_(layout::work_folder_of(output)) {
  check_pack_path(output);
  const std::string file = path_ + "/" + layout::kWorkLock;
  auto fail = [&](const std::string& what) {
    throw PackError(output + " cannot be built: " + what);
  };
  if (std::string reason = reason_to_leave_alone(path_); !reason.empty())
    fail("its work folder " + reason);
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (std::string reason = make_private_directory(path_); !reason.empty())
      fail("its work folder " + reason);
    Descriptor lock(
        ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    if (!lock && errno == ENOENT) // another process removed the folder just now
      continue;
    if (!lock)
      fail(file + ": " + error_text(errno));
    // If the file system has no locks, two prebuilds may both do the work, which does no other
    // harm.
    if (lock_byte(lock.get(), F_WRLCK, 0) == LockStatus::busy)
      fail("another process is building it right now; wait for it, or name another file");
    if (!is_at(lock.get(), file))
      continue;
    lock_ = lock.release();
    return;
  }
  fail(path_ + " is removed again and again");
}

WorkFolder::~WorkFolder() {
  if (!holds_kernels(path_))
    remove();
  if (lock_ >= 0)
    ::close(lock_);
}

void WorkFolder::remove() {
  // Another process may have replaced the folder, or removed it.
  if (!is_at(lock_, path_ + "/" + layout::kWorkLock))
    return;
  std::error_code ignored;
  visit_files(path_, [&](const fs::path& file, layout::Kind kind) {
    const bool lock_of_folder = file.filename() == layout::kWorkLock; // removed last
    if (kind != layout::Kind::foreign && kind != layout::Kind::record &&
        kind != layout::Kind::crossover && !lock_of_folder)
      fs::remove(file, ignored);
  });
  fs::remove(path_ + "/" + layout::kWorkLock, ignored);
  fs::remove(path_, ignored);
}

} // namespace sagebwd
