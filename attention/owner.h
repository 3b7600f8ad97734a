// Owners: how a threadgroup finds whose work it holds, by four patterns.
//
// The patterns differ in the grid they launch and in what a threadgroup reads;
// what it then computes is the same, so their outputs are the same bits.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_OWNER_H_
#define VARLANE_ATTENTION_OWNER_H_

#include <cstdint>
#include <optional>

#include "attention/plan.h"

namespace varlane {

// What one threadgroup has to do.
struct Assignment {
  int head = 0;       // KV head, the first of Impl::heads_together
  int64_t block = 0;  // query block, numbered as Impl::FirstBlock does
  AttentionPlan::Impl::Item item;
  int64_t partition_begin = 0;  // absolute; all of the item's, or one of them
  int64_t partition_end = 0;

  bool is_whole() const {
    return partition_end - partition_begin == item.num_partitions();
  }
};

// Sizes the grid and makes what the plan's pattern reads: nothing, the map or
// the descriptors. Requires: everything else of `plan` is filled.
// Errors: kInvalidArgument when the grid has more than 2^63 threadgroups.
Status PrepareOwners(AttentionPlan::Impl* plan);

// Finds the work of threadgroup `index` and counts how; none for a surplus one,
// which touches nothing else.
std::optional<Assignment> Assign(const AttentionPlan::Impl& plan, int64_t index,
                                 WorkerCounters& count);

// The sequence that owns query block `block`: the largest i with
// cu_seqlens_q[i] / BQ + i <= block. Each sequence has len / BQ full blocks and
// at most one ragged tail, so block ranges of the transformed array never
// overlap. The search gallops away from `hint`, any sequence: a worker's
// neighbouring threadgroups have neighbouring owners.
// Requires: num_seqs > 0, 0 <= hint < num_seqs.
// Cost: two dependent loads for a neighbour, at most 2 ceil(log2(N + 1)).
// Source: vLLM's unified attention kernel, find_seq_idx; galloping: Bentley &
// Yao, "An almost optimal algorithm for unbounded searching" (1976).
int64_t FindOwner(const int32_t* cu_seqlens_q, int64_t num_seqs, int block_q,
                  int64_t block, int64_t hint);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_OWNER_H_
