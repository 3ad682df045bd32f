//===- lengths_test.cpp - What the simulated cases of AnyLengths leave out ---===//
//
// Kernels differ by the constants at the head of their text. lengths.txt names cases whose kernels
// have, among them, every value that a constant has in a kernel of a family among all cases. Sizes
// of shared memory follow from the others: a static_assert compares them, no code branches on them.
//
//===----------------------------------------------------------------------===//
#include "generator/operation.h"
#include "runtime/generate.h"
#include "tests/gpu/cases.h"

#include <fstream>
#include <set>
#include <sstream>

using namespace sagebwd;
using namespace sagebwd::test;

namespace {

/// "backward_dq of mma: constexpr int STAGES = 1;", as they stand in the text.
std::set<std::string> constants_of(const Case& c) {
  std::set<std::string> found;
  for (Pass pass : {Pass::forward, Pass::backward})
    for (const KernelSpec& kernel :
         Operation(resolved(c.spec), find_arch("sm_90a"), c.tiles.value_or(Tiles{}))
             .kernels(pass)) {
      const std::string where = std::string(to_string(kernel.kind)) + " of " +
                                std::string(to_string(kernel.tile.family)) + ": ";
      std::istringstream text(generate(kernel).text);
      for (std::string line; std::getline(text, line);)
        if ((line.starts_with("constexpr ") || line.starts_with("using Element =")) &&
            !line.starts_with("constexpr int SHARED_BYTES") &&
            !line.starts_with("constexpr int PLACE_OFFSET"))
          found.insert(where + line);
    }
  return found;
}

std::set<std::string> simulated_cases() {
  std::ifstream file(SIMULATOR_FOLDER "/lengths.txt");
  std::set<std::string> names;
  for (std::string name; std::getline(file, name);)
    names.insert(name);
  return names;
}

TEST(Lengths, HaveEveryValueOfEveryConstant) {
  std::set<std::string> names = simulated_cases(), covered;
  for (const Case& c : all_cases())
    if (names.erase(c.name))
      covered.merge(constants_of(c));
  EXPECT_EQ(names, std::set<std::string>()) << "no such case";
  for (const Case& c : all_cases())
    for (const std::string& constant : constants_of(c))
      EXPECT_TRUE(covered.contains(constant))
          << constant << " is that of " << c.name << ": add this to tests/simulator/lengths.txt";
}

} // namespace
