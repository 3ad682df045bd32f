//===- arch_test.cpp - GPU architectures ------------------------------------===//

#include "generator/arch.h"
#include "tests/generator/specs.h"

using namespace sagebwd;
using test::expect_refusal;

namespace {

TEST(Arch, AreFoundByName) {
  for (const Arch& arch : all_archs()) {
    EXPECT_EQ(find_arch(arch.name), arch);
    EXPECT_EQ(arch_for_capability(arch.major, arch.minor), arch);
  }
  for (const char* name : {"sm_90", "sm_75", "SM_80", "80", ""})
    expect_refusal([&] { find_arch(name); }, {("'" + std::string(name) + "'").c_str(),
                                              "supported are sm_80, ", "sm_90a", "sm_121"});
  for (const auto& [given, meant] : {std::pair("sm_90", "'sm_90a'"),
                                     {"SM_80", "'sm_80'"},
                                     {"80", "'sm_80'"},
                                     {"8.9", "'sm_89'"}})
    expect_refusal([&] { find_arch(given); }, {"did you mean", meant});
}

TEST(Arch, ServeLaterMinorVersionsOfTheirMajorVersion) {
  EXPECT_EQ(arch_for_capability(8, 8).name, "sm_87");
  EXPECT_EQ(arch_for_capability(10, 1).name, "sm_100");
  EXPECT_EQ(arch_for_capability(12, 9).name, "sm_121");
  expect_refusal([] { arch_for_capability(7, 5); },
                 {"capability 7.5", "not supported", "8.0", "12.1"});
  expect_refusal([] { arch_for_capability(13, 0); }, {"capability 13.0"});
}

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
TEST(Arch, KnowTheirSharedMemory) {
  for (const Arch& arch : all_archs()) {
    const int capability = arch.major * 10 + arch.minor;
    const bool consumer = capability == 86 || capability == 89 || arch.major == 12;
    const int kilobytes = consumer ? 99 : arch.major == 8 ? 163 : 227;
    EXPECT_EQ(arch.max_shared_bytes, kilobytes * 1024) << arch.name;
  }
}

} // namespace
