// MemoryLimits::Detect with cgroup v1 and on hybrid machines.
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

class MemoryLimitsV1Test : public MachineTest {};

TEST_F(MemoryLimitsV1Test, V1TakesAncestorsAndSkipsTheSentinel) {
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

TEST_F(MemoryLimitsV1Test, V1AncestorsThatDoNotBindTheirChildrenAreSkipped) {
  Write("/proc/self/cgroup", "4:memory:/a/b\n");
  Write("/proc/self/mountinfo", kV1Mount);
  V1("/sys/fs/cgroup/memory/a", 1 * kGiB, 0);
  Write("/sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n");
  V1("/sys/fs/cgroup/memory/a/b", 8 * kGiB, 0);
  V1("/sys/fs/cgroup/memory", kV1Unlimited, 0);
  EXPECT_EQ(Names(Detect()), "host RAM; cgroup v1 memory /a/b; ");
}

TEST_F(MemoryLimitsV1Test, V1TellsALimitAboveWhatTheContainerSees) {
  Write("/proc/self/cgroup", "4:memory:/\n");
  Write("/proc/self/mountinfo", kV1Mount);
  V1("/sys/fs/cgroup/memory", kV1Unlimited, 3 * kGiB, 1 * kGiB, 8 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits),
            "host RAM; cgroup v1 memory above / (hierarchical_memory_limit); ");
  EXPECT_EQ(limits.total_bytes, 8 * kGiB);
  EXPECT_EQ(limits.available_bytes, 6 * kGiB);
}

TEST_F(MemoryLimitsV1Test, HybridFindsMemoryOnV1BesideAV2WithoutIt) {
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

TEST_F(MemoryLimitsV1Test, HybridWithMemoryOnV2IsReadThere) {
  Write("/proc/self/cgroup", "1:cpu:/\n0::/a\n");
  Write("/proc/self/mountinfo",
        "40 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  V2("/sys/fs/cgroup/unified/a", 2 * kGiB, 0);
  EXPECT_EQ(Names(Detect()), "host RAM; cgroup v2 memory.max /a; ");
}

}  // namespace
}  // namespace varlane
