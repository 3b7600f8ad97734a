// SPDX-License-Identifier: Apache-2.0

#include "attention/homes.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/math.h"

namespace varlane {
namespace {

using Impl = AttentionPlan::Impl;

// The node with the most of `table`'s blocks in [range.begin, range.end).
int32_t HomeOf(const int32_t* table, BlockRange range, int64_t node_stride,
               std::vector<int64_t>* counts) {
  std::fill(counts->begin(), counts->end(), 0);
  for (int64_t b = range.begin; b < range.end; ++b) {
    ++(*counts)[static_cast<size_t>(table[b] / node_stride)];
  }
  return static_cast<int32_t>(std::max_element(counts->begin(), counts->end()) -
                              counts->begin());
}

// Blocks count from the last one on in the grids of these two.
bool CountsBackwards(OwnerPattern owner) {
  return owner == OwnerPattern::kSearch || owner == OwnerPattern::kMap;
}

}  // namespace

void FindHomes(const Batch& batch, const AttentionShape& shape,
               const KvView& kv, const PlanOptions& options, int num_nodes,
               Impl* plan) {
  plan->homes.clear();
  plan->batch_index.clear();
  plan->first_token.clear();
  plan->node_begin.clear();
  plan->node_stride = kv.node_stride;
  plan->num_nodes = num_nodes;
  const int64_t n = batch.num_seqs();
  if (num_nodes < 2 || kv.node_blocks == nullptr || n == 0) return;
  // A pool on more nodes than the runtime has arenas.
  if (kv.num_blocks > kv.node_stride * num_nodes) return;
  plan->node_counts.resize(static_cast<size_t>(num_nodes));
  std::vector<int32_t>& homes = plan->batch_homes;
  homes.clear();
  for (int64_t i = 0; i < n; ++i) {
    homes.push_back(
        HomeOf(batch.block_tables.data() + i * batch.block_table_stride,
               BlocksInView(batch, shape, kv.layout.block_size, i),
               kv.node_stride, &plan->node_counts));
  }
  if (!options.follow_homes) {
    plan->homes.assign(homes.begin(), homes.end());
    return;
  }
  std::vector<int32_t>& order = plan->batch_index;
  order.resize(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  const bool backwards = CountsBackwards(options.owner);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const int32_t of_a = homes[static_cast<size_t>(a)];
    const int32_t of_b = homes[static_cast<size_t>(b)];
    if (of_a == of_b) return a < b;
    return backwards ? of_a > of_b : of_a < of_b;
  });
  for (const int32_t i : order) {
    plan->homes.push_back(homes[static_cast<size_t>(i)]);
  }
}

void CutByHome(int num_nodes, Impl* plan) {
  if (plan->batch_index.empty()) return;
  std::vector<int64_t>& begin = plan->node_begin;
  begin.assign(static_cast<size_t>(num_nodes) + 1, 0);
  const auto add = [&](int64_t seq, int64_t threadgroups) {
    begin[static_cast<size_t>(plan->homes[static_cast<size_t>(seq)]) + 1] +=
        threadgroups;
  };
  const int64_t heads = plan->heads_axis;
  if (plan->owner == OwnerPattern::kPlanned) {
    for (const Impl::Descriptor& work : plan->descriptors) {
      add(work.seq, heads);
    }
  }
  for (int64_t seq = 0; seq < plan->num_seqs; ++seq) {
    if (plan->owner == OwnerPattern::kPadded) {
      add(seq, plan->padded_query_blocks * heads * plan->num_partitions);
    } else if (CountsBackwards(plan->owner)) {
      add(seq, heads * (plan->SlotsOfBlocks(plan->FirstBlock(seq + 1)) -
                        plan->SlotsOfBlocks(plan->FirstBlock(seq))));
    }
  }
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  VARLANE_DCHECK(begin.back() == plan->grid_size);
}

void CountLocality(const Impl& plan, int node, int64_t seq, int64_t low,
                   int64_t high, WorkerCounters* count) {
  ++(plan.homes[static_cast<size_t>(seq)] == node ? count->home
                                                  : count->stolen);
  const int64_t block_size = plan.layout.block_size;
  const int32_t* const table =
      plan.block_tables.data() + seq * plan.block_table_stride;
  int64_t local = 0;  // tokens
  for (int64_t b = low / block_size; b * block_size < high; ++b) {
    if (table[b] / plan.node_stride != node) continue;
    local +=
        std::min(high, (b + 1) * block_size) - std::max(low, b * block_size);
  }
  count->local_bytes += local * plan.key_bytes();
  count->remote_bytes +=
      (std::max<int64_t>(high - low, 0) - local) * plan.key_bytes();
}

}  // namespace varlane
