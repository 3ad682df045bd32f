//===- libfuzzer.cpp - Mutations that keep checksums right -----------------===//

#include "tests/fuzz/target.h"

#include <cstring>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

/// Half of the time; a fuzzer does not find a SHA-256 by chance.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 2)
    return size;
  const std::string sealed = resealed(std::string(reinterpret_cast<char*>(data), size));
  if (sealed.size() > max_size)
    return size;
  std::memcpy(data, sealed.data(), sealed.size());
  return sealed.size();
}
