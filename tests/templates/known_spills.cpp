//===- known_spills.cpp - The spills that compile tests allow ----------------===//

#include "tests/templates/known_spills.h"
#include "cache/whole_file.h"
#include "runtime/nvrtc/nvrtc.h"

#include <sstream>
#include <stdexcept>

namespace sagebwd::test {

KnownSpills::KnownSpills(std::string_view text, const std::string& version) : version_(version) {
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string of, arch, kernel, more;
    int bytes = 0;
    if (!(words >> of))
      continue;
    if (!(words >> arch >> kernel >> bytes) || words >> more || bytes <= 0)
      throw std::invalid_argument("no line of known spills: '" + line + "'");
    if (of == version)
      bytes_[arch + " " + kernel] = bytes;
  }
}

std::string KnownSpills::objection(const std::string& label, int bytes) {
  const auto known = bytes_.find(label);
  if (bytes == 0)
    return "";
  const std::string found =
      label + " spills " + std::to_string(bytes) + " bytes with NVRTC " + version_;
  if (known == bytes_.end())
    return found +
           ". Lay the kernel out in another way, or say why not beside a line of "
           "tests/templates/known_spills.txt:\n" +
           version_ + " " + label + " " + std::to_string(bytes);
  if (known->second != bytes)
    return found + ", and known are " + std::to_string(known->second);
  seen_.insert(label);
  return "";
}

std::vector<std::string> KnownSpills::stale(std::string_view arch) const {
  std::vector<std::string> lines;
  for (const auto& [label, bytes] : bytes_)
    if (label.starts_with(std::string(arch) + " ") && !seen_.count(label))
      lines.push_back(version_ + " " + label + " " + std::to_string(bytes));
  return lines;
}

KnownSpills known_spills() {
  const Nvrtc& nvrtc = Nvrtc::instance();
  return KnownSpills(read_input(SAGEBWD_SOURCE_DIR "/tests/templates/known_spills.txt"),
                     std::to_string(nvrtc.version_major()) + "." +
                         std::to_string(nvrtc.version_minor()));
}

} // namespace sagebwd::test
