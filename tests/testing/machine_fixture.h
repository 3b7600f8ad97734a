// A machine laid out as files, for what reads /proc and /sys under a root.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_MACHINE_FIXTURE_H_
#define VARLANE_TESTS_TESTING_MACHINE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "tests/testing/files.h"
#include "tests/testing/testing.h"
#include "varlane/memory_budget.h"

namespace varlane::testing {

inline constexpr int64_t kKiB = 1024;
inline constexpr int64_t kMiB = 1024 * kKiB;
inline constexpr int64_t kGiB = 1024 * kMiB;
inline constexpr int64_t kV1Unlimited = 9223372036854771712;

inline constexpr char kV1Mount[] =
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup "
    "rw,memory\n";
inline constexpr char kV2Mount[] =
    "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";

// A machine of 64 GiB with 48 available, made of files; cgroups are added.
class MachineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Write("/proc/meminfo", "MemTotal:       " + Kb(64 * kGiB) +
                               " kB\nMemFree:        1024 kB\n"
                               "MemAvailable:   " +
                               Kb(48 * kGiB) +
                               " kB\nCached:         1024 kB\n"
                               "SwapTotal:      99999999 kB\n");
    Write("/proc/self/cgroup", "");
    Write("/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n");
  }

  static std::string Kb(int64_t bytes) { return std::to_string(bytes / 1024); }

  void Write(const std::string& path, const std::string& text) {
    WriteWholeFile(root_ + path, text);
  }
  void Remove(const std::string& path) {
    std::filesystem::remove(root_ + path);
  }

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

  // Nodes 0 and 2 of 32 GiB, node 1 without memory.
  void WriteNodes() {
    Write("/proc/self/status", "Mems_allowed_list:\t0-2\n");
    const std::string nodes = "/sys/devices/system/node";
    Write(nodes + "/online", "0-2\n");
    const auto node = [&](int index, int64_t total, int64_t free,
                          int64_t inactive_file, int64_t slab) {
      const std::string name = "Node " + std::to_string(index) + " ";
      Write(nodes + "/node" + std::to_string(index) + "/meminfo",
            name + "MemTotal:  " + Kb(total) + " kB\n" + name + "MemFree:  " +
                Kb(free) + " kB\n" + name + "Inactive(anon):  77 kB\n" + name +
                "Inactive(file):  " + Kb(inactive_file) + " kB\n" + name +
                "SReclaimable:  " + Kb(slab) + " kB\n");
    };
    node(0, 32 * kGiB, 1 * kGiB, 8 * kGiB, 2 * kGiB);
    node(1, 0, 0, 0, 0);
    node(2, 32 * kGiB, 20 * kGiB, 0, 0);
  }

  MemoryLimits Detect() {
    Result<MemoryLimits> limits = MemoryLimits::Detect(root_);
    EXPECT_TRUE(IsOk(limits));
    return limits.ok() ? *limits : MemoryLimits();
  }

  const TemporaryFolder folder_;
  const std::string root_ = folder_.path();
};

inline std::string Names(const MemoryLimits& limits) {
  std::string names;
  for (const MemoryLimit& limit : limits.limits) names += limit.name + "; ";
  return names;
}

inline std::string Warnings(const MemoryLimits& limits) {
  std::string text;
  for (const std::string& warning : limits.warnings) text += warning + "\n";
  return text;
}

inline const MemoryLimit* Find(const MemoryLimits& limits,
                               const std::string& name) {
  for (const MemoryLimit& limit : limits.limits) {
    if (limit.name == name) return &limit;
  }
  return nullptr;
}

inline std::string Binding(const MemoryLimits& limits) {
  return limits.limits.at(static_cast<size_t>(limits.binding_total)).name +
         " | " +
         limits.limits.at(static_cast<size_t>(limits.binding_available)).name;
}

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_MACHINE_FIXTURE_H_
