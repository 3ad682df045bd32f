//===- mutation_test.cpp - Ten thousand bad files --------------------------===//
//
// Half of them with their checksums made right again. Also built with AddressSanitizer and UBSan;
// see cmake/SanitizedTests.cmake.
//
//===----------------------------------------------------------------------===//

#include "tests/cache/mutations.h"

#include "cache/eviction.h"
#include "cache/pack.h"
#include "cache/store.h"
#include "tests/cache/temp_directory.h"

#include <gtest/gtest.h>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

using namespace sagebwd;
using test::below;
using test::mutated;
using test::Random;
using test::some_entry;
using test::some_key;
using test::some_record;
using test::TempDirectory;

namespace {

/// One to three pieces of damage.
std::string damaged(std::string bytes, const std::string& other, Random& random) {
  for (size_t pieces = 1 + below(random, 3); pieces > 0; --pieces)
    bytes = mutated(std::move(bytes), other, random);
  return bytes;
}

TEST(Mutations, FourThousandEntriesAreRefusedOrSound) {
  Random random(1);
  const std::string sound = some_entry(1), other = some_entry(2);
  const CacheKey key = some_key(1);
  int refused = 0, deep = 0;
  for (int round = 0; round < 4000; ++round) {
    SCOPED_TRACE(round);
    std::string bytes = damaged(sound, other, random);
    const bool resealed = round % 2;
    if (resealed)
      bytes = test::resealed_entry(bytes);
    std::string why;
    const std::optional<CacheEntry> entry = deserialize(bytes, key, &why);
    const std::optional<StoredEntry> stored = inspect_entry(bytes);
    EXPECT_EQ(why.empty(), entry.has_value());
    refused += !entry;
    deep += !entry && why.find("JSON") != std::string::npos;
    if (!resealed) {
      EXPECT_EQ(entry.has_value(), bytes == sound) << why;
      EXPECT_EQ(stored.has_value(), bytes == sound || bytes == other);
    }
    if (entry) { // forged: then it says of itself what it is
      EXPECT_LT(entry->cubin.size(), bytes.size());
      EXPECT_TRUE(entry->registers >= 0 && entry->shared_bytes >= 0 && entry->lowest_driver >= 0);
      EXPECT_TRUE(deserialize(serialize(key, *entry), key));
    }
    if (stored) {
      EXPECT_EQ(make_key(stored->key.fields).digest, stored->key.digest);
    }
  }
  EXPECT_GT(refused, 3000);
  EXPECT_GT(deep, 300) << "checksums keep the damage from what lies behind them";
}

TEST(Mutations, NumbersThatDoNotFitAreRefused) {
  const std::string sound = some_entry(1);
  const size_t json_bytes = llvm::support::endian::read32le(sound.data() + 44);
  auto with = [&](const std::string& number, const std::string& value) {
    std::string json = sound.substr(48, json_bytes);
    const std::string label = "\"" + number + "\":";
    const size_t at = json.find(label) + label.size();
    json.replace(at, json.find_first_of(",}", at) - at, value);
    char length[4];
    llvm::support::endian::write32le(length, static_cast<uint32_t>(json.size()));
    return test::resealed_entry(sound.substr(0, 44) + std::string(length, 4) + json +
                                sound.substr(48 + json_bytes));
  };
  EXPECT_TRUE(deserialize(with("registers", "255"), some_key(1)));
  for (const char* number :
       {"registers", "spill_bytes", "shared_bytes", "lowest_driver", "cubin_bytes"})
    for (const char* value : {"-1", "2147483648", "4294967597", "9223372036854775808", "1e30",
                              "0.5", "null", "\"1\"", "[]"})
      EXPECT_FALSE(deserialize(with(number, value), some_key(1))) << number << " " << value;
}

TEST(Mutations, AThousandFilesInAnEntrysPlaceAreHealed) {
  Random random(2);
  TempDirectory temp;
  CacheStore store(temp.path());
  const std::string sound = some_entry(1), other = some_entry(2);
  const std::string file = temp / (some_key(1).digest + ".kernel");
  uint64_t heals = 0;
  for (int round = 0; round < 1000; ++round) {
    const std::string bytes = damaged(sound, other, random);
    test::write_text(file, bytes);
    EXPECT_EQ(store.load(some_key(1)).has_value(), bytes == sound) << round;
    heals += bytes != sound;
    EXPECT_EQ(std::filesystem::exists(file), bytes == sound);
  }
  EXPECT_EQ(store.counters().heals, heals);
}

TEST(Mutations, ThreeThousandPacksAreRefusedOrSound) {
  Random random(3);
  TempDirectory temp;
  auto pack_of = [&](const std::vector<std::string>& items) {
    write_pack(temp / "sound.pack", items);
    return test::read_text(temp / "sound.pack");
  };
  const std::vector<std::string> items = {some_entry(1), some_entry(2), serialize(some_record(1))};
  const std::string sound = pack_of(items), other = pack_of({some_entry(3)});
  StoreOptions options;
  options.packs = {temp / "bad.pack"};
  int refused = 0, opened = 0;
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    std::string bytes = damaged(sound, other, random);
    if (round % 2)
      bytes = test::resealed_pack(bytes);
    test::write_text(temp / "bad.pack", bytes);
    try {
      const std::shared_ptr<const Pack> pack = Pack::open(temp / "bad.pack");
      ++opened;
      for (const std::string& digest : pack->digests())
        EXPECT_TRUE(pack->read(digest));
      pack->manifest();
    } catch (const PackError&) {
      ++refused;
    }
    try { // what a store makes of it
      CacheStore store(options);
      if (std::optional<CacheEntry> entry = store.load(some_key(1))) {
        EXPECT_TRUE(serialize(some_key(1), *entry) == items[0]);
      }
      if (std::optional<TuningRecord> record = store.load_record(some_record(1).key)) {
        EXPECT_EQ(serialize(*record), items[2]);
      }
    } catch (const PackError& error) {
      EXPECT_NE(std::string(error.what()).find("bad.pack"), std::string::npos);
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(opened, 100) << "checksums keep the damage from what lies behind them";
}

TEST(Mutations, TwoThousandRecordsAreRefusedOrSound) {
  Random random(4);
  const std::string sound = serialize(some_record(1));
  const std::string many = serialize_records({some_record(1), some_record(2), some_record(3)});
  int refused = 0, accepted = 0;
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE(round);
    const bool resealed = round % 2;
    std::string bytes = damaged(round % 4 < 2 ? sound : many, many, random);
    if (resealed)
      bytes = test::resealed_record(bytes);
    std::string why;
    const std::optional<TuningRecord> record = parse_record(bytes, &why);
    EXPECT_EQ(why.empty(), record.has_value());
    if (record) {
      EXPECT_EQ(make_key(record->key.fields).digest, record->key.digest);
      if (!resealed) { // white space may differ, nothing else
        EXPECT_EQ(serialize(*record), sound);
      }
    }
    const auto records = parse_records(bytes);
    for (const TuningRecord& one : records ? *records : std::vector<TuningRecord>()) {
      EXPECT_TRUE(parse_record(serialize(one)));
    }
    (records ? accepted : refused) += 1;
    is_newer_record(bytes);
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(accepted, 10);
}

/// Beside those of store_test.cpp: what listings and pruning meet.
TEST(Mutations, ThingsThatAreNoFilesDoNotStopListingsOrPruning) {
  TempDirectory temp;
  CacheStore store(temp.path());
  test::write_text(temp / (some_key(9).digest + ".kernel"), some_entry(9));
  auto place = [&](int number) { return temp / (some_key(number).digest + ".kernel"); };
  std::filesystem::create_directories(place(1) + "/full");
  std::filesystem::create_symlink("/etc/passwd", place(2));
  std::filesystem::create_symlink(place(3), place(3)); // a loop
  ASSERT_EQ(::mkfifo(place(4).c_str(), 0600), 0);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_EQ(::chdir(temp.path().c_str()), 0); // paths of sockets are short
  const std::string name = some_key(5).digest + ".kernel";
  name.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::chdir("/"), 0);
  test::write_text(temp / "xyz.kernel", "not a digest");

  EXPECT_EQ(kept_files(temp.path()).size(), 1u);
  EXPECT_EQ(prune(temp.path(), 0).evicted, 1u);
  EXPECT_TRUE(std::filesystem::exists(temp / "xyz.kernel")) << "not ours to remove";
  for (int number = 1; number <= 5; ++number)
    EXPECT_FALSE(store.load(some_key(number)));
  EXPECT_EQ(store.counters().heals, 5u);
  ::close(socket);
  EXPECT_TRUE(std::filesystem::exists("/etc/passwd"));
}

} // namespace
