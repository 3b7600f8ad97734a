// Homes: the NUMA node a sequence's threadgroups are for, and the cut of the
// grid by node that follows.
//
// A grid can be cut into one contiguous range a node only where neighbours in
// it are at home together. So a plan that follows homes keeps its sequences
// ordered by home, and all else - block numbers, owners, partial records - goes
// by that order; only the rows of q and out are looked up by the batch's. All
// four owner patterns are cut alike: three number threadgroups by sequence, and
// planned descriptors are sorted by home first, heaviest first within it. A
// plan for one node has none of this, and its threadgroups the code they always
// had.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_HOMES_H_
#define VARLANE_ATTENTION_HOMES_H_

#include "attention/plan.h"

namespace varlane {

// Fills homes and, with options.follow_homes, batch_index: the order in which
// the batch is to be copied. A sequence's home is the node that holds most of
// its blocks in view; of nodes that hold as many, the first.
// Requires: a valid batch. Cost: a division a table entry in use.
void FindHomes(const Batch& batch, const AttentionShape& shape,
               const KvView& kv, const PlanOptions& options, int num_nodes,
               AttentionPlan::Impl* plan);

// Fills node_begin where the plan follows homes. Requires: the grid is sized.
void CutByHome(int num_nodes, AttentionPlan::Impl* plan);

// Counts a threadgroup of `seq` that reads keys [low, high) of one KV head on
// `node`. Requires: homes are known.
void CountLocality(const AttentionPlan::Impl& plan, int node, int64_t seq,
                   int64_t low, int64_t high, WorkerCounters* count);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_HOMES_H_
