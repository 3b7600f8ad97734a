// Replay: a trace through scheduler, pool and attention, layer by layer.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/replay.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tools/clock.h"
#include "tools/metrics_file.h"
#include "tools/progress.h"
#include "tools/replay_log.h"
#include "tools/replay_sizing.h"
#include "tools/replay_verify.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

// Adds the time of a scope to a phase.
class PhaseTimer {
 public:
  explicit PhaseTimer(double* seconds)
      : seconds_(seconds), start_(Clock::now()) {}
  ~PhaseTimer() { *seconds_ += SecondsSince(start_); }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  double* seconds_;
  Clock::time_point start_;
};

class Replay {
 public:
  Replay(const ReplayOptions& options, const Workload& workload,
         Runtime* runtime)
      : options_(options),
        workload_(workload),
        runtime_(runtime),
        metrics_(options.metrics_file),
        buffers_(options.model, &workload),
        log_(static_cast<size_t>(workload.size())) {}

  Result<ReplayResult> Run();

 private:
  Status Create();
  // Submits what has arrived (open loop) or what there is room for (closed).
  Status Submit();
  // False where it was refused for now.
  Result<bool> SubmitNext(double arrival);
  bool HasMore() const { return next_ < workload_.size(); }
  double ArrivalOf(int64_t request) const;
  // Nothing to run: waits for the next arrival, or says why that is an error.
  Status WaitForArrival();
  Status RunStep();
  Status BetweenSteps();
  MetricsSources Sources() const {
    return {.pool = pool_.get(),
            .scheduler = scheduler_.get(),
            .pressure = pressure_.get()};
  }
  Status RunLayer(int layer);
  Status CompleteStep(double step_seconds);
  void CountStep(double step_seconds);
  void Finish();

  // The serving clock.
  double Now() const {
    return SecondsSince(start_) - result_.seconds.generate -
           result_.seconds.verify;
  }

  const ReplayOptions& options_;
  const Workload& workload_;
  Runtime* runtime_;
  std::unique_ptr<Attention> attention_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<ServingPressure> pressure_;
  MetricsFile metrics_;
  std::optional<StepVerifier> verifier_;
  StepBuffers buffers_;
  RequestLog log_;
  Step step_;
  AttentionPlan plan_;
  std::vector<RequestId> ended_;
  std::vector<int32_t> prompt_;   // of the request being submitted
  std::vector<int32_t> sampled_;  // of the step
  std::vector<double> step_seconds_;
  std::vector<double> step_tokens_;
  std::vector<double> step_seqs_;
  Clock::time_point start_;
  int64_t next_ = 0;       // request to submit next
  int64_t in_flight_ = 0;  // submitted and not ended
  ReplayResult result_;
};

Status Replay::Create() {
  VARLANE_TOOLS_ASSIGN(attention_, Attention::Create(runtime_));
  VARLANE_TOOLS_ASSIGN(result_.sizing,
                       SizePool(options_, workload_, runtime_->num_workers()));
  KvPoolOptions pool;
  pool.layout = ReplayLayout(options_);
  pool.num_blocks = result_.sizing.blocks;
  pool.huge_pages = runtime_->options().huge_pages;
  pool.shard_heads = options_.shard_heads;
  pool.prefix_cache = options_.prefix_cache;
  VARLANE_TOOLS_ASSIGN(pool_, KvPool::Create(pool, runtime_));
  result_.head_shards = pool_->num_shards();
  VARLANE_TOOLS_ASSIGN(scheduler_,
                       Scheduler::Create(options_.scheduler, pool_.get()));
  if (options_.pressure) {
    ServingPressureOptions pressure;
    VARLANE_TOOLS_ASSIGN(pressure.monitor, PressureOptions::FromEnvironment());
    pressure.monitor.root = options_.memory_root;
    VARLANE_TOOLS_ASSIGN(
        pressure_,
        ServingPressure::Create(pressure, pool_.get(), scheduler_.get()));
  }
  VARLANE_TOOLS_TRY(metrics_.Write(Sources()));
  if (options_.verify_share > 0) {
    verifier_.emplace(options_.model, options_.kv_dtype, options_.verify_share,
                      &workload_, runtime_);
  }
  result_.simd_target = attention_->simd_target();
  result_.workers = runtime_->num_workers();
  return {};
}

double Replay::ArrivalOf(int64_t request) const {
  return static_cast<double>(workload_.request(request).arrival_ns) * 1e-9 /
         options_.rate;
}

Result<bool> Replay::SubmitNext(double arrival) {
  const TraceRequest& from = workload_.request(next_);
  Request request;
  request.id = next_;
  request.prompt_tokens = from.input_tokens;
  request.max_new_tokens = from.output_tokens;
  if (options_.prefix_cache) {
    prompt_ = workload_.Prompt(next_);
    request.prompt = prompt_;
  }
  const Result<Admission> submitted = scheduler_->Submit(request);
  if (submitted.status().code() == StatusCode::kUnavailable) return false;
  VARLANE_TOOLS_ASSIGN(const Admission admission, submitted);
  if (admission.kind == Admission::Kind::kNeverFits) {
    ++result_.never_fit;
  } else {
    log_.Arrived(next_, arrival);
    ++result_.submitted;
    ++in_flight_;
  }
  ++next_;
  return true;
}

Status Replay::Submit() {
  const double now = Now();
  if (options_.rate > 0) {
    while (HasMore() && ArrivalOf(next_) <= now) {
      VARLANE_TOOLS_ASSIGN(const bool taken, SubmitNext(ArrivalOf(next_)));
      if (!taken) break;
    }
    return {};
  }
  while (HasMore() && in_flight_ < options_.concurrency) {
    VARLANE_TOOLS_ASSIGN(const bool taken, SubmitNext(now));
    if (!taken) break;
  }
  return {};
}

Status Replay::WaitForArrival() {
  const bool may_wait = options_.rate > 0 || pressure_ != nullptr;
  if (!HasMore() || !may_wait || !scheduler_->idle()) {
    const SchedulerStats stats = scheduler_->stats();
    return Fail(StatusCode::kInternal,
                "the scheduler made an empty step with {} requests waiting and "
                "{} running",
                stats.waiting, stats.running);
  }
  PhaseTimer timer(&result_.seconds.idle);
  // In slices, so that a progress bar moves, and shorter ones where the next
  // request has arrived but memory is short.
  const double left = options_.rate > 0 && ArrivalOf(next_) > Now()
                          ? std::min(ArrivalOf(next_) - Now(), 0.1)
                          : (pressure_ != nullptr ? 0.01 : 0);
  if (left > 0)
    std::this_thread::sleep_for(std::chrono::duration<double>(left));
  return {};
}

Status Replay::RunLayer(int layer) {
  PhaseSeconds& seconds = result_.seconds;
  const KvView kv = pool_->view();
  {
    PhaseTimer timer(&seconds.generate);
    VARLANE_TOOLS_TRY(buffers_.Generate(layer, runtime_));
  }
  {
    PhaseTimer timer(&seconds.write_kv);
    VARLANE_TOOLS_TRY(
        attention_->WriteKv(kv, layer, {buffers_.k(), DType::kBF16},
                            {buffers_.v(), DType::kBF16}, step_.slot_mapping));
  }
  {
    PhaseTimer timer(&seconds.attention);
    AttentionTensors tensors;
    tensors.q = {buffers_.q(), DType::kBF16};
    tensors.out = {buffers_.out(), DType::kF32};
    tensors.lse = buffers_.lse();
    LaunchReport report;
    VARLANE_TOOLS_TRY(attention_->Run(&plan_, kv, layer, tensors, &report));
    result_.launches += report;
  }
  ++result_.num_launches;
  if (plan_.spreads_partitions()) ++result_.spread_launches;
  if (!verifier_) return {};
  PhaseTimer timer(&seconds.verify);
  return verifier_->CheckLayer(step_, layer, &buffers_);
}

void Replay::CountStep(double step_seconds) {
  const auto decodes =
      std::count_if(step_.entries.begin(), step_.entries.end(),
                    [](const StepEntry& entry) { return !entry.is_prefill; });
  const auto num_seqs = static_cast<int64_t>(step_.entries.size());
  if (decodes == num_seqs) {
    ++result_.decode_steps;
  } else if (decodes == 0) {
    ++result_.prefill_steps;
  } else {
    ++result_.mixed_steps;
  }
  step_seconds_.push_back(step_seconds);
  step_tokens_.push_back(static_cast<double>(step_.total_q()));
  step_seqs_.push_back(static_cast<double>(num_seqs));
  const double use = 1 - static_cast<double>(pool_->free_blocks()) /
                             static_cast<double>(pool_->capacity_blocks());
  result_.kv_use.Add(use);
  if (options_.tracer != nullptr) {
    options_.tracer->Counter("KV pool use, %", use * 100);
    options_.tracer->Counter("query tokens of a step",
                             static_cast<double>(step_.total_q()));
  }
  result_.peak_kv_use = std::max(result_.peak_kv_use, use);
}

Status Replay::CompleteStep(double step_start) {
  const double now = Now();
  sampled_.clear();
  for (const StepEntry& entry : step_.entries) {
    if (!entry.samples) continue;
    log_.Token(entry.request, now);
    if (!options_.prefix_cache) continue;
    sampled_.push_back(
        workload_.TokenIdAt(entry.request, entry.begin + entry.count));
  }
  CountStep(now - step_start);
  PhaseTimer timer(&result_.seconds.schedule);
  ended_.clear();
  VARLANE_TOOLS_TRY(scheduler_->Complete(step_, {}, &ended_, sampled_));
  for (const RequestId id : ended_) log_.Ended(id);
  in_flight_ -= static_cast<int64_t>(ended_.size());
  return {};
}

Status Replay::RunStep() {
  const double step_start = Now();
  {
    PhaseTimer timer(&result_.seconds.schedule);
    VARLANE_TOOLS_TRY(scheduler_->Schedule(&step_));
  }
  if (step_.empty()) {
    // Every request left may have been larger than the pool.
    if (scheduler_->idle() && !HasMore()) return {};
    return WaitForArrival();
  }
  {
    PhaseTimer timer(&result_.seconds.generate);
    VARLANE_TOOLS_TRY(buffers_.Prepare(step_));
  }
  {
    PhaseTimer timer(&result_.seconds.plan);
    AttentionShape shape;
    shape.num_q_heads = options_.model.num_q_heads;
    VARLANE_TOOLS_TRY(attention_->Plan(step_.batch(), shape, pool_->view(),
                                       options_.plan, &plan_));
  }
  for (int layer = 0; layer < options_.model.num_layers; ++layer) {
    VARLANE_TOOLS_TRY(RunLayer(layer));
  }
  return CompleteStep(step_start);
}

void Replay::Finish() {
  result_.seconds.wall = SecondsSince(start_);
  result_.pool = pool_->stats();
  result_.prefixes = pool_->prefix_stats();
  result_.scheduler = scheduler_->stats();
  result_.ended = log_.ended();
  result_.generated_tokens = log_.generated_tokens();
  result_.ttft = log_.TimeToFirstToken();
  result_.tpot = log_.TimePerOutputToken();
  result_.step_seconds = ComputePercentiles(std::move(step_seconds_));
  result_.step_tokens = ComputePercentiles(std::move(step_tokens_));
  result_.step_seqs = ComputePercentiles(std::move(step_seqs_));
  if (pressure_) result_.pressure = pressure_->stats();
  if (verifier_) result_.verify = verifier_->result();
}

Status Replay::BetweenSteps() {
  if (pressure_) {
    PhaseTimer timer(&result_.seconds.resize);
    pressure_->Update();
  }
  return metrics_.Update(Sources());
}

Result<ReplayResult> Replay::Run() {
  VARLANE_TOOLS_TRY(Create());
  Progress progress("replay");
  start_ = Clock::now();
  while (HasMore() || !scheduler_->idle()) {
    VARLANE_TOOLS_TRY(Submit());
    VARLANE_TOOLS_TRY(RunStep());
    VARLANE_TOOLS_TRY(BetweenSteps());
    const SchedulerStats stats = scheduler_->stats();
    progress.Update(static_cast<double>(log_.ended() + result_.never_fit),
                    static_cast<double>(workload_.size()),
                    fmt::format("step {}, {} running, {} waiting", stats.steps,
                                stats.running, stats.waiting));
  }
  MetricsSources sources = Sources();
  sources.placement = true;
  VARLANE_TOOLS_TRY(metrics_.Write(sources));
  Finish();
  return std::move(result_);
}

}  // namespace

Result<ReplayResult> RunReplay(const ReplayOptions& options,
                               const Workload& workload, Runtime* runtime) {
  return Replay(options, workload, runtime).Run();
}

}  // namespace varlane::tools
