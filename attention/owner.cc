// SPDX-License-Identifier: Apache-2.0

#include "attention/owner.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <optional>

#include "base/check.h"
#include "base/math.h"

namespace varlane {
namespace {

using Impl = AttentionPlan::Impl;

void MakeMap(Impl* plan) {
  plan->owner_map.assign(static_cast<size_t>(plan->num_query_blocks), -1);
  for (int64_t i = 0; i < plan->num_seqs; ++i) {
    std::fill_n(plan->owner_map.begin() + plan->FirstBlock(i),
                plan->NumBlocks(i), static_cast<int32_t>(i));
  }
}

// Keys of the item's rows within partitions [begin, end).
int64_t KeysWithin(const Impl::Item& item, int64_t begin, int64_t end) {
  const int64_t low = std::max(item.mask.low(0), begin * kPartition);
  const int64_t high =
      std::min(item.mask.high(item.num_tokens - 1), end * kPartition);
  return std::max<int64_t>(0, high - low);
}

void MakeDescriptors(Impl* plan) {
  plan->descriptors.clear();
  for (int64_t seq = 0; seq < plan->num_seqs; ++seq) {
    for (int64_t b = 0; b < plan->NumBlocks(seq); ++b) {
      const int64_t block = plan->FirstBlock(seq) + b;
      const Impl::Item item = plan->Locate(seq, block);
      const int64_t step = plan->spreads(block) ? 1 : item.num_partitions();
      for (int64_t p = item.partition_begin; p < item.partition_end;
           p += step) {
        plan->descriptors.push_back(
            {Impl::Cost(KeysWithin(item, p, p + step), item.num_tokens),
             static_cast<int32_t>(seq), static_cast<int32_t>(b),
             static_cast<int32_t>(p), static_cast<int32_t>(p + step)});
      }
    }
  }
  // Heaviest first (of each node's, where the grid is cut by them), so that the
  // launch ends on small ones; ties in a fixed order, so that a plan is a pure
  // function of its batch.
  const int32_t* const homes =
      plan->batch_index.empty() ? nullptr : plan->homes.data();
  std::sort(plan->descriptors.begin(), plan->descriptors.end(),
            [homes](const Impl::Descriptor& a, const Impl::Descriptor& b) {
              if (homes != nullptr && homes[a.seq] != homes[b.seq]) {
                return homes[a.seq] < homes[b.seq];
              }
              if (a.cost != b.cost) return a.cost > b.cost;
              if (a.seq != b.seq) return a.seq < b.seq;
              if (a.block != b.block) return a.block < b.block;
              return a.partition_begin < b.partition_begin;
            });
}

int64_t MostBlocks(const Impl& plan) {
  int64_t most = 0;
  for (int64_t i = 0; i < plan.num_seqs; ++i) {
    most = std::max(most, plan.NumBlocks(i));
  }
  return most;
}

Status SizeGrid(std::initializer_list<int64_t> axes, Impl* plan) {
  std::optional<int64_t> size = 1;
  for (const int64_t axis : axes) {
    size = CheckedMul(*size, axis);
    VARLANE_REQUIRE_ARG(size.has_value(), "the ", OwnerPatternName(plan->owner),
                        " grid of this batch exceeds 2^63 threadgroups");
  }
  plan->grid_size = *size;
  return {};
}

struct Division {
  int64_t quotient;
  int64_t remainder;
};

// Requires: a >= 0, b > 0. Most grids have an axis of one; the short division
// takes half as long as the long one, and most grids fit it.
Division Divide(int64_t a, int64_t b) {
  if (b == 1) return {a, 0};
  if (((a | b) >> 32) == 0) {
    const auto x = static_cast<uint32_t>(a);
    const auto y = static_cast<uint32_t>(b);
    return {x / y, x % y};
  }
  return {a / b, a % b};
}

int FirstHead(const Impl& plan, int64_t heads) {
  return static_cast<int>(heads) * plan.heads_together;
}

// Of a threadgroup that names a query block, its heads and one of the grid's
// partitions: the work, if there is some. Surplus ones leave before an item is
// worked out or memory is cleared for one.
std::optional<Assignment> Place(const Impl& plan, int64_t seq, int64_t block,
                                int64_t heads, int64_t partition) {
  if (block - plan.FirstBlock(seq) >= plan.NumBlocks(seq)) return {};
  const Impl::Item item = plan.Locate(seq, block);
  if (item.num_tokens <= 0 || partition >= item.num_partitions()) return {};
  const int64_t begin = item.partition_begin + partition;
  return Assignment{FirstHead(plan, heads), block, item, begin,
                    plan.spreads(block) ? begin + 1 : item.partition_end};
}

// Grid: query blocks x heads, those that walk, then query blocks x heads x
// partitions. Heads inside blocks: neighbours share the pages of q, out and K/V
// (decode of 64 x 2048 ran 1.2x faster for it).
std::optional<Assignment> AssignByBlock(const Impl& plan, int64_t index,
                                        WorkerCounters& count) {
  const int64_t walking =
      (plan.num_query_blocks - plan.spread_blocks) * plan.heads_axis;
  const bool walks = index < walking;
  const auto [rest, partition] =
      walks ? Division{index, 0} : Divide(index - walking, plan.num_partitions);
  const auto [from_last, heads] = Divide(rest, plan.heads_axis);
  // Later blocks see more keys: the heaviest go first.
  const int64_t block =
      (walks ? plan.num_query_blocks : plan.spread_blocks) - 1 - from_last;
  int64_t seq = 0;
  if (plan.owner == OwnerPattern::kMap) {
    ++count.owner_lookups;
    seq = plan.owner_map[static_cast<size_t>(block)];
    if (seq < 0) return {};
  } else {
    ++count.owner_searches;
    seq = FindOwner(plan.cu_seqlens_q.data(), plan.num_seqs, plan.block_q,
                    block, count.last_owner);
    count.last_owner = seq;
  }
  return Place(plan, seq, block, heads, partition);
}

// Grid: descriptors x heads, heads innermost.
std::optional<Assignment> AssignByDescriptor(const Impl& plan, int64_t index,
                                             WorkerCounters& count) {
  ++count.owner_planned;
  const auto [at, heads] = Divide(index, plan.heads_axis);
  const Impl::Descriptor& work = plan.descriptors[static_cast<size_t>(at)];
  const int64_t block = plan.FirstBlock(work.seq) + work.block;
  return Assignment{FirstHead(plan, heads), block, plan.Locate(work.seq, block),
                    work.partition_begin, work.partition_end};
}

// Grid: sequences x blocks of the longest query x heads x partitions.
std::optional<Assignment> AssignByAxes(const Impl& plan, int64_t index,
                                       WorkerCounters& count) {
  ++count.owner_padded;
  const auto [rest, partition] = Divide(index, plan.num_partitions);
  const auto [blocks, heads] = Divide(rest, plan.heads_axis);
  const auto [seq, from_last] = Divide(blocks, plan.padded_query_blocks);
  const int64_t block = plan.padded_query_blocks - 1 - from_last;
  return Place(plan, seq, plan.FirstBlock(seq) + block, heads, partition);
}

// Of the grid, or of one shard's range of it.
std::optional<Assignment> AssignInRange(const Impl& plan, int64_t index,
                                        WorkerCounters& count) {
  switch (plan.owner) {
    case OwnerPattern::kSearch:
    case OwnerPattern::kMap:
      return AssignByBlock(plan, index, count);
    case OwnerPattern::kPlanned:
      return AssignByDescriptor(plan, index, count);
    case OwnerPattern::kPadded:
      return AssignByAxes(plan, index, count);
  }
  return {};
}

}  // namespace

Status PrepareOwners(Impl* plan) {
  const int64_t heads = int64_t{plan->heads_axis} * plan->grid_shards;
  switch (plan->owner) {
    case OwnerPattern::kSearch:
      break;
    case OwnerPattern::kMap:
      MakeMap(plan);
      break;
    case OwnerPattern::kPlanned:
      MakeDescriptors(plan);
      return SizeGrid({static_cast<int64_t>(plan->descriptors.size()), heads},
                      plan);
    case OwnerPattern::kPadded:
      plan->padded_query_blocks = MostBlocks(*plan);
      return SizeGrid({heads, plan->num_seqs, plan->padded_query_blocks,
                       plan->num_partitions},
                      plan);
  }
  return SizeGrid({heads, plan->SlotsOfBlocks(plan->num_query_blocks)}, plan);
}

std::optional<Assignment> Assign(const Impl& plan, int64_t index,
                                 WorkerCounters& count) {
  const auto [shard, within] = plan.grid_shards == 1
                                   ? Division{0, index}
                                   : Divide(index, plan.shard_size);
  std::optional<Assignment> found = AssignInRange(plan, within, count);
  if (found) {
    found->head += static_cast<int>(shard) * plan.grid_heads;
  } else {
    ++count.surplus;
  }
  return found;
}

int64_t FindOwner(const int32_t* cu_seqlens_q, int64_t num_seqs, int block_q,
                  int64_t block, int64_t hint) {
  // Blocks are powers of two: a division a step would cost more than the loads.
  const int shift = std::countr_zero(static_cast<unsigned>(block_q));
  const auto starts_by = [&](int64_t i) {
    return (cu_seqlens_q[i] >> shift) + i <= block;
  };
  // Invariant: start(low) <= block < start(high).
  int64_t low = 0;
  int64_t high = num_seqs;
  if (starts_by(hint)) {
    low = hint;
    for (int64_t step = 1; low + step < num_seqs; step *= 2) {
      if (!starts_by(low + step)) {
        high = low + step;
        break;
      }
      low += step;
    }
  } else {
    high = hint;
    for (int64_t step = 1; high - step > 0; step *= 2) {
      if (starts_by(high - step)) {
        low = high - step;
        break;
      }
      high -= step;
    }
  }
  while (high - low > 1) {
    const int64_t mid = low + (high - low) / 2;
    (starts_by(mid) ? low : high) = mid;
  }
  return low;
}

}  // namespace varlane
