//===- work_folder.h - What an interrupted prebuild leaves to the next ----===//
//
// Internal to prebuild().
//
//===----------------------------------------------------------------------===//
#pragma once

#include <string>

namespace sagebwd {

/// A cache directory of one prebuild, "OUTPUT.partial" beside the output: so it is where there is
/// room and may be written. It is locked while this lives, and outlives this where there are
/// kernels in it: remove() it when all is done.
class WorkFolder {
public:
  /// Raises PackError where the output cannot be written, or another process is writing it.
  explicit WorkFolder(const std::string& output);
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const std::string& path() const { return path_; }
  /// Removes what a cache directory holds, and the folder if nothing else is in it.
  void remove();

private:
  std::string path_;
  int lock_ = -1;
};

} // namespace sagebwd
