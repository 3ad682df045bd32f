//===- replay.cpp - A fuzz target without libFuzzer ------------------------===//
//
// No arguments: the seeds and 6000 mutations of them. --seeds FOLDER writes the seeds there. Else
// the files that are named.
//
//===----------------------------------------------------------------------===//

#include "tests/cache/mutations.h"
#include "tests/cache/temp_directory.h"
#include "tests/fuzz/target.h"

#include <cstdio>

using namespace sagebwd;

namespace {

constexpr int kMutations = 6000;

void feed(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

void replay_mutations() {
  const std::vector<std::string> sound = seeds();
  for (const std::string& seed : sound) {
    feed(seed);
    require(resealed(seed) == seed || !resealed(seed).empty());
  }
  test::Random random(first_random());
  for (int i = 0; i < kMutations; ++i) {
    std::string input = sound[test::below(random, sound.size())];
    for (size_t pieces = 1 + test::below(random, 6); pieces > 0; --pieces)
      input = test::mutated(std::move(input), sound[test::below(random, sound.size())], random);
    feed(i % 2 ? resealed(std::move(input)) : input);
  }
  std::printf("%zu seeds and %d mutations\n", sound.size(), kMutations);
}

} // namespace

int main(int count, char** arguments) {
  if (count == 3 && arguments[1] == std::string("--seeds")) {
    std::filesystem::create_directories(arguments[2]);
    for (const std::string& seed : seeds())
      test::write_text(arguments[2] + ("/" + sha256_hex(seed).substr(0, 16)), seed);
  } else if (count > 1) {
    for (int i = 1; i < count; ++i)
      feed(test::read_text(arguments[i]));
  } else {
    replay_mutations();
  }
}
