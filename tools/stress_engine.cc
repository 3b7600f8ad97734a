// SPDX-License-Identifier: Apache-2.0

#include "tools/stress_engine.h"

#include <chrono>
#include <thread>

#include "tools/clock.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

// Adds the time of a scope to a sum.
class ScopeTimer {
 public:
  explicit ScopeTimer(double* seconds)
      : seconds_(seconds), start_(Clock::now()) {}
  ~ScopeTimer() {
    *seconds_ += std::chrono::duration<double>(Clock::now() - start_).count();
  }
  ScopeTimer(const ScopeTimer&) = delete;
  ScopeTimer& operator=(const ScopeTimer&) = delete;

 private:
  double* seconds_;
  Clock::time_point start_;
};

}  // namespace

Result<std::unique_ptr<StressEngine>> StressEngine::Create(
    const StressEngineOptions& options, const Workload* workload,
    Runtime* runtime) {
  std::unique_ptr<StressEngine> engine(
      new StressEngine(options, workload, runtime));
  VARLANE_TOOLS_TRY(engine->CreateParts());
  return engine;
}

Status StressEngine::CreateParts() {
  VARLANE_TOOLS_ASSIGN(attention_, Attention::Create(runtime_));
  KvPoolOptions pool;
  pool.layout = options_.layout;
  pool.num_blocks = options_.num_blocks;
  pool.huge_pages = runtime_->options().huge_pages;
  pool.shard_heads = options_.shard_heads;
  VARLANE_TOOLS_ASSIGN(pool_, KvPool::Create(pool, runtime_));
  SchedulerOptions scheduler;
  scheduler.token_budget = options_.token_budget;
  scheduler.watermark = 0;  // requests shall preempt each other
  scheduler.eviction = options_.eviction;
  if (options_.swap_bytes > 0) {
    SwapOptions swap;
    swap.folder = options_.swap_folder;
    swap.max_bytes = options_.swap_bytes;
    VARLANE_TOOLS_ASSIGN(swapper_, SequenceSwapper::Create(swap, pool_.get()));
    scheduler.swapper = swapper_.get();
  }
  VARLANE_TOOLS_ASSIGN(scheduler_, Scheduler::Create(scheduler, pool_.get()));
  return {};
}

Status StressEngine::Submit() {
  while (next_ < workload_->size() && in_flight_ < options_.concurrency) {
    const TraceRequest& from = workload_->request(next_);
    Request request;
    request.id = next_;
    request.prompt_tokens = from.input_tokens;
    request.max_new_tokens = from.output_tokens;
    const Result<Admission> admission = scheduler_->Submit(request);
    if (admission.status().code() == StatusCode::kUnavailable) {
      ++refused_;
      return {};
    }
    VARLANE_TOOLS_TRY(admission.status());
    if (admission->kind == Admission::Kind::kNeverFits) {
      return Fail(StatusCode::kInternal,
                  "request {} was turned away: it needs {} blocks and the pool "
                  "has {}",
                  next_, admission->needed_blocks, admission->capacity_blocks);
    }
    ++next_;
    ++in_flight_;
  }
  return {};
}

Status StressEngine::RunLayer(int layer, OutputDigests* digests) {
  const KvView kv = pool_->view();
  {
    ScopeTimer timer(&seconds_.inputs);
    VARLANE_TOOLS_TRY(buffers_.Generate(layer, runtime_));
  }
  VARLANE_TOOLS_TRY(attention_->WriteKv(kv, layer, {buffers_.k(), DType::kBF16},
                                        {buffers_.v(), DType::kBF16},
                                        step_.slot_mapping));
  AttentionTensors tensors;
  tensors.q = {buffers_.q(), DType::kBF16};
  tensors.out = {buffers_.out(), DType::kF32};
  tensors.lse = buffers_.lse();
  VARLANE_TOOLS_TRY(attention_->Run(&plan_, kv, layer, tensors));
  ScopeTimer timer(&seconds_.inputs);
  const int64_t heads = options_.model.num_q_heads;
  digests->AddLayer(step_, layer, buffers_.out(),
                    heads * options_.model.head_size, buffers_.lse(), heads);
  return {};
}

Status StressEngine::RunStep(OutputDigests* digests) {
  VARLANE_TOOLS_TRY(scheduler_->Schedule(&step_));
  if (step_.empty()) {
    // Work is refused or waits for blocks: pressure has to pass first.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return {};
  }
  {
    ScopeTimer timer(&seconds_.inputs);
    VARLANE_TOOLS_TRY(buffers_.Prepare(step_));
  }
  AttentionShape shape;
  shape.num_q_heads = options_.model.num_q_heads;
  VARLANE_TOOLS_TRY(
      attention_->Plan(step_.batch(), shape, pool_->view(), {}, &plan_));
  for (int layer = 0; layer < options_.model.num_layers; ++layer) {
    VARLANE_TOOLS_TRY(RunLayer(layer, digests));
  }
  digests->EndStep(step_);
  ended_.clear();
  VARLANE_TOOLS_TRY(scheduler_->Complete(step_, {}, &ended_));
  in_flight_ -= static_cast<int64_t>(ended_.size());
  ended_count_ += static_cast<int64_t>(ended_.size());
  return {};
}

Status StressEngine::Round(OutputDigests* digests,
                           const std::function<Status()>& between_steps) {
  ScopeTimer timer(&seconds_.wall);
  next_ = 0;
  while (next_ < workload_->size() || in_flight_ > 0) {
    VARLANE_TOOLS_TRY(Submit());
    VARLANE_TOOLS_TRY(RunStep(digests));
    VARLANE_TOOLS_TRY(between_steps());
  }
  return {};
}

Status StressEngine::CheckEmpty() const {
  VARLANE_TOOLS_TRY(pool_->CheckInvariants());
  const KvPoolStats pool = pool_->stats();
  const int64_t stored = swap_stats().stored_blocks;
  if (scheduler_->idle() && pool.referenced_blocks == 0 &&
      pool.sequences == 0 && pool.outstanding_steps == 0 && stored == 0) {
    return {};
  }
  return Fail(StatusCode::kInternal,
              "leaked: every request has ended, but {} blocks, {} sequences, "
              "{} steps and {} blocks of the swap file are held",
              pool.referenced_blocks, pool.sequences, pool.outstanding_steps,
              stored);
}

SwapStats StressEngine::swap_stats() const {
  return swapper_ ? swapper_->stats() : SwapStats();
}

}  // namespace varlane::tools
