// MemoryLimits::Detect in namespaces and below partial mounts.
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

class MemoryLimitsNamespaceTest : public MachineTest {};

TEST_F(MemoryLimitsNamespaceTest, InANamespaceTheRootIsOurOwnCgroup) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/proc/self/mountinfo", kV2Mount);
  V2("/sys/fs/cgroup", 4 * kGiB, 1 * kGiB);
  const MemoryLimits limits = Detect();
  EXPECT_EQ(Names(limits), "host RAM; cgroup v2 memory.max /; ");
  EXPECT_EQ(limits.available_bytes, 3 * kGiB);
}

TEST_F(MemoryLimitsNamespaceTest, AMountOfASubPathIsOurOwnOrAnAncestor) {
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

TEST_F(MemoryLimitsNamespaceTest,
       ASubPathWithACommonPrefixInItsNameIsNoAncestor) {
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

TEST_F(MemoryLimitsNamespaceTest, TheMountThatShowsMostAncestorsIsTaken) {
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

TEST_F(MemoryLimitsNamespaceTest,
       AMountAboveTheNamespaceIsSearchedForOurProcess) {
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

TEST_F(MemoryLimitsNamespaceTest,
       AProcessMovedOutOfItsNamespaceMatchesTheSameHeight) {
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

TEST_F(MemoryLimitsNamespaceTest, MountPointsAreUnescaped) {
  Write("/proc/self/cgroup", "0::/a (deleted)\n");
  Write("/proc/self/mountinfo",
        "41 31 0:38 / /sys/my\\040cgroups rw - cgroup2 cgroup2 rw\n");
  V2("/sys/my cgroups/a", 3 * kGiB, 0);
  EXPECT_EQ(Names(Detect()), "host RAM; cgroup v2 memory.max /a; ");
}

}  // namespace
}  // namespace varlane
