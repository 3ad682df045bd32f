//===- known_spills_test.cpp - The list of spills that are allowed -----------===//

#include "tests/templates/known_spills.h"

#include <gtest/gtest.h>

#include <stdexcept>

using sagebwd::test::KnownSpills;

namespace {

constexpr const char* kList = "# a comment\n"
                              "13.0 sm_80 sagebwd_one 8 # registers\n"
                              "\n"
                              "13.0 sm_80 sagebwd_two 16\n"
                              "12.9 sm_80 sagebwd_other 24\n";

TEST(KnownSpills, AllowWhatIsListedForThatVersionAndNothingElse) {
  KnownSpills known(kList, "13.0");
  EXPECT_EQ(known.objection("sm_80 sagebwd_one", 8), "");
  EXPECT_EQ(known.objection("sm_80 sagebwd_without", 0), "");
  for (int bytes : {4, 12})
    EXPECT_NE(known.objection("sm_80 sagebwd_one", bytes), "");
  const std::string unknown = known.objection("sm_80 sagebwd_other", 24);
  EXPECT_NE(unknown.find("\n13.0 sm_80 sagebwd_other 24"), std::string::npos) << unknown;
  EXPECT_NE(known.objection("sm_86 sagebwd_one", 8), "");
  EXPECT_NE(KnownSpills(kList, "13.1").objection("sm_80 sagebwd_one", 8), "");
  EXPECT_NE(KnownSpills("", "13.0").objection("sm_80 sagebwd_one", 8), "");
}

TEST(KnownSpills, TellWhichLinesAreStale) {
  KnownSpills known(kList, "13.0");
  EXPECT_EQ(known.objection("sm_80 sagebwd_one", 8), "");
  EXPECT_EQ(known.objection("sm_80 sagebwd_two", 0), "");
  EXPECT_EQ(known.stale("sm_80"), std::vector<std::string>{"13.0 sm_80 sagebwd_two 16"});
  EXPECT_TRUE(known.stale("sm_8").empty());
}

TEST(KnownSpills, RefuseALineThatIsNone) {
  for (const char* line : {"13.0 sm_80", "13.0 sm_80 sagebwd_one", "13.0 sm_80 sagebwd_one few",
                           "13.0 sm_80 sagebwd_one 0", "13.0 sm_80 sagebwd_one 8 or so"})
    EXPECT_THROW(KnownSpills(line, "13.0"), std::invalid_argument) << line;
}

} // namespace
