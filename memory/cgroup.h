// Which memory cgroups bound this process, and in which directories they are.
//
// Works from /proc/self/cgroup (which cgroup) and /proc/self/mountinfo (where
// it shows), for v1, v2 and hybrid machines, inside a cgroup namespace, and for
// mounts that show only a part of the tree. Limits are hierarchical, so every
// visible ancestor is listed. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_CGROUP_H_
#define VARLANE_MEMORY_CGROUP_H_

#include <string>
#include <vector>

#include "varlane/status.h"

namespace varlane {

// One cgroup of the hierarchy that a process is in.
struct MemoryCgroup {
  int version = 2;        // 1 or 2
  std::string path;       // as /proc/self/cgroup names it: "/a/b", "/.."
  std::string directory;  // where its files are, `root` included
};

struct MemoryCgroups {
  // Per hierarchy from our own cgroup outwards to the outermost visible one;
  // v1 first. A v2 level may well have no memory controller.
  std::vector<MemoryCgroup> levels;
  std::vector<std::string> warnings;
  Status exhausted;  // not ok: no descriptor or memory was left to look
};

// Finds them under `root` ("" = this machine).
//
// Cost: reads two files; where a namespace hides the names between the mount
//       and our cgroup, also looks through at most 4096 directories for our
//       process id.
MemoryCgroups FindMemoryCgroups(const std::string& root);

}  // namespace varlane

#endif  // VARLANE_MEMORY_CGROUP_H_
