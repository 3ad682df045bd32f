//===- pack.cpp - Fuzzes the reader of packs -------------------------------===//

#include "cache/pack.h"
#include "cache/explain.h"
#include "cache/store.h"
#include "tests/cache/mutations.h"
#include "tests/cache/temp_directory.h"
#include "tests/fuzz/target.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace sagebwd;

std::vector<std::string> seeds() {
  test::TempDirectory temp;
  auto pack_of = [&](const std::vector<std::string>& items) {
    write_pack(temp / "pack", items);
    return test::read_text(temp / "pack");
  };
  return {pack_of({}), pack_of({test::some_entry(1)}),
          pack_of({test::some_entry(1), test::some_entry(2), serialize(test::some_record(1))})};
}

unsigned first_random() { return 8; }
std::string resealed(std::string input) { return test::resealed_pack(std::move(input)); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A file that is in memory only.
  static const int file = ::memfd_create("pack", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  require(::fchmod(file, 0600) == 0 && ::ftruncate(file, 0) == 0 &&
          ::pwrite(file, data, size, 0) == static_cast<ssize_t>(size));
  try {
    const std::shared_ptr<const Pack> pack = Pack::open(path);
    size_t bytes = 0;
    for (const std::string& digest : pack->digests()) {
      require(is_digest(digest));
      bytes += pack->read(digest)->size();
    }
    require(bytes <= size && !pack->read(std::string(64, 'g')));
    summarize(*pack);
  } catch (const PackError&) {
  }
  try { // what a listing and an explanation make of it
    std::vector<KeptItem> kept;
    for (const KeptName& name : kept_names(Pack::open(path)))
      if (std::optional<KeptItem> item = read_kept(name)) {
        require(!item->problem.empty() || item->newer || item->key.digest == item->digest);
        kept.push_back(std::move(*item));
      }
    require(!to_string(explain(test::some_key(4), kept)).empty());
  } catch (const PackError&) {
  }
  StoreOptions options;
  options.packs = {path};
  CacheStore store(options);
  try {
    store.load(test::some_key(1));
    store.load_record(test::some_record(1).key);
  } catch (const PackError&) {
  }
  return 0;
}
