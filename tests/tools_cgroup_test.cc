// The command inside real memory cgroups: a pool planned there, a whole run,
// every output right, and nobody killed. Skipped where none can be made.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "tests/testing/machine_fixture.h"
#include "tests/testing/pools.h"
#include "tests/testing/real_cgroup.h"
#include "tests/testing/testing.h"

namespace varlane::tools {
namespace {

using namespace varlane::testing;  // NOLINT(*using-namespace*)
using Json = nlohmann::json;

// 32 KiB of K/V a token; a request of 112 tokens is 3.5 MiB.
const std::vector<std::string> kModel = {"--layers",    "8",  "--kv-heads", "8",
                                         "--head-size", "128"};
constexpr int64_t kRequestBytes = 112 * 32 * kKiB;

struct Limit {
  int64_t mib = 0;
  const char* verify;  // share of the rows
};
void PrintTo(const Limit& limit, std::ostream* out) { *out << limit.mib; }

class CgroupTest : public ::testing::TestWithParam<Limit> {
 protected:
  // Enough requests at once to fill the cgroup one and a half times.
  std::string WriteTrace(int64_t limit_bytes, int64_t* requests) const {
    *requests = limit_bytes * 3 / 2 / kRequestBytes;
    std::string text = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    for (int64_t i = 0; i < *requests; ++i) {
      text += "2023-11-16 18:15:46.6805900,96,16\n";
    }
    WriteWholeFile(folder_.file("trace.csv"), text);
    return folder_.file("trace.csv");
  }
  // Ends as a process does that was not killed.
  void Run(const RealCgroup& cgroup, std::vector<std::string> command,
           int exit_code) const {
    command.insert(command.begin(), VARLANE_CLI_PATH);
    const int status = cgroup.RunInside(command, folder_.file("output"));
    EXPECT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), exit_code)
        << ReadWholeFile(folder_.file("output"));
    EXPECT_EQ(cgroup.oom_kills(), 0);
  }
  static int64_t AvailableBytes() {
    const Result<MemoryLimits> limits = MemoryLimits::Detect();
    return limits.ok() ? limits->available_bytes : 0;
  }

  TemporaryFolder folder_;
};

TEST_P(CgroupTest, ReplayPlansItsPoolAndEndsWell) {
  const int64_t limit = GetParam().mib * kMiB;
  if (AvailableBytes() < limit + kGiB / 2) {
    GTEST_SKIP() << "this machine has too little memory free";
  }
  const RealCgroup cgroup(limit);
  if (!cgroup.reason().empty()) GTEST_SKIP() << cgroup.reason();
  int64_t requests = 0;
  std::vector<std::string> command = {
      "replay",         WriteTrace(limit, &requests),
      "--concurrency",  "4096",
      "--max-seqs",     "4096",
      "--token-budget", "512",
      "--verify",       GetParam().verify,
      "--json",         folder_.file("json"),
      "--metrics",      folder_.file("metrics"),
      "--pressure"};
  command.insert(command.end(), kModel.begin(), kModel.end());
  Run(cgroup, command, 0);
  if (HasFailure()) return;
  const Json json = Json::parse(ReadWholeFile(folder_.file("json")));
  const std::string reason = json["pool"]["reason"];
  EXPECT_NE(reason.find("bound by cgroup v"), std::string::npos) << reason;
  const int64_t committed = json["pool"]["committed_bytes"];
  // The process itself and its buffers take some 30 MiB of the smallest one.
  EXPECT_GT(committed, std::max(limit / 8, limit - 160 * kMiB - limit / 5));
  EXPECT_LT(committed, limit);
  EXPECT_EQ(json["steps"]["finished"], requests);
  EXPECT_EQ(json["verification"]["failed_rows"], 0);
  EXPECT_GT(json["verification"]["rows"], 0);
  const std::string metrics = ReadWholeFile(folder_.file("metrics"));
  EXPECT_NE(metrics.find("varlane_requests_total{outcome=\"finished\"} " +
                         std::to_string(requests) + "\n"),
            std::string::npos);
  std::printf(
      "%d MiB: pool of %d MiB, %d requests, %s rows right; the cgroup "
      "was full %d times, %d kills\n",
      int(limit / kMiB), int(committed / kMiB), int(requests),
      json["verification"]["rows"].dump().c_str(), int(cgroup.times_full()),
      int(cgroup.oom_kills()));
}

INSTANTIATE_TEST_SUITE_P(Limits, CgroupTest,
                         ::testing::Values(Limit{64, "0.05"},
                                           Limit{128, "0.03"},
                                           Limit{512, "0.01"},
                                           Limit{2048, "0.003"}),
                         ::testing::PrintToStringParamName());

class CgroupAttendTest : public CgroupTest {};

TEST_F(CgroupAttendTest, AttendRunsOrRefusesAndIsNotKilled) {
  const RealCgroup cgroup(128 * kMiB);
  if (!cgroup.reason().empty()) GTEST_SKIP() << cgroup.reason();
  const auto attend = [&](const char* batch) {
    return std::vector<std::string>{
        "attend", "--random",    batch, "--q-heads", "8",  "--kv-heads",
        "8",      "--head-size", "128", "--verify",  "0.2"};
  };
  Run(cgroup, attend("4x1@1000"), 0);
  // 64 Ki tokens of 4 KiB are more than there is.
  Run(cgroup, attend("4x1@16384"), 1);
  const std::string output = ReadWholeFile(folder_.file("output"));
  EXPECT_NE(output.find("cgroup v"), std::string::npos) << output;
}

}  // namespace
}  // namespace varlane::tools
