//===- work_folder.h - The folder of an interrupted prebuild --------------===//
//
// Only prebuild() uses this class.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <string>

namespace sagebwd {

/// The cache directory of one prebuild: "OUTPUT.partial" beside the output, where there is room and
/// this user may write. The folder is locked while the object lives. If the folder contains
/// kernels, it stays afterwards; remove() removes it when the work is finished.
class WorkFolder {
public:
  /// Raises PackError if the output cannot be written or another process is writing it.
  explicit WorkFolder(const std::string& output);
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const std::string& path() const { return path_; }
  /// Removes the files of a cache directory, and the folder if it is empty then.
  void remove();

private:
  std::string path_;
  int lock_ = -1;
};

} // namespace sagebwd
