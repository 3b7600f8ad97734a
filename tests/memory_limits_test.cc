// MemoryLimits::Detect on machines laid out as files: host, rlimits, nodes, v2.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <string>

#include "tests/testing/machine_fixture.h"
#include "tests/testing/testing.h"
#include "varlane/memory_budget.h"

namespace varlane {
namespace {

using namespace testing;  // NOLINT(*using-namespace*)

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

// --- rlimits and nodes

TEST_F(MemoryLimitsTest, RlimitsAreReadWithWhatTheProcessHas) {
  Write("/proc/self/limits",
        "Limit                     Soft Limit           Hard Limit  Units\n"
        "Max data size             1073741824           unlimited   bytes\n"
        "Max stack size            8388608              unlimited   bytes\n"
        "Max address space         unlimited            unlimited   bytes\n");
  Write("/proc/self/status", "VmSize:  4096 kB\nVmData:  262144 kB\n");
  MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; RLIMIT_DATA; ");
  EXPECT_EQ(limits.limits[1].used_bytes, 256 * kMiB);
  EXPECT_EQ(limits.available_bytes, 768 * kMiB);
  EXPECT_EQ(limits.room_bytes, 704 * kMiB);
  Write("/proc/self/limits", "Max address space  8589934592  9 bytes\n");
  limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; RLIMIT_AS; ");
  EXPECT_EQ(limits.available_bytes, 8 * kGiB - 4 * kMiB);
}

TEST_F(MemoryLimitsTest, NodesTellWhatTheyHaveFreeOrCanDrop) {
  WriteNodes();
  const MemoryLimits limits = Detect();
  ASSERT_EQ(limits.nodes.size(), 2u);
  EXPECT_EQ(limits.nodes[0].total_bytes, 32 * kGiB);
  EXPECT_EQ(limits.nodes[0].free_bytes, 1 * kGiB);
  EXPECT_EQ(limits.nodes[0].available_bytes, 11 * kGiB);
  EXPECT_EQ(limits.nodes[1].os_index, 2);
  EXPECT_EQ(limits.nodes[1].available_bytes, 20 * kGiB);
  EXPECT_EQ(Names(limits), "host RAM; ") << "all nodes are ours";
  EXPECT_EQ(Warnings(limits), "");
}

TEST_F(MemoryLimitsTest, ACpusetThatLeavesNodesOutIsALimit) {
  WriteNodes();
  Write("/proc/self/status", "Mems_allowed:\t1\nMems_allowed_list:\t0-1\n");
  const MemoryLimits limits = Detect();
  EXPECT_TRUE(limits.nodes[0].allowed);
  EXPECT_FALSE(limits.nodes[1].allowed);
  EXPECT_EQ(Names(limits), "host RAM; NUMA nodes 0 (Mems_allowed_list); ");
  EXPECT_EQ(Binding(limits),
            "NUMA nodes 0 (Mems_allowed_list) | "
            "NUMA nodes 0 (Mems_allowed_list)");
  EXPECT_EQ(limits.available_bytes, 11 * kGiB);
}

TEST_F(MemoryLimitsTest, AUsersCapBindsLikeAnyOther) {
  MemoryLimits limits = Detect();
  limits.Add({"user cap", 4 * kGiB, 1 * kGiB, 3 * kGiB, 0});
  EXPECT_EQ(Binding(limits), "user cap | user cap");
  EXPECT_EQ(limits.total_bytes, 4 * kGiB);
  EXPECT_EQ(limits.room_bytes, 3 * kGiB);
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

}  // namespace
}  // namespace varlane
