//===- compile_width.cpp - How many kernels to compile at a time ----------===//

#include "runtime/compile_width.h"

#include <algorithm>
#include <fstream>
#include <sched.h>
#include <sstream>
#include <thread>

namespace sagebwd {

namespace {

/// The memory that one compiling thread is assumed to need. Measured with NVRTC 13.0 and the
/// largest kernels (backward_dkv of head dimension 128) for all architectures: a process peaks at
/// 141 MB with one thread, 164 MB with two, 227 MB with four and 351 MB with eight. NVRTC itself
/// thus takes about 110 MB, and each thread about 30 MB. A prebuild of 448 kernels, which holds all
/// of them at its end, peaks at 277 MiB with two threads. The constant is larger than these
/// numbers, to leave memory to other processes and to compilers that need more.
constexpr uint64_t kBytesForEach = uint64_t{192} << 20;

/// The number after a label in lines of "label number"; without a label, the file's first word.
/// Returns nothing if that is not a number (for example "max").
std::optional<uint64_t> number_in(const std::string& path, const std::string& label = "") {
  std::ifstream file(path);
  std::string word;
  while (!label.empty() && file >> word && word != label)
    ;
  uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

void lower(std::optional<uint64_t>& least, std::optional<uint64_t> value) {
  if (value && (!least || *value < *least))
    least = value;
}

/// The names of the files of a control-group version.
struct GroupFiles {
  const char *limit, *usage, *reclaimable;
};
constexpr GroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                               "total_inactive_file"};
constexpr GroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};

/// The bytes that a control group leaves of its limit. Cached file contents count as usage, but the
/// kernel frees them on demand.
std::optional<uint64_t> left_in(const std::string& group, const GroupFiles& files) {
  const std::optional<uint64_t> limit = number_in(group + "/" + files.limit);
  const std::optional<uint64_t> usage = number_in(group + "/" + files.usage);
  if (!limit || !usage)
    return std::nullopt;
  const uint64_t cached = number_in(group + "/memory.stat", files.reclaimable).value_or(0);
  const uint64_t held = *usage - std::min(cached, *usage);
  return *limit - std::min(held, *limit);
}

/// The least that a group and the groups above it leave. In a container the path may be the host's
/// path, and only the root of the mount may exist.
std::optional<uint64_t> left_in_groups(const std::string& mount, std::string path,
                                       const GroupFiles& files) {
  std::optional<uint64_t> least;
  for (;; path.resize(path.rfind('/'))) {
    lower(least, left_in(mount + path, files));
    if (path.find('/') == std::string::npos)
      return least;
  }
}

} // namespace

size_t usable_cores() {
  // 8 sets hold as many cores as the kernel supports; one cpu_set_t of glibc ends at 1024.
  cpu_set_t sets[8];
  if (::sched_getaffinity(0, sizeof(sets), sets) == 0)
    return static_cast<size_t>(CPU_COUNT_S(sizeof(sets), sets));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::optional<uint64_t> available_memory(const std::string& root) {
  std::optional<uint64_t> least;
  if (auto kilobytes = number_in(root + "/proc/meminfo", "MemAvailable:"))
    least = *kilobytes << 10;

  // Lines have the form "number:controllers:path"; in version 2 the controllers are empty.
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    std::istringstream fields(line);
    std::string number, controllers, path;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (controllers.empty())
      lower(least, left_in_groups(root + "/sys/fs/cgroup", path, kVersion2));
    else if (("," + controllers + ",").find(",memory,") != std::string::npos)
      lower(least, left_in_groups(root + "/sys/fs/cgroup/memory", path, kVersion1));
  }
  return least;
}

size_t compile_width(size_t cores, std::optional<uint64_t> memory_bytes) {
  size_t width = std::max<size_t>(1, cores);
  if (memory_bytes)
    width = std::min<uint64_t>(width, std::max<uint64_t>(1, *memory_bytes / kBytesForEach));
  return width;
}

size_t compile_width() { return compile_width(usable_cores(), available_memory()); }

} // namespace sagebwd
