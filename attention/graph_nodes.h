// Attention's nodes in launch graphs.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_GRAPH_NODES_H_
#define VARLANE_ATTENTION_GRAPH_NODES_H_

#include <functional>
#include <memory>

#include "attention/plan.h"
#include "kernels/kernel_table.h"
#include "varlane/attention.h"
#include "varlane/graph.h"

namespace varlane {

// What an attention node runs, its plan checked.
struct BoundRun {
  AttentionNodeArgs args;
  AttentionPlan::Impl* plan = nullptr;
};

using BindRun = std::function<Status(void* args, BoundRun* bound)>;
using BindWriteKv = std::function<WriteKvNodeArgs(void* args)>;

// Each makes the node of one run; `table` must outlive it. `num_nodes` are the
// runtime's.
LaunchGraph::MakeLaunch RunNodes(const KernelTable& table, BindRun bind);
LaunchGraph::MakeLaunch WriteKvNodes(const KernelTable& table, int num_nodes,
                                     BindWriteKv bind);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_GRAPH_NODES_H_
