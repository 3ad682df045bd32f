//===- record_test.cpp - Tuning records as files ---------------------------===//

#include "cache/record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

using namespace sagebwd;

namespace {

TuningRecord example() {
  TuningRecord record;
  record.key = make_key({{"schema", kTuningSchema},
                         {"kind", "forward"},
                         {"gpu", "NVIDIA H200"},
                         {"bucket", "q8192 kv8192 full"}});
  record.tile = "wgmma 64x128 w4 s2 b2";
  record.default_tile = "wgmma 64x128 w4 s1 b3";
  record.compiler = "nvrtc 13.0 build 36424714";
  record.candidates = {
      {"wgmma 64x128 w4 s1 b3", "timed", "", {1.25, 1.26, 1.2400000000000002}, 1.25, 0.01},
      {"wgmma 64x128 w4 s2 b2", "timed", "", {1, 1e-7, 12345678.9}, 1, 0},
      {"mma 64x128 w4 s1 b4", "crashed", "its worker said \"\\ü\n\"", {}, 0, 0}};
  return record;
}

bool same(const TuningRecord& a, const TuningRecord& b) {
  return a.key.fields == b.key.fields && a.key.digest == b.key.digest && a.tile == b.tile &&
         a.default_tile == b.default_tile && a.compiler == b.compiler &&
         a.candidates == b.candidates;
}

/// `text` with the first `from` replaced.
std::string with(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

/// Why bytes are refused.
std::string refusal_of_record(const std::string& bytes) {
  std::string why;
  EXPECT_FALSE(parse_record(bytes, &why)) << bytes;
  return why;
}

TEST(Record, IsReadBackWhole) {
  const std::string bytes = serialize(example());
  std::string why;
  const std::optional<TuningRecord> record = parse_record(bytes, &why);
  ASSERT_TRUE(record) << why;
  EXPECT_TRUE(same(*record, example()));
  EXPECT_EQ(serialize(*record), bytes);
}

TEST(Record, IsForPeople) {
  const std::string bytes = serialize(example());
  for (const char* part : {"\"gpu\": \"NVIDIA H200\"", "\"tile\": \"wgmma 64x128 w4 s2 b2\"",
                           "\"schema\": \"sagebwd tuning 1\"", "\"crashed\""})
    EXPECT_NE(bytes.find(part), std::string::npos) << part;
  EXPECT_EQ(bytes.back(), '\n');
}

TEST(Record, WhatWasChangedIsRefused) {
  const std::string bytes = serialize(example());
  EXPECT_NE(refusal_of_record(with(bytes, "NVIDIA H200", "NVIDIA H100")).find("digest"),
            std::string::npos);
  EXPECT_NE(refusal_of_record(with(bytes, "s2 b2", "s2 b1")).find("checksum"), std::string::npos);
  EXPECT_NE(refusal_of_record(with(bytes, "1.25", "1.24")).find("checksum"), std::string::npos);
  EXPECT_NE(refusal_of_record(with(bytes, "\"compiler\"", "\"compile\"")).find("member"),
            std::string::npos);
  EXPECT_NE(
      refusal_of_record(with(bytes, "\"compiler\"", "\"more\": 1, \"compiler\"")).find("member"),
      std::string::npos);
  EXPECT_NE(refusal_of_record(bytes.substr(0, bytes.size() / 2)).find("no JSON"),
            std::string::npos);
  EXPECT_NE(refusal_of_record("").find("no JSON"), std::string::npos);
  EXPECT_NE(refusal_of_record("[]").find("no JSON object"), std::string::npos);
  EXPECT_NE(refusal_of_record("{}").find("schema"), std::string::npos);
  EXPECT_NE(refusal_of_record("{\"schema\": 1}").find("schema"), std::string::npos);
  EXPECT_NE(refusal_of_record("{\"schema\": \"sagebwd tuning \"}").find("schema"),
            std::string::npos);
  EXPECT_NE(refusal_of_record("{\"schema\": \"sagebwd tuning -1\"}").find("schema"),
            std::string::npos);
}

TEST(Record, ANewerVersionsIsRecognised) {
  const std::string newer =
      with(serialize(example()), "\"schema\": \"sagebwd tuning 1\",\n  \"tile",
           "\"schema\": \"sagebwd tuning 2\",\n  \"tile");
  EXPECT_NE(refusal_of_record(newer).find("newer version"), std::string::npos);
  EXPECT_TRUE(is_newer_record(newer));
  EXPECT_TRUE(is_newer_record("{\"schema\": \"sagebwd tuning 17\", \"what\": [\"ever\"]}"));
  EXPECT_FALSE(is_newer_record(serialize(example())));
  EXPECT_FALSE(is_newer_record("{\"schema\": \"sagebwd kernel 2\"}"));
  EXPECT_FALSE(is_newer_record("nonsense"));
}

TEST(Record, DeepAndLongJsonDoesNotEndTheProcess) {
  EXPECT_FALSE(parse_record(std::string(1000000, '[')));
  EXPECT_FALSE(parse_record("{\"a\":" + std::string(1000000, '{')));
  // Brackets in strings close nothing.
  const std::string closing(500000, ']');
  EXPECT_FALSE(parse_record("[\"" + closing + "\"," + std::string(500000, '[')));
  EXPECT_FALSE(parse_record("[\"\\\"" + closing + "\"," + std::string(500000, '[')));
  EXPECT_NE(refusal_of_record(std::string(64 << 20, ' ')).find("bytes"), std::string::npos);
}

TEST(Record, NumbersThatJsonLacksDoNotBreakIt) {
  TuningRecord record = example();
  record.candidates[0].ms = {std::nan(""), INFINITY, -0.0};
  record.candidates[0].detail = "\xff\xfe";
  record.compiler = "\xc3";
  EXPECT_TRUE(parse_record(serialize(record)));
}

TEST(Record, MutatedOnesAreNeverTakenForAnother) {
  const TuningRecord original = example();
  const std::string bytes = serialize(original);
  std::mt19937 random(7);
  const auto below = [&](size_t n) { return random() % n; };
  for (int i = 0; i < 10000; ++i) {
    std::string mutated = bytes;
    switch (below(4)) {
    case 0:
      mutated[below(mutated.size())] ^= static_cast<char>(1 << below(8));
      break;
    case 1:
      mutated.resize(below(mutated.size()));
      break;
    case 2:
      mutated.insert(below(mutated.size()), 1 + below(4), static_cast<char>(below(256)));
      break;
    case 3: {
      const size_t at = below(mutated.size() - 8);
      std::swap_ranges(mutated.begin() + at, mutated.begin() + at + 4, mutated.begin() + at + 4);
      break;
    }
    }
    const std::optional<TuningRecord> record = parse_record(mutated);
    // An accepted record differs in white space between members only.
    EXPECT_TRUE(!record || same(*record, original)) << mutated;
    parse_records(mutated);
    is_newer_record(mutated);
  }
}

TEST(Records, AFileHoldsMany) {
  TuningRecord other = example();
  other.key = make_key({{"schema", kTuningSchema}, {"kind", "backward_dq"}});
  const std::string bytes = serialize_records({example(), other});
  std::string why;
  const auto records = parse_records(bytes, &why);
  ASSERT_TRUE(records) << why;
  ASSERT_EQ(records->size(), 2u);
  EXPECT_TRUE(same(records->at(0), example()));
  EXPECT_TRUE(same(records->at(1), other));
  EXPECT_EQ(parse_records(serialize_records({}))->size(), 0u);
  EXPECT_EQ(parse_records(serialize(other))->size(), 1u); // one file of the cache
}

TEST(Records, OneBadRecordSpoilsTheFileAndIsNamed) {
  std::string why;
  const std::string bytes = serialize_records({example(), example()});
  const size_t second = bytes.rfind("s2 b2");
  EXPECT_FALSE(parse_records(std::string(bytes).replace(second, 5, "s2 b1"), &why));
  EXPECT_EQ(why.substr(0, 9), "record 2:") << why;
  EXPECT_FALSE(parse_records("{\"schema\": \"sagebwd tuning 1\", \"records\": [1]}", &why));
  EXPECT_EQ(why.substr(0, 9), "record 1:") << why;
  EXPECT_FALSE(parse_records("{\"schema\": \"sagebwd tuning 9\", \"records\": []}", &why));
  EXPECT_NE(why.find("newer version"), std::string::npos) << why;
  EXPECT_TRUE(is_newer_record("{\"schema\": \"sagebwd tuning 9\", \"records\": []}"));
}

} // namespace
