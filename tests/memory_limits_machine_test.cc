// MemoryLimits::Detect on this machine: its rlimits, and a real cgroup v1.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "tests/testing/files.h"
#include "tests/testing/machine_fixture.h"
#include "tests/testing/real_cgroup.h"
#include "tests/testing/testing.h"
#include "varlane/memory_budget.h"

namespace varlane {
namespace {

using namespace testing;  // NOLINT(*using-namespace*)

TEST(ThisMachineTest, LimitsAreSane) {
  const Result<MemoryLimits> limits = MemoryLimits::Detect();
  VARLANE_ASSERT_OK(limits);
  ASSERT_FALSE(limits->limits.empty());
  EXPECT_EQ(limits->limits[0].name, "host RAM");
  const int64_t physical =
      int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  EXPECT_NEAR(static_cast<double>(limits->limits[0].limit_bytes),
              static_cast<double>(physical), 1e-3 * double(physical));
  EXPECT_GT(limits->available_bytes, 0);
  EXPECT_LE(limits->total_bytes, limits->limits[0].limit_bytes);
  for (const MemoryLimit& limit : limits->limits) {
    EXPECT_LE(limits->total_bytes, limit.limit_bytes) << limit.name;
    EXPECT_LE(limits->available_bytes, limit.available_bytes) << limit.name;
    EXPECT_LT(limit.limit_bytes, kV1Unlimited) << limit.name;
  }
}

// Lowers a soft limit for a scope.
class ScopedRlimit {
 public:
  ScopedRlimit(__rlimit_resource resource, int64_t bytes)
      : resource_(resource) {
    getrlimit(resource_, &before_);
    struct rlimit lowered = before_;
    lowered.rlim_cur = static_cast<rlim_t>(bytes);
    ok_ = setrlimit(resource_, &lowered) == 0;
  }
  ~ScopedRlimit() { setrlimit(resource_, &before_); }
  bool ok() const { return ok_; }

 private:
  const __rlimit_resource resource_;
  struct rlimit before_ {};
  bool ok_ = false;
};

// A size of /proc/self/status; sanitizers reserve TiB, so it is not guessed.
int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) {
      return std::stoll(line.substr(field.size())) * 1024;
    }
  }
  return -1;
}

TEST(ThisMachineTest, RlimitsCountWhatTheProcessHasAlready) {
  struct Case {
    __rlimit_resource resource;
    const char* name;
    const char* field;
  };
  for (const Case& c : {Case{RLIMIT_AS, "RLIMIT_AS", "VmSize:"},
                        Case{RLIMIT_DATA, "RLIMIT_DATA", "VmData:"}}) {
    Result<MemoryLimits> limits = MemoryLimits::Detect();
    VARLANE_ASSERT_OK(limits);
    if (Find(*limits, c.name) != nullptr) continue;  // set outside: be content
    // Address space that is no data keeps the two apart.
    constexpr size_t kReserved = 256 * size_t{kMiB};
    void* const reserved =
        mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(reserved, MAP_FAILED);
    const int64_t in_use = StatusBytes(c.field);
    ASSERT_GT(in_use, 0);
    constexpr int64_t kRoom = 200 * kMiB;
    {
      const ScopedRlimit lowered(c.resource, in_use + kRoom);
      ASSERT_TRUE(lowered.ok()) << std::strerror(errno);
      limits = MemoryLimits::Detect();
    }
    munmap(reserved, kReserved);
    VARLANE_ASSERT_OK(limits);
    const MemoryLimit* limit = Find(*limits, c.name);
    ASSERT_NE(limit, nullptr) << c.name;
    EXPECT_EQ(limit->limit_bytes, in_use + kRoom);
    EXPECT_NEAR(static_cast<double>(limit->available_bytes), double{kRoom},
                double{16 * kMiB});
    EXPECT_LE(limits->available_bytes, limit->available_bytes);
    EXPECT_EQ(Find(*MemoryLimits::Detect(), c.name), nullptr);
  }
}

TEST(ThisMachineTest, AFixtureIsNotBoundByThisProcessesRlimits) {
  const testing::TemporaryFolder root;
  testing::WriteWholeFile(root.file("proc/meminfo"),
                          "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n");
  const ScopedRlimit lowered(RLIMIT_DATA, StatusBytes("VmData:") + 512 * kMiB);
  const Result<MemoryLimits> limits = MemoryLimits::Detect(root.path());
  VARLANE_ASSERT_OK(limits);
  EXPECT_EQ(Names(*limits), "host RAM; ");
}

// --- a real cgroup

TEST(ThisMachineTest, DISABLED_InsideACgroup) {
  const char* const directory = RealCgroup::Inside();
  if (directory == nullptr) GTEST_SKIP() << "run by the test below";
  const Result<MemoryLimits> limits = MemoryLimits::Detect();
  VARLANE_ASSERT_OK(limits);
  EXPECT_EQ(limits->total_bytes, 64 * kMiB);
  EXPECT_GT(limits->available_bytes, 0);
  EXPECT_LE(limits->available_bytes, 64 * kMiB);
  EXPECT_EQ(limits->room_bytes, limits->available_bytes - 8 * kMiB);
  const std::string leaf = std::filesystem::path(directory).filename().string();
  const std::string name = Binding(*limits);
  EXPECT_NE(name.find("cgroup v"), std::string::npos) << name;
  EXPECT_NE(name.find(leaf), std::string::npos) << name;
}

TEST(ThisMachineTest, ARealCgroupBindsTheProcessInIt) {
  std::string path;
  {
    const RealCgroup cgroup(64 * kMiB);
    if (!cgroup.reason().empty()) GTEST_SKIP() << cgroup.reason();
    path = cgroup.path();
    EXPECT_EQ(cgroup.RunInside("*DISABLED_InsideACgroup"), 0);
    EXPECT_EQ(cgroup.oom_kills(), 0);
  }
  EXPECT_FALSE(std::filesystem::exists(path)) << "not cleaned up";
}

}  // namespace
}  // namespace varlane
