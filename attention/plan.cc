// SPDX-License-Identifier: Apache-2.0

#include "attention/plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <new>

#include "attention/homes.h"
#include "attention/kv_blocks.h"
#include "attention/owner.h"
#include "attention/shards.h"
#include "base/check.h"
#include "base/math.h"
#include "kernels/args.h"

namespace varlane {
namespace {

using Impl = AttentionPlan::Impl;

// Rows of a query block: enough that a partition's K/V, read once from L3 or
// DRAM, serve many rows from L2; 256 rows of accumulators are 128 KiB.
constexpr int kBlockRows = 256;
constexpr int kMaxGroup = 1024;

// A launch spreads partitions when one threadgroup would otherwise hold more
// than this share of what a worker has to do.
constexpr int64_t kSpreadShare = 4;
// KV heads of a threadgroup of few rows, at most. A block of the pool holds its
// heads side by side: their pages are looked up once for all of them, each
// fetches for the next, and a threadgroup starts and ends once. (Decode: a Xeon
// with AMX 7 to 17% faster, Zen 4 1 to 7%; more over contexts of 128.)
constexpr int kHeadsTogether = 8;
// Where a threadgroup holds more than this share of what a worker has to do,
// the last of them are spread.
constexpr int64_t kTailShare = 8;
constexpr int64_t kTailPartitions = 4;  // fewer are hardly finer
// A threadgroup takes several KV heads while it holds no more than this share
// of what a worker has to do.
constexpr int64_t kTogetherShare = 8;

Status ValidateShape(const AttentionShape& shape, const KvLayout& layout) {
  VARLANE_RETURN_IF_ERROR(layout.Validate());
  VARLANE_REQUIRE_ARG(
      shape.num_q_heads > 0 && shape.num_q_heads % layout.num_kv_heads == 0,
      "num_q_heads = ", shape.num_q_heads,
      ", must be a positive multiple of num_kv_heads = ", layout.num_kv_heads);
  VARLANE_REQUIRE_ARG(shape.num_q_heads / layout.num_kv_heads <= kMaxGroup,
                      "num_q_heads = ", shape.num_q_heads, " over ",
                      layout.num_kv_heads, " KV heads is a group of ",
                      shape.num_q_heads / layout.num_kv_heads,
                      ", the limit is ", kMaxGroup);
  // As floats, which the kernels compute with.
  VARLANE_REQUIRE_ARG(std::isfinite(static_cast<float>(shape.scale)),
                      "scale = ", shape.scale, ", must be finite");
  const auto softcap = static_cast<float>(shape.softcap);
  VARLANE_REQUIRE_ARG(
      shape.softcap == 0 ||
          (std::isnormal(softcap) && std::isnormal(1 / softcap) && softcap > 0),
      "softcap = ", shape.softcap, ", must be 0 or a positive normal float");
  return {};
}

Status ValidateLengths(const Batch& batch) {
  const int64_t n = batch.num_seqs();
  VARLANE_REQUIRE_ARG(std::cmp_equal(batch.cu_seqlens_q.size(), n + 1),
                      "cu_seqlens_q has ", batch.cu_seqlens_q.size(),
                      " entries, but seq_lens has ", n, ", which needs ",
                      n + 1);
  VARLANE_REQUIRE_ARG(batch.cu_seqlens_q[0] == 0,
                      "cu_seqlens_q[0] = ", batch.cu_seqlens_q[0],
                      ", must be 0");
  for (int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(i);
    VARLANE_REQUIRE_ARG(
        batch.cu_seqlens_q[at + 1] >= batch.cu_seqlens_q[at], "cu_seqlens_q[",
        i + 1, "] = ", batch.cu_seqlens_q[at + 1], " is below cu_seqlens_q[", i,
        "] = ", batch.cu_seqlens_q[at]);
    VARLANE_REQUIRE_ARG(batch.seq_lens[at] >= 0, "seq_lens[", i,
                        "] = ", batch.seq_lens[at], ", must not be negative");
  }
  return {};
}

Status ValidateMask(const std::string& name, const SequenceMask& mask) {
  VARLANE_REQUIRE_ARG(mask.window_left >= -1, name,
                      ".window_left = ", mask.window_left,
                      ", must be -1 (all) or more");
  VARLANE_REQUIRE_ARG(mask.window_right >= -1, name,
                      ".window_right = ", mask.window_right,
                      ", must be -1 (all) or more");
  VARLANE_REQUIRE_ARG(!mask.causal || mask.window_right <= 0, name,
                      ".window_right = ", mask.window_right,
                      ", but the sequence is causal");
  VARLANE_REQUIRE_ARG(mask.prefix_len >= 0, name,
                      ".prefix_len = ", mask.prefix_len,
                      ", must not be negative");
  return {};
}

Status ValidateMasks(const Batch& batch, const AttentionShape& shape) {
  VARLANE_RETURN_IF_ERROR(ValidateMask("mask", shape.mask));
  if (batch.masks.empty()) return {};
  VARLANE_REQUIRE_ARG(std::cmp_equal(batch.masks.size(), batch.num_seqs()),
                      "masks has ", batch.masks.size(),
                      " entries, but seq_lens has ", batch.num_seqs());
  for (size_t i = 0; i < batch.masks.size(); ++i) {
    if (batch.masks[i] == SequenceMask{}) continue;
    VARLANE_RETURN_IF_ERROR(
        ValidateMask(StrCat("masks[", i, "]"), batch.masks[i]));
  }
  return {};
}

RowMask MakeRowMask(const SequenceMask& mask, int64_t q_len, int64_t seq_len) {
  RowMask row;
  row.first_position = seq_len - q_len;
  row.context = seq_len;
  row.left = mask.window_left < 0 ? RowMask::kAll : mask.window_left;
  row.right = mask.causal             ? 0
              : mask.window_right < 0 ? RowMask::kAll
                                      : mask.window_right;
  row.prefix = mask.prefix_len;
  return row;
}

const SequenceMask& MaskOf(const Batch& batch, const AttentionShape& shape,
                           size_t seq) {
  return batch.masks.empty() ? shape.mask : batch.masks[seq];
}

Status ValidateTables(const Batch& batch, const AttentionShape& shape,
                      const KvView& kv, Impl* plan) {
  const KvLayout& layout = kv.layout;
  const int64_t n = batch.num_seqs();
  const int64_t stride = batch.block_table_stride;
  VARLANE_REQUIRE_ARG(stride >= 0, "block_table_stride = ", stride,
                      ", must not be negative");
  const std::optional<int64_t> entries = CheckedMul(n, stride);
  VARLANE_REQUIRE_ARG(
      entries && std::cmp_greater_equal(batch.block_tables.size(), *entries),
      "block_tables has ", batch.block_tables.size(), " entries, but ", n,
      " sequences x block_table_stride = ", stride, " need more");
  int64_t largest = -1;
  for (int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t used =
        DivCeil<int64_t>(batch.seq_lens[at], layout.block_size);
    VARLANE_REQUIRE_ARG(used <= stride, "seq_lens[", i,
                        "] = ", batch.seq_lens[at], " needs ", used,
                        " blocks of ", layout.block_size,
                        ", but block_table_stride = ", stride);
    const BlockRange seen = BlocksInView(batch, shape, layout.block_size, i);
    const int32_t* table = batch.block_tables.data() + i * stride;
    for (int64_t b = seen.begin; b < seen.end; ++b) {
      VARLANE_REQUIRE_ARG(kv.contains(table[b]), "block_tables[", i, "][", b,
                          "] = ", table[b], ", but ",
                          WhereBlocksEnd(kv, table[b], "pool"));
      largest = std::max<int64_t>(largest, table[b]);
    }
  }
  plan->num_blocks_needed = largest + 1;
  return {};
}

// Visible (row, key) pairs of one head of the rows from `mask` on.
int64_t VisiblePairs(const RowMask& mask, int64_t num_tokens) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < num_tokens; ++i) pairs += mask.high(i) - mask.low(i);
  return pairs;
}

struct Work {
  int64_t total = 0;    // key tokens visited, weighted by query tokens
  int64_t largest = 0;  // of one item and KV head
  int64_t smallest = std::numeric_limits<int64_t>::max();
  int64_t largest_partition = 0;  // of one partition of one item
  int64_t most_partitions = 1;    // of one item
  int64_t items = 0;
  int64_t keys = 0;      // visited by all items
  int64_t few_keys = 0;  // by those whose KV heads may go together
};

Work CountWork(Impl* plan) {
  Work work;
  plan->kv_bytes = 0;
  plan->flops = 0;
  const KvLayout& layout = plan->layout;
  const int64_t head_sizes = layout.head_size + layout.v_head_size;
  for (int64_t i = 0; i < plan->num_seqs; ++i) {
    const int64_t q_len = plan->QueryLength(i);
    if (q_len == 0) continue;
    const int64_t first = plan->FirstBlock(i);
    const int64_t blocks = plan->NumBlocks(i);
    int64_t low = 0;
    int64_t high = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      const Impl::Item item = plan->Locate(i, first + b);
      high = item.mask.high(item.num_tokens - 1);
      if (b == 0) low = item.mask.low(0);
      const int64_t keys = item.num_keys();
      const int64_t cost = Impl::Cost(keys, item.num_tokens);
      work.total += cost;
      work.largest = std::max(work.largest, cost);
      work.smallest = std::min(work.smallest, cost);
      work.largest_partition = std::max(
          work.largest_partition,
          Impl::Cost(std::min<int64_t>(keys, kPartition), item.num_tokens));
      work.most_partitions =
          std::max(work.most_partitions, item.num_partitions());
      ++work.items;
      work.keys += keys;
      if (GoTogether(item.num_tokens * plan->group, 1)) work.few_keys += keys;
      plan->flops += 2 * head_sizes * plan->num_q_heads *
                     VisiblePairs(item.mask, item.num_tokens);
    }
    plan->kv_bytes += (high - low) * layout.num_kv_heads * head_sizes *
                      static_cast<int64_t>(SizeOf(layout.dtype));
  }
  work.total *= layout.num_kv_heads;
  return work;
}

int LargestDivisor(int of, int most) {
  int divisor = std::min(of, most);
  while (of % divisor != 0) --divisor;
  return divisor;
}

// Those that stand side by side.
int HeadsOfShard(const Impl& plan) {
  return plan.layout.num_kv_heads / plan.view_shards;
}

// KV heads of a threadgroup, a divisor of `heads`, where partitions are spread
// or walked. Coarser threadgroups leave workers waiting at the end of a launch,
// but for those that deal out evenly.
int ChooseHeadsTogether(const Impl& plan, const Work& work, bool spread,
                        int num_workers, int heads) {
  if (2 * work.few_keys < work.keys) return 1;
  const int64_t piece = spread ? work.largest_partition : work.largest;
  const bool equal = !spread && work.smallest == work.largest;
  for (int together = LargestDivisor(heads, kHeadsTogether); together > 1;
       together = LargestDivisor(heads, together - 1)) {
    const int64_t threadgroups =
        work.items * (plan.layout.num_kv_heads / together);
    if (num_workers == 1 || (equal && threadgroups % num_workers == 0) ||
        piece * together * num_workers * kTogetherShare <= work.total) {
      return together;
    }
  }
  return 1;
}

bool ChooseSpread(const PlanOptions& options, const Impl& plan,
                  const Work& work, int num_workers) {
  if (work.most_partitions <= 1) return false;
  switch (options.partitions) {
    case PartitionMode::kSpread:
      return true;
    case PartitionMode::kWalk:
      return false;
    case PartitionMode::kAuto:
      break;
  }
  if (num_workers == 1) return false;
  if (work.largest * num_workers * kSpreadShare > work.total) return true;
  // Rather than tear the KV heads of a block apart (Zen 5, in turns, decode and
  // verify of 1 to 14 sequences: 1 to 20% faster). Many rows would be too many
  // partial states.
  if (work.few_keys < work.keys || options.kv_heads_per_threadgroup > 0) {
    return false;
  }
  const int heads = HeadsOfShard(plan);
  return ChooseHeadsTogether(plan, work, true, num_workers, heads) >
         ChooseHeadsTogether(plan, work, false, num_workers, heads);
}

void CutHeads(const PlanOptions& options, const Work& work, bool spread,
              int num_workers, Impl* plan) {
  const int heads = HeadsOfShard(*plan);
  const int asked = options.kv_heads_per_threadgroup;
  plan->heads_together =
      asked > 0 ? LargestDivisor(heads, asked)
                : ChooseHeadsTogether(*plan, work, spread, num_workers, heads);
  plan->heads_axis = plan->grid_heads / plan->heads_together;
}

// Query blocks that are spread at the end of a launch that walks, so that its
// workers end together: as much as a threadgroup each. They seldom do where
// each has but a few threadgroups, for memory serves none evenly (8x1@8192, Zen
// 5: one waits for 5 to 10% of the time).
int64_t ChooseTail(const PlanOptions& options, const Impl& plan,
                   const Work& work, int num_workers) {
  if (options.partitions != PartitionMode::kAuto || num_workers == 1 ||
      work.most_partitions < kTailPartitions || work.few_keys < work.keys ||
      // The last ones to run are others there.
      options.owner == OwnerPattern::kPadded || !plan.batch_index.empty()) {
    return 0;
  }
  const int64_t share = num_workers * work.largest * plan.heads_together;
  if (share * kTailShare <= work.total || 2 * share > work.total) return 0;
  int64_t tail = 0;
  int64_t end = 0;
  for (int64_t seq = 0; seq < plan.num_seqs && tail < share; ++seq) {
    const int64_t blocks = plan.NumBlocks(seq);
    for (int64_t b = 0; b < blocks && tail < share; ++b) {
      const Impl::Item item = plan.Locate(seq, plan.FirstBlock(seq) + b);
      tail += Impl::Cost(item.num_keys(), item.num_tokens) *
              plan.layout.num_kv_heads;
      end = plan.FirstBlock(seq) + b + 1;
    }
  }
  return end;
}

void SizeSpread(Impl* plan) {
  plan->partial_base.assign(static_cast<size_t>(plan->num_seqs + 1), 0);
  for (int64_t i = 0; i < plan->num_seqs; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t q_len = plan->QueryLength(i);
    const int64_t blocks =
        plan->spreads(plan->FirstBlock(i)) ? plan->NumBlocks(i) : 0;
    int64_t partitions = 1;
    for (int64_t b = 0; b < blocks; ++b) {
      const Impl::Item item = plan->Locate(i, plan->FirstBlock(i) + b);
      partitions = std::max(partitions, item.num_partitions());
    }
    // A single partition is written straight to the output.
    const int64_t records =
        partitions > 1 ? partitions * q_len * plan->group : 0;
    plan->partial_base[at + 1] = plan->partial_base[at] + records;
  }
  const int64_t floats = plan->layout.num_kv_heads * plan->partial_base.back() *
                         PartialFloats(plan->layout.v_head_size_padded());
  if (std::cmp_less(plan->partials.size(), floats)) {
    plan->partials.resize(static_cast<size_t>(floats));
  }
  const int64_t counters = plan->layout.num_kv_heads * plan->num_query_blocks;
  if (plan->arrived_size < counters) {
    plan->arrived =
        std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(counters));
    plan->arrived_size = counters;
  }
  plan->arrived_dirty = true;
}

void CopyBatch(const Batch& batch, const AttentionShape& shape, Impl* plan) {
  plan->num_seqs = batch.num_seqs();
  plan->total_q = batch.cu_seqlens_q.back();
  plan->block_table_stride = batch.block_table_stride;
  plan->masks.clear();
  for (int64_t i = 0; i < plan->num_seqs; ++i) {
    const auto at = static_cast<size_t>(plan->BatchIndex(i));
    plan->masks.push_back(MaskOf(batch, shape, at));
  }
  if (plan->batch_index.empty()) {
    plan->cu_seqlens_q.assign(batch.cu_seqlens_q.begin(),
                              batch.cu_seqlens_q.end());
    plan->seq_lens.assign(batch.seq_lens.begin(), batch.seq_lens.end());
    plan->block_tables.assign(
        batch.block_tables.begin(),
        batch.block_tables.begin() + plan->num_seqs * batch.block_table_stride);
    return;
  }
  plan->cu_seqlens_q.assign(1, 0);
  plan->seq_lens.clear();
  plan->block_tables.clear();
  for (const int32_t index : plan->batch_index) {
    const auto at = static_cast<size_t>(index);
    const auto row =
        batch.block_tables.begin() + index * batch.block_table_stride;
    plan->first_token.push_back(batch.cu_seqlens_q[at]);
    plan->cu_seqlens_q.push_back(plan->cu_seqlens_q.back() +
                                 batch.cu_seqlens_q[at + 1] -
                                 batch.cu_seqlens_q[at]);
    plan->seq_lens.push_back(batch.seq_lens[at]);
    plan->block_tables.insert(plan->block_tables.end(), row,
                              row + batch.block_table_stride);
  }
}

Status FillPlan(const Batch& batch, const AttentionShape& shape,
                const PlanOptions& options, int num_workers, int num_nodes,
                Impl* plan) {
  CopyBatch(batch, shape, plan);
  plan->num_q_heads = shape.num_q_heads;
  plan->group = shape.num_q_heads / plan->layout.num_kv_heads;
  const double scale = shape.scale == 0
                           ? 1.0 / std::sqrt(double(plan->layout.head_size))
                           : shape.scale;
  constexpr double kLog2E = 1.44269504088896340736;
  plan->softcap = static_cast<float>(shape.softcap);
  plan->scale_log2 =
      static_cast<float>(std::abs(scale) * (plan->softcap == 0 ? kLog2E : 1.0));
  plan->negate_q = scale < 0;
  plan->owner = options.owner;

  plan->block_q = std::max(
      1, static_cast<int>(
             std::bit_floor(static_cast<unsigned>(kBlockRows / plan->group))));
  plan->num_query_blocks = plan->total_q / plan->block_q + plan->num_seqs;
  const Work work = CountWork(plan);
  const bool spread = ChooseSpread(options, *plan, work, num_workers);
  CutHeads(options, work, spread, num_workers, plan);
  plan->spread_blocks = spread ? plan->num_query_blocks
                               : ChooseTail(options, *plan, work, num_workers);
  plan->num_partitions = plan->spread_blocks > 0 ? work.most_partitions : 1;
  VARLANE_RETURN_IF_ERROR(PrepareOwners(plan));
  CutByHome(num_nodes, plan);
  CutByShard(plan);
  if (plan->spread_blocks > 0) SizeSpread(plan);
  plan->counters.resize(static_cast<size_t>(num_workers));
  plan->worker_seconds.resize(static_cast<size_t>(num_workers));
  return {};
}

}  // namespace

Impl::Item AttentionPlan::Impl::Locate(int64_t seq, int64_t block) const {
  const auto at = static_cast<size_t>(seq);
  Item item;
  item.seq = seq;
  item.q_len = QueryLength(seq);
  item.first_token = (block - FirstBlock(seq)) * block_q;
  item.num_tokens = std::min<int64_t>(block_q, item.q_len - item.first_token);
  if (item.num_tokens <= 0) return item;
  item.mask = MakeRowMask(masks[at], item.q_len, seq_lens[at]);
  item.mask.first_position += item.first_token;
  const int64_t low = item.mask.low(0);
  const int64_t high = item.mask.high(item.num_tokens - 1);
  item.partition_begin = low / kPartition;
  item.partition_end =
      std::max(item.partition_begin + 1, DivCeil<int64_t>(high, kPartition));
  return item;
}

BlockRange BlocksInView(const Batch& batch, const AttentionShape& shape,
                        int block_size, int64_t seq) {
  const auto at = static_cast<size_t>(seq);
  const int64_t q_len = batch.cu_seqlens_q[at + 1] - batch.cu_seqlens_q[at];
  if (q_len == 0) return {};
  const RowMask mask =
      MakeRowMask(MaskOf(batch, shape, at), q_len, batch.seq_lens[at]);
  return {mask.low(0) / block_size,
          DivCeil<int64_t>(mask.high(q_len - 1), block_size)};
}

Status MakePlan(const Batch& batch, const AttentionShape& shape,
                const KvView& kv, const PlanOptions& options, int num_workers,
                AttentionPlan::Impl* plan, int num_nodes) {
  plan->ready = false;
  VARLANE_RETURN_IF_ERROR(ValidateShape(shape, kv.layout));
  VARLANE_RETURN_IF_ERROR(ValidateShards(kv));
  VARLANE_RETURN_IF_ERROR(ValidateLengths(batch));
  VARLANE_RETURN_IF_ERROR(ValidateMasks(batch, shape));
  VARLANE_RETURN_IF_ERROR(ValidateTables(batch, shape, kv, plan));
  VARLANE_REQUIRE_ARG(
      options.kv_heads_per_threadgroup >= 0,
      "kv_heads_per_threadgroup = ", options.kv_heads_per_threadgroup,
      ", must not be negative");
  plan->layout = kv.layout;
  plan->kv_generation = kv.generation;
  try {
    FindHomes(batch, shape, kv, options, num_nodes, plan);
    FindShards(kv, options, num_nodes, plan);
    VARLANE_RETURN_IF_ERROR(
        FillPlan(batch, shape, options, num_workers, num_nodes, plan));
  } catch (const std::bad_alloc&) {
    return {
        StatusCode::kResourceExhausted,
        StrCat("no memory for the workspace of a plan over ", batch.num_seqs(),
               " sequences and ", batch.cu_seqlens_q.back(), " query tokens")};
  }
  plan->ready = true;
  return {};
}

}  // namespace varlane
