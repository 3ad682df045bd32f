//===- work_folder.h - What an interrupted prebuild leaves to the next -----===//
//
// Internal to prebuild().
//
//===----------------------------------------------------------------------===//
#pragma once

#include <string>

namespace sagebwd {

/// "OUTPUT.partial", beside the output: so it is where there is room and may be written.
std::string work_folder_of(const std::string& output);

/// A cache directory of one prebuild, locked while this lives. It outlives this where there are
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
