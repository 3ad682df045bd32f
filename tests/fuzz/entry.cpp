//===- entry.cpp - Fuzzes the reader of compiled kernels -------------------===//

#include "tests/cache/mutations.h"
#include "tests/fuzz/target.h"

using namespace sagebwd;

std::vector<std::string> seeds() {
  return {test::some_entry(1), test::some_entry(2), serialize(make_key({}), CacheEntry())};
}

unsigned first_random() { return 3; }
std::string resealed(std::string input) { return test::resealed_entry(std::move(input)); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  std::string why;
  const std::optional<StoredEntry> stored = inspect_entry(bytes, &why);
  require(stored.has_value() == why.empty());
  if (stored) { // under its own key it must be the same entry
    const std::optional<CacheEntry> entry = deserialize(bytes, stored->key);
    require(entry && entry->cubin == stored->entry.cubin && entry->cubin.size() < size);
    require(make_key(stored->key.fields).digest == stored->key.digest);
    require(deserialize(serialize(stored->key, *entry), stored->key).has_value());
  }
  deserialize(bytes, test::some_key(1));
  return 0;
}
