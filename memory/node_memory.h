// What each NUMA node has free, and which nodes we may take memory from.
//
// First touch places pages on the toucher's node while it has any and on the
// next one when it has none, so a full node is a matter of speed; a cpuset that
// leaves nodes out is a limit. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_NODE_MEMORY_H_
#define VARLANE_MEMORY_NODE_MEMORY_H_

#include <string>
#include <string_view>
#include <vector>

#include "varlane/memory_budget.h"
#include "varlane/status.h"

namespace varlane {

// The nodes under `root` ("" = this machine) that have memory, by index; none
// where the kernel shows none. What cannot be read is added to `warnings`;
// `exhausted` is set where no descriptor was left to look with.
std::vector<NodeMemory> ReadNodeMemory(const std::string& root,
                                       std::vector<std::string>* warnings,
                                       Status* exhausted);

// The numbers of a kernel list such as "0-3,8,10-11"; stops at what is none.
std::vector<int> ParseIndexList(std::string_view text);

}  // namespace varlane

#endif  // VARLANE_MEMORY_NODE_MEMORY_H_
