// SPDX-License-Identifier: Apache-2.0

#include "attention/shards.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"

namespace varlane {

Status ValidateShards(const KvView& kv) {
  VARLANE_REQUIRE_ARG(
      kv.num_shards >= 1 && kv.layout.num_kv_heads % kv.num_shards == 0,
      "the KV view's num_shards = ", kv.num_shards,
      ", must divide num_kv_heads = ", kv.layout.num_kv_heads);
  if (kv.num_shards == 1) return {};
  VARLANE_REQUIRE_ARG(kv.node_blocks == nullptr,
                      "the KV view has both num_shards = ", kv.num_shards,
                      " and node_blocks");
  const std::optional<int64_t> bytes =
      CheckedMul(kv.num_blocks, kv.part_bytes());
  VARLANE_REQUIRE_ARG(
      bytes && kv.shard_stride >= *bytes && kv.shard_stride % 64 == 0,
      "the KV view's shard_stride = ", kv.shard_stride,
      ", must be a multiple of 64 and hold ", kv.num_blocks, " blocks' ",
      kv.part_bytes(), " bytes");
  return {};
}

void FindShards(const KvView& kv, const PlanOptions& options, int num_nodes,
                AttentionPlan::Impl* plan) {
  plan->view_shards = kv.num_shards;
  plan->shards_known = num_nodes > 1 && kv.num_shards == num_nodes;
  plan->grid_shards =
      plan->shards_known && options.follow_homes ? num_nodes : 1;
  plan->grid_heads = kv.layout.num_kv_heads / plan->grid_shards;
}

void CutByShard(AttentionPlan::Impl* plan) {
  if (plan->grid_shards == 1) return;
  VARLANE_DCHECK(plan->grid_size % plan->grid_shards == 0);
  plan->shard_size = plan->grid_size / plan->grid_shards;
  for (int node = 0; node <= plan->grid_shards; ++node) {
    plan->node_begin.push_back(node * plan->shard_size);
  }
}

void CountShardLocality(const AttentionPlan::Impl& plan, int node, int head,
                        int64_t low, int64_t high, WorkerCounters* count) {
  const int shard = head / (plan.layout.num_kv_heads / plan.view_shards);
  const int64_t bytes = std::max<int64_t>(high - low, 0) * plan.key_bytes();
  const bool is_local = shard == node;
  ++(is_local ? count->home : count->stolen);
  (is_local ? count->local_bytes : count->remote_bytes) += bytes;
}

}  // namespace varlane
