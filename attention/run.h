// Running a plan: threadgroups over the runtime, kernels over the pool.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_RUN_H_
#define VARLANE_ATTENTION_RUN_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/plan.h"
#include "kernels/kernel_table.h"
#include "varlane/attention.h"
#include "varlane/runtime.h"

namespace varlane {

struct Assignment;

// Strides of a tensor with their defaults filled in, in elements.
struct Strides {
  int64_t token = 0;
  int64_t head = 0;
};

// One layer's launch of a plan: what every threadgroup reads, and nothing it
// writes but counters. Begin, the bodies, End; then it may begin again.
class PlanRun {
 public:
  // Validates, and takes the plan until End. Errors: as Attention::Run.
  Status Begin(const KernelTable& table, AttentionPlan::Impl* plan,
               const KvView& kv, int layer, const AttentionTensors& tensors);
  // Requires: Begin returned OK, and no body runs any more. A launch that is
  // not `complete` has no report; with `fill_nan` its output becomes NaN.
  void End(bool complete, bool fill_nan, LaunchReport* report) noexcept;

  Grid grid() const noexcept {
    return {.num_threadgroups = plan_->grid_size,
            .node_begin = plan_->node_begin,
            .claims_ahead = true};
  }
  size_t scratch_bytes() const noexcept;  // per worker
  // Where a launch adds what each worker spent; for the report.
  std::span<double> worker_seconds() const noexcept {
    return plan_->worker_seconds;
  }

  // The body, and the one that also says what its slice of a trace is about.
  void operator()(const Threadgroup& group) const { Attend<false>(group); }
  void RunTraced(const Threadgroup& group) const { Attend<true>(group); }

 private:
  using Item = AttentionPlan::Impl::Item;

  template <bool kTraced>
  void Attend(const Threadgroup& group) const;
  void Annotate(const Threadgroup& group, const Assignment& work) const;
  void AttendHeads(const Threadgroup& group, const Assignment& work,
                   float* partials, int64_t head_stride) const;
  AttendArgs Args(const Threadgroup& group, const Item& item, int head) const;
  void AimNext(int64_t index, AttendArgs* args) const;
  void Aim(const Assignment& work, int head, AttendArgs* args) const;
  KvPages PagesOf(const Item& item, int head) const;
  // Its first row of a KV head.
  const void* QueryOf(const Item& item, int head) const;
  int64_t TokenOf(const Item& item) const;
  // Not inlined, so that Attend's code does not depend on its traced twin
  // (tools/check_trace_code.py).
  template <typename KernelArgs>
  [[gnu::noinline]] void Finish(const Item& item, int head,
                                KernelArgs* args) const;
  [[gnu::noinline]] void CountKeys(const Threadgroup& group,
                                   const Assignment& work,
                                   WorkerCounters* count) const;
  void RunPartition(const Threadgroup& group, const Assignment& work,
                    WorkerCounters& count) const;
  void FillNan() const noexcept;
  // What the caches cannot hold. Output is streamed where q and out fill them:
  // its reader would not find it there (Zen 5, 8x512, launch and reading out
  // together, q and out of 32 to 64 MB beside an L3 of 32: 1 to 2% faster; of 8
  // to 12 MB: even to 2% slower).
  void JudgeCaches();

  AttentionPlan::Impl* plan_ = nullptr;
  const KvKernels* kernels_ = nullptr;
  KvView kv_;
  int64_t part_bytes_ = 0;  // KvView's
  int layer_ = 0;
  AttentionTensors tensors_;
  Strides q_;
  Strides out_;
  CacheFit cache_fit_ = CacheFit::kFills;  // AttendArgs'
  bool streams_out_ = false;               // AttendArgs'
  std::chrono::steady_clock::time_point start_;
};

// Errors: as Attention::Run.
Status RunPlan(Runtime* runtime, const KernelTable& table,
               AttentionPlan::Impl* plan, const KvView& kv, int layer,
               const AttentionTensors& tensors, const RunOptions& options);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_RUN_H_
