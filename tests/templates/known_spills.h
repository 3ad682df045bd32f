//===- known_spills.h - The spills that compile tests allow ------------------===//
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace sagebwd::test {

/// Lines "NVRTC ARCHITECTURE KERNEL BYTES # why", as in known_spills.txt. ptxas of each version
/// spills elsewhere, so each has lines of its own.
class KnownSpills {
public:
  /// Those of one version, such as "13.0". Raises std::invalid_argument for a line that is none.
  KnownSpills(std::string_view text, const std::string& version);

  /// Tells what is wrong with a kernel that spills so many bytes, or 0; empty: nothing. The label
  /// is its architecture and name.
  std::string objection(const std::string& label, int bytes);
  /// Lines of an architecture whose kernels did not spill, or were not asked about.
  std::vector<std::string> stale(std::string_view arch) const;

private:
  std::string version_;
  std::map<std::string, int> bytes_;
  std::set<std::string> seen_;
};

/// The list of the repository, for the NVRTC that is loaded.
KnownSpills known_spills();

} // namespace sagebwd::test
