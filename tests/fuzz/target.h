//===- target.h - What each fuzz target provides ---------------------------===//
//
// With Clang each target becomes a libFuzzer executable. In a build folder of its own, with LLVM 15
// or newer, as Clang does not take LLVM 14's JSON.h in C++20:
//
//   cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++
//   ninja -C build/fuzz fuzz_entry fuzz_entry_replay
//   build/fuzz/bin/fuzz_entry_replay --seeds build/fuzz/corpus/entry
//   build/fuzz/bin/fuzz_entry -max_total_time=120 build/fuzz/corpus/entry
//
// With any compiler each becomes an executable that replays its seeds and mutations of them, which
// ctest runs; it also takes files: what libFuzzer found, say.
//
//===----------------------------------------------------------------------===//
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

/// Sound inputs to begin with.
std::vector<std::string> seeds();
/// Where the random numbers of a replay begin: of several beginnings, the one whose mutations reach
/// most lines and branches.
unsigned first_random();
/// The input with its checksums made right, where it has any: damage then reaches what they guard.
std::string resealed(std::string input);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/// Ends the process where a parser broke a promise.
inline void require(bool promise) {
  if (!promise)
    std::abort();
}
