//===- numbered_entries.h - Entries that a number names --------------------===//
#pragma once

#include "cache/eviction.h"
#include "cache/store.h"
#include "tests/cache/processes.h"

#include <gtest/gtest.h>

namespace sagebwd::test {

inline CacheKey key_number(int number) { return make_key({{"number", std::to_string(number)}}); }

inline CacheEntry entry_of(size_t cubin_bytes) {
  CacheEntry entry;
  entry.kernel_name = "k";
  entry.cubin.assign(cubin_bytes, 'c');
  return entry;
}

inline std::string file_of(const std::string& directory, int number) {
  return directory + "/" + key_number(number).digest + ".kernel";
}

inline uint64_t bytes_in(const std::string& directory) {
  uint64_t bytes = 0;
  for (const KeptFile& file : kept_files(directory))
    bytes += file.bytes;
  return bytes;
}

inline StoreOptions options_in(const std::string& directory, uint64_t byte_limit = 0) {
  StoreOptions options;
  options.directory = directory;
  options.byte_limit = byte_limit;
  return options;
}

/// Published by processes that are gone, as nobody evicts what he uses himself.
inline void publish_elsewhere(const std::string& directory, const std::vector<int>& numbers,
                              size_t cubin_bytes = 1000) {
  ASSERT_EQ(finish(start([&] {
              CacheStore store(options_in(directory));
              for (int number : numbers)
                if (!store.publish(key_number(number), entry_of(cubin_bytes)))
                  return 1;
              return 0;
            })),
            0);
}

/// The numbers of the keys in the order in which they would be evicted.
inline std::vector<int> order_in(const std::string& directory) {
  std::vector<int> numbers;
  for (const KeptFile& file : kept_files(directory))
    for (int number = 0; number < 10; ++number)
      if (key_number(number).digest == file.digest)
        numbers.push_back(number);
  return numbers;
}

} // namespace sagebwd::test
