//===- tuner_records_test.cpp - What becomes of records ---------------------===//
//
// Without a directory, of a newer version, on another machine; and the worker's command.
//
//===----------------------------------------------------------------------===//

#include "runtime/tuner/worker/command.h"
#include "tests/runtime/tune_fixture.h"

#include <algorithm>

using namespace sagebwd;
using namespace std::chrono_literals;
using test::ScopedVariable;

namespace {

TEST_F(Tune, WithoutADirectoryItIsKnownToThisProcess) {
  directory_ = "";
  CacheStore& nowhere = store();
  Records records(nowhere);
  traits_[kFast] = "ms=0.8";
  testing::internal::CaptureStderr();
  const Tuned first = tune(request_, around(records)).at(0);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("warning"), std::string::npos);
  EXPECT_TRUE(first.fresh);
  EXPECT_FALSE(first.kept);
  EXPECT_FALSE(tune(request_, around(records)).at(0).fresh);
  EXPECT_EQ(records.all().size(), 1u);
}

TEST_F(Tune, ANewerVersionsRecordIsLeftAlone) {
  const TuningRecord record = tuned().record;
  const std::string path = directory_ + "/" + record.key.digest + ".tuning";
  const std::string newer = "{\"schema\": \"sagebwd tuning 2\", \"tile\": \"of the future\"}\n";
  test::write_text(path, newer);
  EXPECT_EQ(chosen(TuneMode::use), default_());
  EXPECT_EQ(test::read_text(path), newer);
  Records records(store());
  std::vector<std::string> problems;
  EXPECT_TRUE(records.all(&problems).empty());
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("newer version"), std::string::npos);
}

TEST_F(Tune, ListingARecordThatOthersMayWriteKeepsItAndSaysSo) {
  const TuningRecord record = tuned().record;
  const std::string path = directory_ + "/" + record.key.digest + ".tuning";
  std::filesystem::permissions(path, std::filesystem::perms(0660));
  std::vector<std::string> problems;
  EXPECT_TRUE(Records(store()).all(&problems).empty());
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].find("run: chmod go-w '" + path + "'"), std::string::npos) << problems[0];
  EXPECT_THROW(Records(store()).all(), TuneError);
  std::filesystem::permissions(path, std::filesystem::perms(0600));
  EXPECT_EQ(Records(store()).all().size(), 1u);
}

TEST_F(Tune, RecordsMoveBetweenMachines) {
  traits_[kFast] = "ms=0.8";
  tuned();
  request_.problem = {1, 1, 1, 512, 512};
  tuned();
  Records here(store());
  const std::vector<TuningRecord> all = here.all();
  ASSERT_EQ(all.size(), 2u);
  const std::string file = serialize_records(all);

  directory_ = temp_ / "elsewhere";
  Records there(store());
  const uint64_t before = there.generation();
  Records::Merged merged = there.merge(*parse_records(file), /*overwrite=*/false);
  EXPECT_EQ(merged.added, 2u);
  EXPECT_GT(there.generation(), before);
  EXPECT_EQ(to_string(chosen(TuneMode::frozen)), kFast);
  EXPECT_EQ(serialize_records(Records(store()).all()), file);

  std::vector<TuningRecord> changed = all;
  changed[0].compiler = "another";
  merged = there.merge(changed, /*overwrite=*/false);
  EXPECT_EQ(merged.kept, 2u);
  EXPECT_EQ(serialize_records(Records(store()).all()), file);
  merged = there.merge(changed, /*overwrite=*/true);
  EXPECT_EQ(merged.replaced, 2u);
  EXPECT_EQ(merged.added + merged.kept, 0u);
  EXPECT_EQ(Records(store()).find(changed[0].key)->compiler, "another");

  changed[1].tile = "nonsense"; // all or none
  changed[0].compiler = "a third";
  EXPECT_THROW(there.merge(changed, true), SpecError);
  EXPECT_EQ(Records(store()).find(changed[0].key)->compiler, "another");
}

TEST(WorkerCommand, IsNamedFoundOrMissed) {
  EXPECT_EQ(worker_command({"a", "b"}, "/named"), (std::vector<std::string>{"a", "b"}));
  test::TempDirectory temp;
  const std::string program = temp / "sagebwd";
  test::write_text(program, "#!/bin/sh\n");
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  EXPECT_EQ(worker_command({}, program), (std::vector<std::string>{program, "tune-worker"}));
  EXPECT_THROW(worker_command({}, temp / "none"), TuneError);
  set_tune_worker({"python", "-m", "sagebwd.core.tune_worker"});
  EXPECT_EQ(worker_command({}, "").front(), "python");
  set_tune_worker({});
  // Beside this executable, or in PATH, or nowhere.
  ScopedVariable path("PATH", "/nowhere::relative:" + temp.path());
  const std::filesystem::path beside =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "sagebwd";
  EXPECT_EQ(worker_command({}, "").front(),
            std::filesystem::exists(beside) ? beside.string() : program);
}

} // namespace
