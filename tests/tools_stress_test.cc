// varlane stress: that it presses, swaps and verifies; that it would notice
// other bits, a death and a hang.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/cli.h"
#include "tests/testing/sanitizers.h"
#include "tools/child_cgroup.h"
#include "tools/output_digests.h"
#include "tools/report.h"
#include "tools/shared_page.h"
#include "tools/supervise.h"

namespace varlane::tools {
namespace {

using testing::CliTest;
using testing::Outcome;

// --- the command -------------------------------------------------------------

class StressTest : public CliTest {
 protected:
  std::string Command(const std::string& arguments) const {
    return "stress --threads 2 --swap-folder " + Path("") + " " + arguments;
  }
  Json Stress(const std::string& arguments) const {
    return Json::parse(JsonOf(Command(arguments)), nullptr, false);
  }
};

TEST_F(StressTest, EveryOutputHasTheBitsOfACalmRun) {
  const Json json = Stress(
      "--mode schedule --seconds 0 --requests 12 --period 4 --kv-blocks 300 "
      "--swap 0 --min-shrinks 2");
  EXPECT_EQ(json["rounds"], 1);
  EXPECT_EQ(json["requests"], 12);
  EXPECT_GE(json["shrinks"]["count"], 2);
  EXPECT_GT(json["shrinks"]["slabs"], 0);
  EXPECT_GT(json["growths"]["blocks"], 0);
  EXPECT_GT(json["verification"]["rows"], 1000);
  EXPECT_EQ(json["verification"]["wrong_rows"], 0);
  EXPECT_EQ(json["pool"]["final_blocks"], 300);
  EXPECT_TRUE(json["failures"].empty());
}

TEST_F(StressTest, PreemptedRequestsGoThroughTheSwapFile) {
  const Json json = Stress(
      "--mode schedule --seconds 0 --requests 16 --period 4 --kv-blocks 140 "
      "--swap 64MiB --eviction swap --min-shrinks 0");
  EXPECT_GT(json["preemptions"], 0);
  EXPECT_GT(json["swaps"]["in"], 0);
  EXPECT_EQ(json["swaps"]["lost"], 0);
  EXPECT_EQ(json["verification"]["wrong_rows"], 0);
}

// 20 seconds at most; a few where the ballast has it soon.
void ExpectShrunkUnderPressure(const Json& json) {
  EXPECT_GE(json["shrinks"]["count"], 1);
  EXPECT_GT(json["shrinks"]["slabs"], 0);
  EXPECT_GT(json["growths"]["slabs"], 0);
  EXPECT_GE(json["limit"]["ballast"]["waves"], 1);
  EXPECT_EQ(json["pool"]["final_blocks"], json["pool"]["blocks"]);
  EXPECT_EQ(json["verification"]["wrong_rows"], 0);
  EXPECT_TRUE(json["failures"].empty());
}

TEST_F(StressTest, APoolGivesWayToABallastInItsCgroup) {
  {
    const auto cgroup = ChildCgroup::Create(int64_t{1} << 30);
    if (!cgroup.ok()) GTEST_SKIP() << cgroup.status().message();
  }
  const Json json = Stress(
      "--mode cgroup --limit 384MiB --requests 24 --seconds 5 "
      "--rest-seconds 0.5 --swap 32MiB");
  EXPECT_EQ(json["limit"]["oom_kills"], 0);
  ExpectShrunkUnderPressure(json);
}

TEST_F(StressTest, APoolGivesWayUnderRlimitData) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's shadow counts as data";
  }
  ExpectShrunkUnderPressure(
      Stress("--mode rlimit --limit 384MiB --requests 24 --seconds 5 "
             "--rest-seconds 0.5 --swap 0"));
}

TEST_F(StressTest, TooFewShrinksAreAFailure) {
  const Outcome outcome = Varlane(Command(
      "--seconds 0 --mode schedule --requests 4 --swap 0 --period 1000000"));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("the pool shrank 0 times, expected 1"),
            std::string::npos)
      << outcome.err;
}

// Of a pool on two nodes every slab is given back, and comes again, on both.
TEST_F(StressTest, ShardedHeadsGoAndComeTogether) {
  FindTwoNodes();
  const Json json = Stress(
      "--mode schedule --seconds 0 --requests 16 --period 4 --kv-blocks 140 "
      "--swap 64MiB --eviction swap --min-shrinks 1 --shard-heads");
  EXPECT_EQ(json["pool"]["head_shards"], 2);
  EXPECT_GT(json["preemptions"], 0);
  EXPECT_GT(json["swaps"]["in"], 0);
  EXPECT_GT(json["moved_blocks"], 0);
  EXPECT_GT(json["verification"]["rows"], 1000);
  EXPECT_EQ(json["verification"]["wrong_rows"], 0);
  EXPECT_EQ(json["pool"]["final_blocks"], 140);
  EXPECT_TRUE(json["failures"].empty());
  ExpectRefusal("stress --seconds 0 --kv-heads 3 --q-heads 3 --shard-heads", 1,
                "a multiple of the runtime's 2 NUMA nodes");
}

// --- digests -----------------------------------------------------------------

// A step of one request at position `begin`, with one row of two floats each.
Step StepOf(RequestId id, int64_t begin, int64_t count, bool samples = false) {
  Step step;
  step.entries.push_back(
      {.request = id, .begin = begin, .count = count, .samples = samples});
  step.cu_seqlens_q = {0, static_cast<int32_t>(count)};
  step.slot_mapping.resize(static_cast<size_t>(count));
  return step;
}

void Feed(OutputDigests* digests, const Step& step, std::vector<float> out,
          float lse = 1) {
  const std::vector<float> lses(static_cast<size_t>(step.total_q()), lse);
  digests->AddLayer(step, 0, out.data(), 2, lses.data(), 1);
  digests->EndStep(step);
}

OutputDigests ThreeRows() {
  OutputDigests digests(1);
  Feed(&digests, StepOf(7, 0, 2), {1, 2, 3, 4});
  Feed(&digests, StepOf(7, 2, 1, true), {5, 6});
  return digests;
}

TEST(OutputDigestsTest, OtherChunksAndRepetitionsAreTheSameRows) {
  OutputDigests b(1);
  Feed(&b, StepOf(7, 0, 1), {1, 2});
  Feed(&b, StepOf(7, 1, 2, true), {3, 4, 5, 6});
  Feed(&b, StepOf(7, 1, 1), {3, 4});
  EXPECT_EQ(OutputDigests::Compare(ThreeRows(), b, false).wrong, 0);
  EXPECT_EQ(b.unstable(), 0);
  EXPECT_EQ(b.rows(), 4);
}

TEST(OutputDigestsTest, AnyOtherBitIsFound) {
  OutputDigests sign(1);
  Feed(&sign, StepOf(7, 0, 3, true), {1, 2, 3, -4, 5, 6});
  const DigestDifferences found =
      OutputDigests::Compare(ThreeRows(), sign, true);
  EXPECT_EQ(found.wrong, 1);
  EXPECT_EQ(found.first, "request 7, position 1, layer 0");
  OutputDigests lse(1);
  Feed(&lse, StepOf(7, 0, 3, true), {1, 2, 3, 4, 5, 6}, 1.0000001f);
  EXPECT_EQ(OutputDigests::Compare(ThreeRows(), lse, true).wrong, 3);
  OutputDigests repeated = ThreeRows();
  Feed(&repeated, StepOf(7, 1, 1), {3, 4.0000005f});
  EXPECT_EQ(repeated.unstable(), 1);
}

TEST(OutputDigestsTest, EveryLayerCounts) {
  const auto run = [](float second) {
    OutputDigests digests(2);
    const Step step = StepOf(3, 0, 1, true);
    const std::vector<float> lse = {0};
    for (const int layer : {0, 1}) {
      const std::vector<float> out = {1, layer == 0 ? 2 : second};
      digests.AddLayer(step, layer, out.data(), 2, lse.data(), 1);
    }
    digests.EndStep(step);
    return digests;
  };
  EXPECT_EQ(OutputDigests::Compare(run(2), run(2), false).wrong, 0);
  EXPECT_EQ(OutputDigests::Compare(run(2), run(4), false).first,
            "request 3, position 0, layer 1");
}

TEST(OutputDigestsTest, RowsOfOneRunOnlyAreFound) {
  OutputDigests b(1);
  Feed(&b, StepOf(7, 0, 2), {1, 2, 3, 4});
  Feed(&b, StepOf(8, 0, 1), {1, 2});
  EXPECT_EQ(OutputDigests::Compare(ThreeRows(), b, true).wrong, 2);
  EXPECT_EQ(OutputDigests::Compare(b, ThreeRows(), true).wrong, 1)
      << "position 2 of request 7 is new; request 8 sampled nothing";
}

TEST(OutputDigestsTest, KnownPrefixesMayBeSkippedButNoSampledRow) {
  OutputDigests b(1);
  Feed(&b, StepOf(7, 2, 1, true), {5, 6});
  EXPECT_EQ(OutputDigests::Compare(ThreeRows(), b, false).wrong, 2);
  const DigestDifferences found = OutputDigests::Compare(ThreeRows(), b, true);
  EXPECT_EQ(found.wrong, 0);
  EXPECT_EQ(found.skipped, 2);
  OutputDigests short_run(1);
  Feed(&short_run, StepOf(7, 0, 2), {1, 2, 3, 4});
  EXPECT_EQ(OutputDigests::Compare(ThreeRows(), short_run, true).wrong, 1);
}

// --- the supervisor ----------------------------------------------------------

Status Supervised(const std::function<Status(StressShared*)>& work,
                  double hang_seconds = 60) {
  const SharedPage<StressShared> shared;
  SuperviseOptions options;
  options.hang_seconds = hang_seconds;
  return Supervise(options, shared.get(), [&] { return work(shared.get()); });
}

TEST(SuperviseTest, TellsWhatTheWorkSays) {
  EXPECT_TRUE(Supervised([](StressShared*) { return Status(); }).ok());
  const Status status = Supervised([](StressShared*) {
    return Status(StatusCode::kOutOfRange, std::string("far out"));
  });
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), "far out");
}

TEST(SuperviseTest, DeathIsAResult) {
  const Status status = Supervised([](StressShared* shared) {
    shared->heartbeats = 17;
    kill(getpid(), SIGKILL);
    return Status();
  });
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("was killed by signal 9"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("after 17 steps"), std::string::npos);
  EXPECT_FALSE(Supervised([](StressShared*) -> Status { _exit(3); }).ok());
}

TEST(SuperviseTest, SilenceIsAHangAndLeavesNoChild) {
  const SharedPage<std::atomic<pid_t>> worker;
  const Status status = Supervised(
      [&](StressShared*) -> Status {
        *worker.get() = getpid();
        for (;;) pause();
      },
      0.5);
  EXPECT_NE(status.message().find("hangs"), std::string::npos)
      << status.message();
  EXPECT_NE(kill(*worker.get(), 0), 0) << "it is still there";
}

TEST(ChildCgroupTest, HoldsWhoJoinsAndIsGoneAfterwards) {
  Result<std::unique_ptr<ChildCgroup>> made =
      ChildCgroup::Create(int64_t{64} << 20);
  if (!made.ok()) GTEST_SKIP() << made.status().message();
  const std::unique_ptr<ChildCgroup> cgroup = std::move(made).value();
  const std::string path = cgroup->path();
  const SharedPage<StressShared> shared;
  SuperviseOptions options;
  options.cgroup = cgroup.get();
  // More than the limit: whoever does this is killed, and that is told.
  const Status status = Supervise(options, shared.get(), []() -> Status {
    std::vector<char> memory(size_t{256} << 20, 1);
    return {StatusCode::kInternal, std::to_string(memory[memory.size() / 2])};
  });
  EXPECT_NE(status.message().find("oom_kill = 1"), std::string::npos)
      << status.message();
  EXPECT_EQ(cgroup->oom_kills(), 1);
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  EXPECT_TRUE(cgroup->Remove().ok());
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

TEST(SuperviseTest, ASignalEndsAllOfIt) {
  const SharedPage<std::atomic<pid_t>> worker;
  const Status status = Supervised([&](StressShared*) -> Status {
    *worker.get() = getpid();
    kill(getppid(), SIGTERM);
    for (;;) pause();
  });
  EXPECT_EQ(status.code(), StatusCode::kCancelled) << status.message();
  EXPECT_NE(kill(*worker.get(), 0), 0) << "it is still there";
}

}  // namespace
}  // namespace varlane::tools
