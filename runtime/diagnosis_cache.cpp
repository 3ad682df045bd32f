//===- diagnosis_cache.cpp - Examine the cache directory and packs --------===//

#include "runtime/diagnosis_cache.h"
#include "cache/directory.h"
#include "runtime/kernels.h"

#include <filesystem>
#include <unistd.h>

namespace sagebwd {
namespace {

namespace fs = std::filesystem;

/// Why a kernel cannot be kept in a directory, or empty. The files and folders of the test are
/// removed.
std::string reason_not_kept(const std::string& directory) {
  std::error_code ignored;
  std::vector<fs::path> made;
  for (fs::path path = directory; path.has_relative_path() && !fs::exists(path, ignored);
       path = path.parent_path())
    made.push_back(path);
  // The name is that of a temporary file, so that a sweep removes the file of a killed doctor.
  const std::string probe = ".tmp-" + std::to_string(::getpid()) + "-d";
  // The file has the size of a kernel, because a full disk accepts an empty file.
  const std::string why = publish_file(directory, probe, std::string(64 << 10, '\0'));
  remove_file(directory, probe);
  for (const fs::path& path : made)
    fs::remove(path, ignored);
  return why;
}

PackState look_at_pack(const std::string& path, const Settings& settings) {
  PackState state;
  state.path = path;
  try {
    const std::shared_ptr<const Pack> pack = Pack::open(path, settings.trusted_owners);
    state.summary = summarize(*pack);
    for (const KeptName& name : kept_names(pack)) {
      const std::optional<KeptItem> item = read_kept(name);
      if (item && !item->problem.empty())
        throw PackError(path + ", item " + name.digest + ": " + item->problem +
                        "; copy it again, or build it again with 'sagebwd prebuild'");
      if (item && item->kernel && is_current(item->key, settings))
        ++state.current[{item->arch, item->lowest_driver}];
    }
  } catch (const PackError& error) {
    state.error = error.what();
  }
  return state;
}

} // namespace

DirectoryState look_at_directory(StoreOptions options) {
  DirectoryState state;
  state.options = std::move(options);
  const std::string& directory = state.options.directory;
  state.error = CacheStore(state.options).disabled_reason();
  if (state.error.empty())
    state.error = reason_not_kept(directory);
  for (const KeptName& kept : kept_names(directory)) {
    std::error_code error;
    const uint64_t bytes = fs::file_size(fs::path(directory) / kept.file, error);
    state.bytes += error ? 0 : bytes;
    ++state.files;
  }
  return state;
}

std::vector<PackState> look_at_packs(const std::string& path, const Settings& settings) {
  std::vector<PackState> states;
  try {
    for (const std::string& file : packs_at(path, settings.trusted_owners))
      states.push_back(look_at_pack(file, settings));
  } catch (const PackError& error) {
    states.push_back({path, error.what(), {}, {}});
  }
  return states;
}

} // namespace sagebwd
