// StressEngine: the smallest service there is - a pool, a scheduler, attention
// - which serves a trace again and again on one pool, as fast as it can.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_STRESS_ENGINE_H_
#define VARLANE_TOOLS_STRESS_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tools/output_digests.h"
#include "tools/replay_inputs.h"
#include "varlane/attention.h"
#include "varlane/kv_pool.h"
#include "varlane/runtime.h"
#include "varlane/scheduler.h"
#include "varlane/status.h"
#include "varlane/swap.h"

namespace varlane::tools {

struct StressEngineOptions {
  ModelShape model;
  KvLayout layout;
  int64_t num_blocks = 0;
  bool shard_heads = false;  // KvPoolOptions'
  int64_t concurrency = 32;  // requests in flight
  int64_t token_budget = 2048;
  EvictionPolicy eviction = EvictionPolicy::kByCost;
  std::string swap_folder;
  int64_t swap_bytes = 0;  // 0 = preempted requests are computed again
};

// Seconds of the rounds so far.
struct StressSeconds {
  double wall = 0;
  double inputs = 0;  // making Q, K and V; digests
};

class StressEngine {
 public:
  // Errors: those of the parts. Lifetime: both must outlive it.
  static Result<std::unique_ptr<StressEngine>> Create(
      const StressEngineOptions& options, const Workload* workload,
      Runtime* runtime);

  // Serves every request to its end. `between_steps` is called where the pool
  // may change its size; new work that is refused is offered again.
  // Errors: what a service would see, kInternal where a request cannot be
  //         served at all.
  Status Round(OutputDigests* digests,
               const std::function<Status()>& between_steps);

  // With no request left: nothing is held any more, and the pool's books agree.
  Status CheckEmpty() const;

  KvPool* pool() { return pool_.get(); }
  Scheduler* scheduler() { return scheduler_.get(); }
  SwapStats swap_stats() const;
  const StressSeconds& seconds() const { return seconds_; }
  int64_t ended() const { return ended_count_; }
  int64_t refused() const { return refused_; }  // offered again each step

 private:
  StressEngine(const StressEngineOptions& options, const Workload* workload,
               Runtime* runtime)
      : options_(options),
        workload_(workload),
        runtime_(runtime),
        buffers_(options.model, workload) {}
  Status CreateParts();
  // What there is room for.
  Status Submit();
  Status RunStep(OutputDigests* digests);
  Status RunLayer(int layer, OutputDigests* digests);

  const StressEngineOptions options_;
  const Workload* workload_;
  Runtime* runtime_;
  std::unique_ptr<Attention> attention_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<SequenceSwapper> swapper_;
  std::unique_ptr<Scheduler> scheduler_;
  StepBuffers buffers_;
  Step step_;
  AttentionPlan plan_;
  std::vector<RequestId> ended_;
  int64_t next_ = 0;       // request to submit next
  int64_t in_flight_ = 0;  // submitted and not ended
  int64_t ended_count_ = 0;
  int64_t refused_ = 0;
  StressSeconds seconds_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_STRESS_ENGINE_H_
