//===- entry_test.cpp - Keys and the file of an entry ----------------------===//

#include "cache/entry.h"
#include "tests/cache/mutations.h"

#include <gtest/gtest.h>

using namespace sagebwd;

namespace {

CacheKey sample_key() {
  return make_key({{"schema", "test"},
                   {"source", sha256_hex("extern \"C\" __global__ void k() {}")},
                   {"options", "--std=c++17"},
                   {"arch", "sm_90a"}});
}

CacheEntry sample_entry() {
  CacheEntry entry;
  entry.kernel_name = "sagebwd_forward_d128";
  entry.arch = "sm_90a";
  entry.compiler = "nvrtc 13.0 build 36424714";
  entry.lowest_driver = 13000;
  entry.registers = 168;
  entry.spill_bytes = 0;
  entry.shared_bytes = 99 * 1024;
  entry.cubin = std::string("\x7f"
                            "ELF\0\xff\n{}\0",
                            10) +
                std::string(200, '\xa5');
  return entry;
}

TEST(CacheKey, DigestIsThatOfTheLengthPrefixedFields) {
  // Computed with Python: sha256 of struct.pack("<Q", len(t)) + t for t in (b"a", b"bc").
  EXPECT_EQ(make_key({{"a", "bc"}}).digest,
            "9a8acca1b6c6c0befd3fbc756aed625da998c998f7252e738c4ef061906b9b21");
  EXPECT_EQ(sha256_hex("abc"), // FIPS 180-2, appendix B.1
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(CacheKey, FieldBordersLabelsAndValuesCountButNotTheirOrder) {
  std::string digest = make_key({{"a", "bc"}, {"d", "e"}}).digest;
  EXPECT_EQ(digest.size(), 64u);
  EXPECT_EQ(digest, make_key({{"a", "bc"}, {"d", "e"}}).digest);
  EXPECT_NE(digest, make_key({{"ab", "c"}, {"d", "e"}}).digest);
  EXPECT_NE(digest, make_key({{"a", "b"}, {"cd", "e"}}).digest);
  EXPECT_EQ(digest, make_key({{"d", "e"}, {"a", "bc"}}).digest);
  EXPECT_NE(digest, make_key({{"a", "bc"}, {"d", "f"}}).digest);
  EXPECT_NE(digest, make_key({{"a", "bc"}, {"d", "e"}, {"", ""}}).digest);
}

TEST(CacheEntry, RoundTripsAndForgetsItsCompileTime) {
  CacheEntry entry = sample_entry();
  entry.compile_ms = 123;
  std::string bytes = serialize(sample_key(), entry);
  std::optional<CacheEntry> read = deserialize(bytes, sample_key());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->kernel_name, entry.kernel_name);
  EXPECT_EQ(read->arch, entry.arch);
  EXPECT_EQ(read->compiler, entry.compiler);
  EXPECT_EQ(read->lowest_driver, entry.lowest_driver);
  EXPECT_EQ(read->registers, entry.registers);
  EXPECT_EQ(read->spill_bytes, entry.spill_bytes);
  EXPECT_EQ(read->shared_bytes, entry.shared_bytes);
  EXPECT_EQ(read->cubin, entry.cubin);
  EXPECT_EQ(read->compile_ms, 0);

  entry.compile_ms = 456;
  EXPECT_EQ(serialize(sample_key(), entry), bytes);
}

TEST(CacheEntry, ShowsItsKeyInClearSoThatItCanBeCheckedWithoutTheSource) {
  const CacheKey key = sample_key();
  const std::string bytes = serialize(key, sample_entry());
  EXPECT_NE(bytes.find("\"arch\":\"sm_90a\""), std::string::npos);
  std::optional<StoredEntry> stored = inspect_entry(bytes);
  ASSERT_TRUE(stored);
  EXPECT_EQ(stored->key.fields, key.fields);
  EXPECT_EQ(stored->key.digest, key.digest);
  EXPECT_EQ(stored->entry.cubin, sample_entry().cubin);

  CacheKey forged = key; // the name of one kernel over the fields of another
  forged.digest = make_key({{"arch", "sm_80"}}).digest;
  std::string why;
  EXPECT_FALSE(inspect_entry(serialize(forged, sample_entry()), &why));
  EXPECT_NE(why.find("digest"), std::string::npos) << why;
}

TEST(CacheEntry, EverySingleByteChangeIsRejected) {
  const std::string bytes = serialize(sample_key(), sample_entry());
  for (size_t i = 0; i < bytes.size(); ++i)
    for (char flip : {'\x01', '\x80', '\xff'}) {
      std::string changed = bytes;
      changed[i] ^= flip;
      ASSERT_FALSE(deserialize(changed, sample_key())) << "byte " << i;
    }
}

TEST(CacheEntry, EveryTruncationAndAppendedByteIsRejected) {
  const std::string bytes = serialize(sample_key(), sample_entry());
  for (size_t size = 0; size < bytes.size(); ++size) {
    std::string why;
    ASSERT_FALSE(deserialize(bytes.substr(0, size), sample_key(), &why)) << size << " bytes";
    ASSERT_FALSE(why.empty());
  }
  EXPECT_FALSE(deserialize(bytes + '\0', sample_key()));
}

TEST(CacheEntry, AJsonThatIsLongerThanTheFileIsRejected) {
  CacheEntry entry = sample_entry();
  entry.cubin.clear(); // so that the JSON is all there is
  std::string bytes = serialize(sample_key(), entry);
  constexpr size_t kJsonBytesAt = 44;
  ASSERT_LT(static_cast<unsigned char>(bytes[kJsonBytesAt]), 255);
  ++bytes[kJsonBytesAt];
  bytes = test::resealed_entry(bytes); // as who forges a file makes it
  std::string why;
  EXPECT_FALSE(deserialize(bytes, sample_key(), &why));
  EXPECT_EQ(why, "its JSON is longer than the file");
  --bytes[kJsonBytesAt];
  EXPECT_TRUE(deserialize(test::resealed_entry(bytes), sample_key(), &why)) << why;
}

TEST(CacheEntry, AnotherKeysEntryIsRejected) {
  std::string why;
  CacheKey other = make_key({{"schema", "test"}});
  EXPECT_FALSE(deserialize(serialize(sample_key(), sample_entry()), other, &why));
  EXPECT_NE(why.find("another key"), std::string::npos) << why;
}

TEST(CacheEntry, TextThatIsNoUtf8DoesNotEndTheProcess) {
  CacheEntry entry = sample_entry();
  entry.compiler = "\xff\xfe";
  EXPECT_TRUE(deserialize(serialize(sample_key(), entry), sample_key()));
}

} // namespace
