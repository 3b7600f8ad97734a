// The command inside real memory cgroups: a pool planned there, a whole run,
// every output right, and nobody killed. Skipped where none can be made.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "tests/testing/files.h"
#include "tests/testing/machine_fixture.h"
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

// A neighbour in the same cgroup that wants memory of its own, but not at the
// price of a kill: it takes `mib` MiB, one by one, while there is some left.
class Ballast {
 public:
  Ballast(const RealCgroup& cgroup, int mib)
      : taken_(static_cast<std::atomic<int>*>(
            mmap(nullptr, 4096, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    child_ = fork();
    if (child_ != 0) return;
    if (!WriteFile(cgroup.path() + "/cgroup.procs", "0")) _exit(1);
    while (taken_->load() < mib) {
      const Result<MemoryLimits> limits = MemoryLimits::Detect();
      const bool room = limits.ok() && limits->available_bytes > 6 * kMiB;
      if (room && mmap(nullptr, kMiB, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1,
                       0) != MAP_FAILED) {
        ++*taken_;
      } else {
        usleep(2000);
      }
    }
    for (;;) pause();
  }
  ~Ballast() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    munmap(taken_, 4096);
  }
  int taken() const { return taken_->load(); }

 private:
  std::atomic<int>* const taken_;
  pid_t child_ = -1;
};

TEST_F(CgroupAttendTest, ThePoolMakesRoomForANeighbour) {
  constexpr int64_t kLimit = 256 * kMiB;  // its reserve: 32 MiB
  constexpr int kBallast = 44;
  const RealCgroup cgroup(kLimit);
  if (!cgroup.reason().empty()) GTEST_SKIP() << cgroup.reason();
  int64_t requests = 0;
  std::vector<std::string> command = {VARLANE_CLI_PATH,
                                      "replay",
                                      WriteTrace(6 * kLimit, &requests),
                                      "--concurrency",
                                      "4096",
                                      "--max-seqs",
                                      "4096",
                                      "--verify",
                                      "0.003",
                                      "--token-budget",
                                      "512",
                                      "--json",
                                      folder_.file("json"),
                                      "--metrics",
                                      folder_.file("metrics"),
                                      "--pressure"};
  command.insert(command.end(), kModel.begin(), kModel.end());
  const pid_t child = cgroup.StartInside(command, folder_.file("output"));
  ASSERT_GT(child, 0);
  int status = -1;
  int taken = 0;
  {
    // The first metrics are written once the pool is there.
    while (!std::filesystem::exists(folder_.file("metrics")) &&
           waitpid(child, &status, WNOHANG) == 0) {
      usleep(1000);
    }
    const Ballast ballast(cgroup, kBallast);
    if (status == -1) waitpid(child, &status, 0);
    taken = ballast.taken();
  }
  ASSERT_TRUE(WIFEXITED(status)) << "killed by signal " << WTERMSIG(status);
  ASSERT_EQ(WEXITSTATUS(status), 0) << ReadWholeFile(folder_.file("output"));
  EXPECT_EQ(cgroup.oom_kills(), 0);
  const Json json = Json::parse(ReadWholeFile(folder_.file("json")));
  EXPECT_EQ(taken, kBallast) << json["pressure"].dump();
  EXPECT_GE(json["pressure"]["released_bytes"], 8 * kMiB);
  EXPECT_EQ(json["steps"]["finished"], requests);
  EXPECT_EQ(json["verification"]["failed_rows"], 0);
  EXPECT_GT(json["verification"]["rows"], 0);
  std::printf("%d MiB taken by the neighbour; %s\n", taken,
              json["pressure"].dump().c_str());
}

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
