// MemoryLimits::Detect: machines laid out as files, and this one.
//
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/testing.h"
#include "varlane/memory_budget.h"

namespace varlane {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kGiB = 1024 * kMiB;
constexpr int64_t kV1Unlimited = 9223372036854771712;

const char kV1Mount[] =
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup "
    "rw,memory\n";
const char kV2Mount[] =
    "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";

// A machine of 64 GiB with 48 available, made of files; cgroups are added.
class MachineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern =
        (fs::temp_directory_path() / "varlane_limits_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    Write("/proc/meminfo", "MemTotal:       " + Kb(64 * kGiB) +
                               " kB\nMemFree:        1024 kB\n"
                               "MemAvailable:   " +
                               Kb(48 * kGiB) +
                               " kB\nCached:         1024 kB\n"
                               "SwapTotal:      99999999 kB\n");
    Write("/proc/self/cgroup", "");
    Write("/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n");
  }
  void TearDown() override {
    std::error_code error;
    fs::remove_all(root_, error);
  }

  static std::string Kb(int64_t bytes) { return std::to_string(bytes / 1024); }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void Remove(const std::string& path) { fs::remove(root_ + path); }

  // limit < 0 = "max".
  void V2(const std::string& dir, int64_t limit, int64_t current,
          int64_t inactive_file = 0, int64_t slab_reclaimable = 0) {
    Write(dir + "/memory.max",
          limit < 0 ? "max\n" : std::to_string(limit) + "\n");
    Write(dir + "/memory.high", "max\n");
    Write(dir + "/memory.current", std::to_string(current) + "\n");
    Write(dir + "/memory.stat",
          "anon 1\nfile 99\ninactive_anon 7\ninactive_file " +
              std::to_string(inactive_file) +
              "\nactive_file 5\nslab_reclaimable " +
              std::to_string(slab_reclaimable) + "\nslab 6\n");
  }
  void V1(const std::string& dir, int64_t limit, int64_t usage,
          int64_t total_inactive_file = 0,
          int64_t hierarchical = kV1Unlimited) {
    Write(dir + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    Write(dir + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
    Write(dir + "/memory.stat",
          "cache 1\ninactive_file 123\nhierarchical_memory_limit " +
              std::to_string(hierarchical) + "\ntotal_inactive_file " +
              std::to_string(total_inactive_file) + "\n");
  }

  MemoryLimits Detect() {
    Result<MemoryLimits> limits = MemoryLimits::Detect(root_);
    EXPECT_TRUE(testing::IsOk(limits));
    return limits.ok() ? *limits : MemoryLimits();
  }

  std::string root_;
};

std::string Names(const MemoryLimits& limits) {
  std::string names;
  for (const MemoryLimit& limit : limits.limits) names += limit.name + "; ";
  return names;
}

std::string Warnings(const MemoryLimits& limits) {
  std::string text;
  for (const std::string& warning : limits.warnings) text += warning + "\n";
  return text;
}

const MemoryLimit* Find(const MemoryLimits& limits, const std::string& name) {
  for (const MemoryLimit& limit : limits.limits) {
    if (limit.name == name) return &limit;
  }
  return nullptr;
}

std::string Binding(const MemoryLimits& limits) {
  return limits.limits.at(static_cast<size_t>(limits.binding_total)).name +
         " | " +
         limits.limits.at(static_cast<size_t>(limits.binding_available)).name;
}

class MemoryLimitsTest : public MachineTest {};

TEST_F(MemoryLimitsTest, AHostWithoutCgroupsIsBoundByItsRamAndNotBySwap) {
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; ");
  EXPECT_EQ(limits.total_bytes, 64 * kGiB);
  EXPECT_EQ(limits.available_bytes, 48 * kGiB);
  EXPECT_EQ(limits.limits[0].used_bytes, 16 * kGiB);
  EXPECT_EQ(Warnings(limits), "");
}

TEST_F(MemoryLimitsTest, WithoutHostRamThereIsNoAnswer) {
  Write("/proc/meminfo", "MemFree: 5 kB\n");
  Result<MemoryLimits> limits = MemoryLimits::Detect(root_);
  EXPECT_EQ(limits.status().code(), StatusCode::kUnavailable);
  Remove("/proc/meminfo");
  limits = MemoryLimits::Detect(root_);
  EXPECT_EQ(limits.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(limits.status().message().find("/proc/meminfo"),
            std::string_view::npos);
}

TEST_F(MemoryLimitsTest, AnOldKernelWithoutMemAvailableFallsBackToMemFree) {
  Write("/proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1024 kB\n");
  const MemoryLimits limits = Detect();
  EXPECT_EQ(limits.available_bytes, 1 * kMiB);
  EXPECT_NE(Warnings(limits).find("no MemAvailable"), std::string::npos);
}

// --- v2

TEST_F(MemoryLimitsTest, V2CountsReclaimablePageCacheOnce) {
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", 16 * kGiB, 10 * kGiB, 5 * kGiB, 1 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; cgroup v2 memory.max /a; ");
  // 10 - 5 - 1 = 4 in use; neither 10, nor 4 less the host's free cache.
  EXPECT_EQ(limits.limits[1].used_bytes, 4 * kGiB);
  EXPECT_EQ(limits.available_bytes, 12 * kGiB);
  EXPECT_EQ(limits.total_bytes, 16 * kGiB);
  EXPECT_EQ(Warnings(limits), "");
}

TEST_F(MemoryLimitsTest, V2TakesTheTightestOfAllAncestors) {
  Write("/proc/self/cgroup", "0::/pods/pod1/main\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/pods/pod1/main", 32 * kGiB, 1 * kGiB);
  V2("/sys/fs/cgroup/pods/pod1", -1, 2 * kGiB);
  V2("/sys/fs/cgroup/pods", 8 * kGiB, 3 * kGiB, 1 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits),
            "host RAM; cgroup v2 memory.max /pods/pod1/main; "
            "cgroup v2 memory.max /pods; ");
  EXPECT_EQ(limits.total_bytes, 8 * kGiB);
  EXPECT_EQ(limits.available_bytes, 6 * kGiB);
  EXPECT_EQ(Binding(limits),
            "cgroup v2 memory.max /pods | cgroup v2 memory.max /pods");
}

TEST_F(MemoryLimitsTest, TotalAndAvailableMayBindAtDifferentLevels) {
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", 20 * kGiB, 19 * kGiB);
  V2("/sys/fs/cgroup/a/b", 10 * kGiB, 2 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Binding(limits),
            "cgroup v2 memory.max /a/b | cgroup v2 memory.max /a");
  EXPECT_EQ(limits.available_bytes, 1 * kGiB);
}

TEST_F(MemoryLimitsTest, V2MaxEverywhereLeavesTheHost) {
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", -1, 1);
  V2("/sys/fs/cgroup/a/b", -1, 1);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; ");
  EXPECT_EQ(Warnings(limits), "");
}

TEST_F(MemoryLimitsTest, V2HighIsALimitAndUseBeyondItLeavesNothing) {
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", 16 * kGiB, 5 * kGiB);
  Write("/sys/fs/cgroup/a/memory.high", "4294967296\n");
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits),
            "host RAM; cgroup v2 memory.max /a; cgroup v2 memory.high /a; ");
  EXPECT_EQ(limits.total_bytes, 4 * kGiB);
  EXPECT_EQ(limits.available_bytes, 0);
}

TEST_F(MemoryLimitsTest, TheHostBindsWhereTheContainerMayUseMore) {
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", 256 * kGiB, 1 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Binding(limits), "host RAM | host RAM");
  EXPECT_EQ(limits.limits.size(), 2u);
}

// --- v1 and hybrid

TEST_F(MemoryLimitsTest, V1TakesAncestorsAndSkipsTheSentinel) {
  Write("/proc/self/cgroup",
        "9:name=systemd:/other\n4:cpu,memory:/a/b/c\n1:cpu:/x\n");
  Write("/proc/self/mountinfo", kV1Mount);
  V1("/sys/fs/cgroup/memory", kV1Unlimited, 50 * kGiB);
  V1("/sys/fs/cgroup/memory/a", 16 * kGiB, 6 * kGiB, 2 * kGiB);
  V1("/sys/fs/cgroup/memory/a/b", kV1Unlimited, 5 * kGiB);
  V1("/sys/fs/cgroup/memory/a/b/c", 24 * kGiB, 3 * kGiB, 0, 16 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits),
            "host RAM; cgroup v1 memory /a/b/c; cgroup v1 memory /a; ");
  EXPECT_EQ(limits.total_bytes, 16 * kGiB);
  EXPECT_EQ(limits.available_bytes, 12 * kGiB);  // 16 - (6 - 2)
  EXPECT_EQ(Warnings(limits), "");
}

TEST_F(MemoryLimitsTest, V1AncestorsThatDoNotBindTheirChildrenAreSkipped) {
  Write("/proc/self/cgroup", "4:memory:/a/b\n");
  Write("/proc/self/mountinfo", kV1Mount);
  V1("/sys/fs/cgroup/memory/a", 1 * kGiB, 0);
  Write("/sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n");
  V1("/sys/fs/cgroup/memory/a/b", 8 * kGiB, 0);
  V1("/sys/fs/cgroup/memory", kV1Unlimited, 0);
  EXPECT_EQ(Names(Detect()), "host RAM; cgroup v1 memory /a/b; ");
}

TEST_F(MemoryLimitsTest, V1TellsALimitAboveWhatTheContainerSees) {
  Write("/proc/self/cgroup", "4:memory:/\n");
  Write("/proc/self/mountinfo", kV1Mount);
  V1("/sys/fs/cgroup/memory", kV1Unlimited, 3 * kGiB, 1 * kGiB, 8 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits),
            "host RAM; cgroup v1 memory above / (hierarchical_memory_limit); ");
  EXPECT_EQ(limits.total_bytes, 8 * kGiB);
  EXPECT_EQ(limits.available_bytes, 6 * kGiB);
}

TEST_F(MemoryLimitsTest, HybridFindsMemoryOnV1BesideAV2WithoutIt) {
  Write("/proc/self/cgroup", "4:memory:/docker/abc\n1:cpu:/\n0::/docker/abc\n");
  Write("/proc/self/mountinfo",
        std::string(kV1Mount) +
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  V1("/sys/fs/cgroup/memory", kV1Unlimited, 9 * kGiB);
  V1("/sys/fs/cgroup/memory/docker", kV1Unlimited, 9 * kGiB);
  V1("/sys/fs/cgroup/memory/docker/abc", 2 * kGiB, 1 * kGiB, 512 * kMiB);
  Write("/sys/fs/cgroup/unified/docker/abc/cgroup.procs", "1\n");
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; cgroup v1 memory /docker/abc; ");
  EXPECT_EQ(limits.available_bytes, 1536 * kMiB);
  EXPECT_EQ(Warnings(limits), "");
}

TEST_F(MemoryLimitsTest, HybridWithMemoryOnV2IsReadThere) {
  Write("/proc/self/cgroup", "1:cpu:/\n0::/a\n");
  Write("/proc/self/mountinfo",
        "40 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  V2("/sys/fs/cgroup/unified/a", 2 * kGiB, 0);
  EXPECT_EQ(Names(Detect()), "host RAM; cgroup v2 memory.max /a; ");
}

// --- namespaces and partial mounts

TEST_F(MemoryLimitsTest, InANamespaceTheRootIsOurOwnCgroup) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup", 4 * kGiB, 1 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; cgroup v2 memory.max /; ");
  EXPECT_EQ(limits.available_bytes, 3 * kGiB);
}

TEST_F(MemoryLimitsTest, AMountOfASubPathIsOurOwnOrAnAncestor) {
  // As docker shows v1 without a cgroup namespace.
  Write("/proc/self/cgroup", "4:memory:/docker/abc/inner\n");
  Write("/proc/self/mountinfo",
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup "
        "rw,memory\n");
  V1("/sys/fs/cgroup/memory", 4 * kGiB, 1 * kGiB);
  V1("/sys/fs/cgroup/memory/inner", 8 * kGiB, 1 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits),
            "host RAM; cgroup v1 memory /docker/abc/inner; "
            "cgroup v1 memory /docker/abc; ");
  EXPECT_EQ(limits.total_bytes, 4 * kGiB);
  EXPECT_EQ(Warnings(limits), "");
}

TEST_F(MemoryLimitsTest, ASubPathWithACommonPrefixInItsNameIsNoAncestor) {
  Write("/proc/self/cgroup", "0::/docker/abcdef\n");
  Write("/proc/self/mountinfo",
        "41 31 0:38 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  V2("/sys/fs/cgroup", 4 * kGiB, 1 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; cgroup v2 memory.max /docker/abc; ");
  EXPECT_NE(Warnings(limits).find(
                "cgroup /docker/abcdef does not lie in /docker/abc"),
            std::string::npos)
      << Warnings(limits);
}

TEST_F(MemoryLimitsTest, TheMountThatShowsMostAncestorsIsTaken) {
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/proc/self/mountinfo",
        "50 31 0:38 /a/b /mnt/part rw - cgroup2 cgroup2 rw\n" +
            std::string(kV2Mount) +
            "51 31 0:38 /x /mnt/other rw - cgroup2 cgroup2 rw\n");
  V2("/mnt/part", 8 * kGiB, 0);
  V2("/mnt/other", 1 * kGiB, 0);
  V2("/sys/fs/cgroup/a", 4 * kGiB, 0);
  V2("/sys/fs/cgroup/a/b", 8 * kGiB, 0);
  EXPECT_EQ(Names(Detect()),
            "host RAM; cgroup v2 memory.max /a/b; cgroup v2 memory.max /a; ");
}

TEST_F(MemoryLimitsTest, AMountAboveTheNamespaceIsSearchedForOurProcess) {
  // unshare -C without a new mount: our cgroup is two unknown names below.
  Write("/proc/self/cgroup", "0::/job\n");
  Write("/proc/self/status", "Name:\tx\nPid:\t4242\nPPid:\t1\n");
  Write("/proc/self/mountinfo",
        "41 31 0:38 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  V2("/sys/fs/cgroup", -1, 0);
  V2("/sys/fs/cgroup/u1", 1 * kGiB, 0);
  V2("/sys/fs/cgroup/u1/s/job", 1 * kGiB, 0);
  Write("/sys/fs/cgroup/u1/s/job/cgroup.procs", "42\n424\n");
  V2("/sys/fs/cgroup/u2", 6 * kGiB, 0);
  V2("/sys/fs/cgroup/u2/s", 5 * kGiB, 0);
  V2("/sys/fs/cgroup/u2/s/job", 7 * kGiB, 0);
  Write("/sys/fs/cgroup/u2/s/job/cgroup.procs", "17\n4242\n");
  MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits),
            "host RAM; cgroup v2 memory.max /job; cgroup v2 memory.max /; "
            "cgroup v2 memory.max /..; ");
  EXPECT_EQ(limits.total_bytes, 5 * kGiB);
  EXPECT_EQ(Warnings(limits), "");

  // Not to be found: what is visible above us still binds, and we say so.
  Write("/sys/fs/cgroup/u2/s/job/cgroup.procs", "17\n");
  V2("/sys/fs/cgroup", 9 * kGiB, 0);
  limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; cgroup v2 memory.max /../..; ");
  EXPECT_NE(Warnings(limits).find("cannot be told"), std::string::npos);
}

TEST_F(MemoryLimitsTest, AProcessMovedOutOfItsNamespaceMatchesTheSameHeight) {
  Write("/proc/self/cgroup", "0::/../../x\n");
  Write("/proc/self/mountinfo",
        "41 31 0:38 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  V2("/sys/fs/cgroup/x", 3 * kGiB, 0);
  EXPECT_EQ(Names(Detect()), "host RAM; cgroup v2 memory.max /../../x; ");

  Write("/proc/self/mountinfo", kV2Mount);  // shows none of our ancestors
  V2("/sys/fs/cgroup", 1 * kGiB, 0);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; ");
  EXPECT_NE(Warnings(limits).find("lies outside"), std::string::npos);
}

TEST_F(MemoryLimitsTest, MountPointsAreUnescaped) {
  Write("/proc/self/cgroup", "0::/a (deleted)\n");
  Write("/proc/self/mountinfo",
        "41 31 0:38 / /sys/my\\040cgroups rw - cgroup2 cgroup2 rw\n");
  V2("/sys/my cgroups/a", 3 * kGiB, 0);
  EXPECT_EQ(Names(Detect()), "host RAM; cgroup v2 memory.max /a; ");
}

// --- what is missing

TEST_F(MemoryLimitsTest, MissingProcFilesAreWarnedOf) {
  Remove("/proc/self/mountinfo");
  MemoryLimits limits = Detect();
  EXPECT_EQ(limits.total_bytes, 64 * kGiB);
  EXPECT_NE(Warnings(limits).find("/proc/self/mountinfo"), std::string::npos);
  Remove("/proc/self/cgroup");
  EXPECT_NE(Warnings(Detect()).find("/proc/self/cgroup"), std::string::npos);
}

TEST_F(MemoryLimitsTest, AHierarchyThatIsMountedNowhereIsWarnedOf) {
  Write("/proc/self/cgroup", "4:memory:/a\n");
  EXPECT_NE(Warnings(Detect()).find("cgroup v1: /a is mounted nowhere"),
            std::string::npos);
}

TEST_F(MemoryLimitsTest, LevelsThatAreNotThereAreWarnedOfAndOthersStillBind) {
  Write("/proc/self/cgroup", "0::/docker/abc\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup", 4 * kGiB, 0);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; cgroup v2 memory.max /; ");
  EXPECT_NE(Warnings(limits).find("2 of 3 levels of /docker/abc"),
            std::string::npos)
      << Warnings(limits);
}

TEST_F(MemoryLimitsTest, WithoutMemoryStatPageCacheCountsAsUsed) {
  Write("/proc/self/cgroup", "0::/a\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup/a", 16 * kGiB, 10 * kGiB, 5 * kGiB);
  Remove("/sys/fs/cgroup/a/memory.stat");
  MemoryLimits limits = Detect();
  EXPECT_EQ(limits.available_bytes, 6 * kGiB);
  EXPECT_NE(Warnings(limits).find("memory.stat"), std::string::npos);
  Remove("/sys/fs/cgroup/a/memory.current");
  limits = Detect();
  EXPECT_EQ(limits.available_bytes, 16 * kGiB);
  EXPECT_NE(Warnings(limits).find("memory.current"), std::string::npos);
}

TEST_F(MemoryLimitsTest, GarbageInALimitIsWarnedOf) {
  Write("/proc/self/cgroup", "4:memory:/a\nnonsense\n0:/\n");
  Write("/proc/self/mountinfo", "x\n- - -\n" + std::string(kV1Mount));
  V1("/sys/fs/cgroup/memory", kV1Unlimited, 0);
  V1("/sys/fs/cgroup/memory/a", 1, 0);
  for (const char* garbage : {"", "-5\n", "12x\n", "lots\n"}) {
    Write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", garbage);
    const MemoryLimits limits = Detect();
    EXPECT_EQ(Names(limits), "host RAM; ") << garbage;
    EXPECT_NE(Warnings(limits).find("memory.limit_in_bytes: no number"),
              std::string::npos);
  }
  Remove("/sys/fs/cgroup/memory/a/memory.limit_in_bytes");
  EXPECT_NE(Warnings(Detect()).find("memory.limit_in_bytes"),
            std::string::npos);
  // Beyond int64 is as good as unlimited.
  Write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
        "18446744073709551615\n");
  EXPECT_EQ(Names(Detect()), "host RAM; ");
}

// --- this machine

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
  const std::string root = (fs::temp_directory_path() /
                            ("varlane_rlimit_" + std::to_string(getpid())))
                               .string();
  fs::create_directories(root + "/proc");
  std::ofstream(root + "/proc/meminfo")
      << "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n";
  const ScopedRlimit lowered(RLIMIT_DATA, StatusBytes("VmData:") + 512 * kMiB);
  const Result<MemoryLimits> limits = MemoryLimits::Detect(root);
  fs::remove_all(root);
  VARLANE_ASSERT_OK(limits);
  EXPECT_EQ(Names(*limits), "host RAM; ");
}

// --- a real cgroup v1

// Our memory cgroup's directory where v1 is mounted in the usual place.
std::string OwnV1Directory() {
  std::ifstream cgroups("/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    const size_t at = line.find(":memory:");
    if (at != std::string::npos) {
      return "/sys/fs/cgroup/memory" + line.substr(at + 8);
    }
  }
  return "";
}

bool WriteFile(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool ok =
      write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  return ok;
}

// A cgroup below our own, so that whatever bounds us goes on to do so.
class RealCgroup {
 public:
  explicit RealCgroup(int64_t limit_bytes) {
    const std::string own = OwnV1Directory();
    if (own.empty()) {
      reason_ = "no v1 memory cgroup";
      return;
    }
    path_ = own + "/varlane_test_" + std::to_string(getpid());
    if (mkdir(path_.c_str(), 0755) != 0) {
      reason_ = "cannot create " + path_ + ": " + std::strerror(errno);
      path_.clear();
    } else if (!WriteFile(path_ + "/memory.limit_in_bytes",
                          std::to_string(limit_bytes))) {
      reason_ = "cannot set a limit in " + path_;
    }
  }
  ~RealCgroup() {
    // A process that has just ended may still be on its way out of it.
    for (int i = 0; !path_.empty() && i < 1000; ++i) {
      if (rmdir(path_.c_str()) == 0 || errno != EBUSY) break;
      usleep(1000);
    }
  }
  const std::string& path() const { return path_; }
  const std::string& reason() const { return reason_; }

 private:
  std::string path_;
  std::string reason_;
};

// Runs in the child: joins, detects, and reports as text. No gtest here.
std::string DetectInside(const std::string& cgroup) {
  if (!WriteFile(cgroup + "/cgroup.procs", std::to_string(getpid()))) {
    return "cannot join";
  }
  const Result<MemoryLimits> limits = MemoryLimits::Detect();
  if (!limits.ok()) return limits.status().ToString();
  std::ostringstream out;
  out << limits->total_bytes << ' ' << limits->available_bytes << ' '
      << limits->limits[static_cast<size_t>(limits->binding_total)].name;
  return out.str();
}

TEST(ThisMachineTest, ARealCgroupBindsTheProcessInIt) {
  constexpr int64_t kLimit = 64 * kMiB;
  std::string cgroup_path;
  {
    const RealCgroup cgroup(kLimit);
    if (!cgroup.reason().empty()) GTEST_SKIP() << cgroup.reason();
    cgroup_path = cgroup.path();
    int pipe_fds[2];
    ASSERT_EQ(pipe(pipe_fds), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const std::string report = DetectInside(cgroup_path);
      const ssize_t written = write(pipe_fds[1], report.data(), report.size());
      _exit(written == static_cast<ssize_t>(report.size()) ? 0 : 1);
    }
    close(pipe_fds[1]);
    std::string report;
    std::array<char, 512> buffer;
    for (ssize_t got;
         (got = read(pipe_fds[0], buffer.data(), buffer.size())) > 0;) {
      report.append(buffer.data(), static_cast<size_t>(got));
    }
    close(pipe_fds[0]);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << report;

    std::istringstream words(report);
    int64_t total = 0;
    int64_t available = 0;
    ASSERT_TRUE(words >> total >> available) << report;
    EXPECT_EQ(total, kLimit);
    EXPECT_GT(available, 0) << report;
    EXPECT_LE(available, kLimit);
    const std::string leaf = fs::path(cgroup_path).filename().string();
    EXPECT_NE(report.find("cgroup v1 memory /"), std::string::npos) << report;
    EXPECT_NE(report.find(leaf), std::string::npos) << report;
  }
  EXPECT_FALSE(fs::exists(cgroup_path)) << "not cleaned up";
}

}  // namespace
}  // namespace varlane
