// Whether the NUMA nodes that were found are those that the kernel has.
//
// hwloc takes a machine whose nodes it cannot see (a container without /sys)
// for one node, and says nothing.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_KERNEL_NODES_H_
#define VARLANE_RUNTIME_KERNEL_NODES_H_

#include <string>
#include <vector>

namespace varlane {

inline constexpr const char* kKernelsNodes = "/sys/devices/system/node/online";

// Adds a warning where `file`, a list such as "0-3,8", cannot be read or has
// another number of nodes than `num_nodes`.
void CompareWithKernelsNodes(const std::string& file, int num_nodes,
                             std::vector<std::string>* warnings);

}  // namespace varlane

#endif  // VARLANE_RUNTIME_KERNEL_NODES_H_
