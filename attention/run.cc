// SPDX-License-Identifier: Apache-2.0

#include "attention/run.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <optional>

#include "attention/homes.h"
#include "attention/owner.h"
#include "attention/shards.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/math.h"

namespace varlane {
namespace {

using Impl = AttentionPlan::Impl;

template <typename Tensor>
Strides Resolve(const Tensor& tensor, int num_heads, int head_size) {
  const int64_t head = tensor.head_stride != 0 ? tensor.head_stride : head_size;
  const int64_t token = tensor.token_stride != 0
                            ? tensor.token_stride
                            : int64_t{num_heads} * head_size;
  return {token, head};
}

Status ValidateRun(const Impl& plan, const KvView& kv, int layer,
                   const AttentionTensors& tensors) {
  VARLANE_REQUIRE(plan.ready, StatusCode::kFailedPrecondition,
                  "the plan is empty: Plan was not called, or failed");
  VARLANE_REQUIRE_ARG(kv.layout == plan.layout,
                      "the KV view's layout is not the one planned for");
  VARLANE_REQUIRE_ARG(kv.num_shards == plan.view_shards,
                      "the KV view has num_shards = ", kv.num_shards,
                      ", but the plan was made for ", plan.view_shards);
  VARLANE_RETURN_IF_ERROR(ValidateShards(kv));
  VARLANE_REQUIRE_ARG(kv.base != nullptr || plan.num_blocks_needed == 0,
                      "the KV view's base is null");
  VARLANE_REQUIRE_ARG(reinterpret_cast<uintptr_t>(kv.base) % 64 == 0,
                      "the KV view's base is not 64-byte aligned");
  VARLANE_REQUIRE_ARG(kv.num_blocks >= plan.num_blocks_needed,
                      "the KV view has ", kv.num_blocks,
                      " blocks, but the plan reads block ",
                      plan.num_blocks_needed - 1);
  // An older view is no fault: a graph keeps the one it was built with.
  VARLANE_REQUIRE(kv.generation <= plan.kv_generation,
                  StatusCode::kFailedPrecondition,
                  "the plan is stale: the pool moved blocks or took some away "
                  "since (generation ",
                  kv.generation, ", planned for ", plan.kv_generation, ")");
  VARLANE_REQUIRE_ARG(layer >= 0 && layer < plan.layout.num_layers,
                      "layer = ", layer, ", but the layout has ",
                      plan.layout.num_layers, " layers");
  if (plan.total_q > 0) {
    VARLANE_REQUIRE_ARG(tensors.q.data != nullptr, "q is null");
    VARLANE_REQUIRE_ARG(tensors.out.data != nullptr, "out is null");
  }
  return {};
}

// Counters of a launch that failed half-way would make the next one merge too
// early.
void PrepareArrivals(Impl* plan) {
  if (plan->spread_blocks == 0 || !plan->arrived_dirty) return;
  for (int64_t i = 0; i < plan->arrived_size; ++i) {
    plan->arrived[static_cast<size_t>(i)].store(0, std::memory_order_relaxed);
  }
}

void FillBalance(const Impl& plan, LaunchReport* report) {
  const std::vector<double>& seconds = plan.worker_seconds;
  const auto workers = std::min<int64_t>(plan.grid_size, std::ssize(seconds));
  if (workers == 0) return;
  report->mean_worker_seconds =
      std::accumulate(seconds.begin(), seconds.end(), 0.0) /
      static_cast<double>(workers);
  report->longest_worker_seconds =
      *std::max_element(seconds.begin(), seconds.end());
}

void FillReport(const Impl& plan, double seconds, LaunchReport* report) {
  *report = {};
  report->threadgroups = plan.grid_size;
  for (const WorkerCounters& worker : plan.counters) {
    report->surplus_threadgroups += worker.surplus;
    report->owner_searches += worker.owner_searches;
    report->owner_lookups += worker.owner_lookups;
    report->owner_planned += worker.owner_planned;
    report->owner_padded += worker.owner_padded;
    report->spread_partitions += worker.spread_partitions;
    report->merges += worker.merges;
    report->home_threadgroups += worker.home;
    report->stolen_threadgroups += worker.stolen;
    report->local_bytes += worker.local_bytes;
    report->remote_bytes += worker.remote_bytes;
  }
  if (plan.num_nodes == 1) {
    report->home_threadgroups = plan.grid_size - report->surplus_threadgroups;
    report->local_bytes = plan.kv_bytes;
  }
  report->kv_bytes = plan.kv_bytes;
  report->flops = plan.flops;
  report->seconds = seconds;
  FillBalance(plan, report);
}

// The keys that some row of a threadgroup sees; none where low >= high.
struct KeyRange {
  int64_t low;
  int64_t high;
};
KeyRange KeysOf(const Assignment& work) {
  const RowMask& mask = work.item.mask;
  return {std::max(mask.low(0), work.partition_begin * kPartition),
          std::min(mask.high(work.item.num_tokens - 1),
                   work.partition_end * kPartition)};
}

// Sets `count` elements of either width.
void SetNan(void* at, DType dtype, int64_t count) noexcept {
  if (dtype == DType::kF32) {
    std::fill_n(static_cast<float*>(at), count,
                std::numeric_limits<float>::quiet_NaN());
  } else {
    const uint16_t nan = dtype == DType::kBF16 ? 0x7FC0 : 0x7E00;
    std::fill_n(static_cast<uint16_t*>(at), count, nan);
  }
}

}  // namespace

Status PlanRun::Begin(const KernelTable& table, Impl* plan, const KvView& kv,
                      int layer, const AttentionTensors& tensors) {
  VARLANE_RETURN_IF_ERROR(ValidateRun(*plan, kv, layer, tensors));
  VARLANE_REQUIRE(!plan->is_running.exchange(true, std::memory_order_acquire),
                  StatusCode::kFailedPrecondition,
                  "the plan is running already: one plan serves one Run at a "
                  "time");
  PrepareArrivals(plan);
  std::fill(plan->counters.begin(), plan->counters.end(), WorkerCounters{});
  std::fill(plan->worker_seconds.begin(), plan->worker_seconds.end(), 0.0);
  plan->arrived_dirty = true;
  plan_ = plan;
  kernels_ = &table.For(kv.layout.dtype);
  kv_ = kv;
  part_bytes_ = kv.part_bytes();
  layer_ = layer;
  tensors_ = tensors;
  q_ = Resolve(tensors.q, plan->num_q_heads, kv.layout.head_size);
  out_ = Resolve(tensors.out, plan->num_q_heads, kv.layout.v_head_size);
  JudgeCaches();
  start_ = Clock::now();
  return {};
}

void PlanRun::JudgeCaches() {
  const int64_t caches = plan_->cache_bytes;
  const KvLayout& layout = plan_->layout;
  const auto q = static_cast<int64_t>(SizeOf(tensors_.q.dtype));
  const auto out = static_cast<int64_t>(SizeOf(tensors_.out.dtype));
  const int64_t rows = plan_->total_q * plan_->num_q_heads;
  const int64_t rows_bytes =
      rows * (layout.head_size * q + layout.v_head_size * out);
  // Other layers' K/V pass the caches before this one's are read again.
  const int64_t all_kv_bytes = plan_->kv_bytes * layout.num_layers;
  cache_fit_ = caches == 0                          ? CacheFit::kFills
               : all_kv_bytes > caches              ? CacheFit::kExceeds
               : all_kv_bytes > caches - caches / 4 ? CacheFit::kFills
                                                    : CacheFit::kFits;
  streams_out_ = caches > 0 && rows_bytes >= caches;
}

void PlanRun::End(bool complete, bool fill_nan, LaunchReport* report) noexcept {
  if (complete) {
    plan_->arrived_dirty = false;
    if (report != nullptr) {
      FillReport(*plan_, SecondsSince(start_), report);
    }
  } else if (fill_nan) {
    FillNan();
  }
  plan_->is_running.store(false, std::memory_order_release);
}

size_t PlanRun::scratch_bytes() const noexcept {
  const int64_t of_head =
      std::min<int64_t>(plan_->block_q, plan_->total_q) * plan_->group;
  // One head's, or those of all heads where they are few.
  const int64_t rows = std::max(
      of_head,
      std::min<int64_t>(of_head * plan_->heads_together, kMostRowsTogether));
  return kernels_->attend_scratch_bytes(static_cast<int>(rows),
                                        plan_->layout.head_size,
                                        plan_->layout.v_head_size);
}

void PlanRun::FillNan() const noexcept {
  const MutableTensor& out = tensors_.out;
  const int num_heads = plan_->num_q_heads;
  for (int64_t token = 0; token < plan_->total_q; ++token) {
    for (int head = 0; head < num_heads; ++head) {
      SetNan(static_cast<std::byte*>(out.data) +
                 (token * out_.token + head * out_.head) *
                     static_cast<int64_t>(SizeOf(out.dtype)),
             out.dtype, plan_->layout.v_head_size);
    }
  }
  if (tensors_.lse != nullptr) {
    SetNan(tensors_.lse, DType::kF32, plan_->total_q * num_heads);
  }
}

template <bool kTraced>
void PlanRun::Attend(const Threadgroup& tg) const {
  WorkerCounters& count = plan_->counters[static_cast<size_t>(tg.worker())];
  const std::optional<Assignment> assigned = Assign(*plan_, tg.index(), count);
  if (!assigned) {
    if constexpr (kTraced) tg.MarkSurplus();
    return;
  }
  const Assignment& work = *assigned;
  if constexpr (kTraced) Annotate(tg, work);
  if (plan_->counts_locality()) CountKeys(tg, work, &count);
  if (!work.is_whole()) {
    RunPartition(tg, work, count);
    return;
  }
  AttendHeads(tg, work, nullptr, 0);
}

template void PlanRun::Attend<false>(const Threadgroup& tg) const;
template void PlanRun::Attend<true>(const Threadgroup& tg) const;

void PlanRun::Annotate(const Threadgroup& tg, const Assignment& work) const {
  const auto [low, high] = KeysOf(work);
  TraceNote note;
  note.sequence = plan_->BatchIndex(work.item.seq);
  note.head = work.head;
  note.partition_begin = static_cast<int32_t>(work.partition_begin);
  note.partition_end = static_cast<int32_t>(work.partition_end);
  note.bytes = std::max<int64_t>(high - low, 0) * plan_->key_bytes();
  tg.Annotate(note);
}

void PlanRun::CountKeys(const Threadgroup& tg, const Assignment& work,
                        WorkerCounters* count) const {
  const auto [low, high] = KeysOf(work);
  if (plan_->shards_known) {
    CountShardLocality(*plan_, tg.node(), work.head, low, high, count);
  } else {
    CountLocality(*plan_, tg.node(), work.item.seq, low, high, count);
  }
}

// Into the output, or into records of partial states.
void PlanRun::AttendHeads(const Threadgroup& tg, const Assignment& work,
                          float* partials, int64_t head_stride) const {
  const Item& item = work.item;
  const int heads = plan_->heads_together;
  const int step =
      GoTogether(item.num_tokens * plan_->group, heads) ? heads : 1;
  for (int head = 0; head < heads; head += step) {
    AttendArgs args = Args(tg, item, work.head + head);
    args.num_kv_heads = step;
    args.partition_begin = work.partition_begin;
    args.partition_end = work.partition_end;
    if (partials != nullptr) {
      args.partials = partials + head * head_stride;
      args.partials_head_stride = head_stride;
    } else {
      Finish(item, work.head + head, &args);
    }
    if (head + step < heads) {
      Aim(work, head + step, &args);
    } else {
      AimNext(tg.next(), &args);
    }
    kernels_->attend(args);
  }
}

AttendArgs PlanRun::Args(const Threadgroup& tg, const Item& item,
                         int head) const {
  const KvLayout& layout = plan_->layout;
  const int64_t q_head = int64_t{head} * plan_->group;
  AttendArgs args;
  args.q = QueryOf(item, head);
  args.q_dtype = tensors_.q.dtype;
  args.q_token_stride = q_.token;
  args.q_head_stride = q_.head;
  args.num_tokens = static_cast<int>(item.num_tokens);
  args.group = plan_->group;
  args.head_size = layout.head_size;
  args.v_head_size = layout.v_head_size;
  args.scale_log2 = plan_->scale_log2;
  args.negate_q = plan_->negate_q;
  args.kv = PagesOf(item, head);
  args.k_head_bytes = layout.k_head_bytes();
  args.v_head_bytes = layout.v_head_bytes();
  args.cache_fit = cache_fit_;
  args.streams_out = streams_out_;
  args.mask = item.mask;
  args.softcap = plan_->softcap;
  if (tensors_.alibi_slopes != nullptr) {
    args.alibi_slopes = tensors_.alibi_slopes + q_head;
  }
  args.scratch = tg.scratch().data();
  return args;
}

// While a worker finishes this threadgroup, it fetches the first keys of its
// next one.
void PlanRun::AimNext(int64_t index, AttendArgs* args) const {
  if (index == Threadgroup::kUnknown) return;
  WorkerCounters uncounted;
  const std::optional<Assignment> next = Assign(*plan_, index, uncounted);
  if (next) Aim(*next, 0, args);
}

void PlanRun::Aim(const Assignment& work, int head, AttendArgs* args) const {
  const KeyRange keys = KeysOf(work);
  args->next_low = keys.low;
  args->next_high = keys.high;
  if (args->next_low >= args->next_high) return;
  args->next = PagesOf(work.item, work.head + head);
  args->next_q = QueryOf(work.item, work.head + head);
  args->next_tokens = static_cast<int>(work.item.num_tokens);
}

const void* PlanRun::QueryOf(const Item& item, int head) const {
  const int64_t q_head = int64_t{head} * plan_->group;
  return static_cast<const std::byte*>(tensors_.q.data) +
         (TokenOf(item) * q_.token + q_head * q_.head) *
             static_cast<int64_t>(SizeOf(tensors_.q.dtype));
}

KvPages PlanRun::PagesOf(const Item& item, int head) const {
  KvPages pages;
  pages.k = kv_.k(0, layer_, head);
  pages.v = kv_.v(0, layer_, head);
  pages.block_bytes = part_bytes_;
  pages.block_table =
      plan_->block_tables.data() + item.seq * plan_->block_table_stride;
  pages.block_size_log2 =
      std::countr_zero(static_cast<unsigned>(plan_->layout.block_size));
  return pages;
}

int64_t PlanRun::TokenOf(const Item& item) const {
  return plan_->FirstToken(item.seq) + item.first_token;
}

template <typename KernelArgs>
void PlanRun::Finish(const Item& item, int head, KernelArgs* args) const {
  const int64_t token = TokenOf(item);
  const int64_t q_head = int64_t{head} * plan_->group;
  args->out = static_cast<std::byte*>(tensors_.out.data) +
              (token * out_.token + q_head * out_.head) *
                  static_cast<int64_t>(SizeOf(tensors_.out.dtype));
  args->out_dtype = tensors_.out.dtype;
  args->out_token_stride = out_.token;
  args->out_head_stride = out_.head;
  args->lse_token_stride = plan_->num_q_heads;
  args->lse = tensors_.lse == nullptr
                  ? nullptr
                  : tensors_.lse + token * plan_->num_q_heads + q_head;
  args->sinks = tensors_.sinks == nullptr ? nullptr : tensors_.sinks + q_head;
}

// One partition of a spread item; whoever arrives last merges. Nobody waits.
void PlanRun::RunPartition(const Threadgroup& tg, const Assignment& work,
                           WorkerCounters& count) const {
  const Item& item = work.item;
  const int64_t record = PartialFloats(plan_->layout.v_head_size_padded());
  const auto at = static_cast<size_t>(item.seq);
  const int64_t per_partition = item.q_len * plan_->group * record;
  const int64_t per_head = plan_->partial_base.back() * record;
  float* base =
      plan_->partials.data() + work.head * per_head +
      (plan_->partial_base[at] + item.first_token * plan_->group) * record;
  AttendHeads(
      tg, work,
      base + (work.partition_begin - item.partition_begin) * per_partition,
      per_head);
  ++count.spread_partitions;

  std::atomic<int32_t>& arrived = plan_->arrived[static_cast<size_t>(
      work.head * plan_->num_query_blocks + work.block)];
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 !=
      item.num_partitions()) {
    return;
  }
  arrived.store(0, std::memory_order_relaxed);  // for the next layer
  ++count.merges;
  MergeArgs merge;
  merge.num_partials = item.num_partitions();
  merge.partial_stride = per_partition;
  merge.num_tokens = static_cast<int>(item.num_tokens);
  merge.group = plan_->group;
  merge.v_head_size = plan_->layout.v_head_size;
  merge.scratch = tg.scratch().data();
  for (int head = 0; head < plan_->heads_together; ++head) {
    merge.partials = base + head * per_head;
    Finish(item, work.head + head, &merge);
    kernels_->merge(merge);
  }
}

Status RunPlan(Runtime* runtime, const KernelTable& table, Impl* plan,
               const KvView& kv, int layer, const AttentionTensors& tensors,
               const RunOptions& options) {
  PlanRun run;
  VARLANE_RETURN_IF_ERROR(run.Begin(table, plan, kv, layer, tensors));
  LaunchOptions launch;
  launch.scratch_bytes = run.scratch_bytes();
  launch.stop = options.stop;
  launch.deadline = options.deadline;
  launch.priority = options.priority;
  launch.name = "attention";
  if (options.report != nullptr) launch.worker_seconds = run.worker_seconds();
  const auto traced = [&run](const Threadgroup& tg) { run.RunTraced(tg); };
  const FunctionRef<void(const Threadgroup&)> traced_body = traced;
  launch.traced_body = &traced_body;
  const Status status = runtime->Launch(run.grid(), run, launch);
  run.End(status.ok(), options.fill_nan, options.report);
  return status;
}

}  // namespace varlane
