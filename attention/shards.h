// Shards: KV heads cut over the NUMA nodes, and the cut of the grid that
// follows.
//
// Where the heads of a view are sharded over the runtime's nodes, a plan's grid
// is as many grids one behind another, each what a plan for its shard's heads
// alone would have. So the threadgroups that read a node's memory are one
// contiguous range, whichever the owner pattern, and within it the heaviest go
// first as ever; q and the outputs alone cross nodes. A plan on a view that is
// not sharded has none of this, and its threadgroups the code they always had.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_SHARDS_H_
#define VARLANE_ATTENTION_SHARDS_H_

#include <cstdint>

#include "attention/plan.h"

namespace varlane {

// Errors: kInvalidArgument where the view's shards cannot be, naming field,
// value and limit.
Status ValidateShards(const KvView& kv);

// Fills what a plan knows of shards, but the cut.
void FindShards(const KvView& kv, const PlanOptions& options, int num_nodes,
                AttentionPlan::Impl* plan);

// Fills shard_size and node_begin where the grid is cut by shard. Requires: the
// grid is sized.
void CutByShard(AttentionPlan::Impl* plan);

// Counts a threadgroup that reads keys [low, high) of its KV heads, `head` and
// those that go together with it, on `node`.
// Requires: shards_known.
void CountShardLocality(const AttentionPlan::Impl& plan, int node, int head,
                        int64_t low, int64_t high, WorkerCounters* count);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_SHARDS_H_
