// Replay: a trace through scheduler, pool and attention, layer by layer.
//
// Each step runs what a service's engine runs - schedule, plan once, then per
// layer write K/V and attend - with synthetic Q/K/V in place of a model. The
// *serving clock* is the wall clock without what a service would not do:
// making inputs and verifying stop it. Arrivals, latencies and rates are on it.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_REPLAY_H_
#define VARLANE_TOOLS_REPLAY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "tools/model_presets.h"
#include "tools/replay_inputs.h"
#include "tools/report.h"
#include "tools/verify.h"
#include "varlane/attention.h"
#include "varlane/dtype.h"
#include "varlane/kv_pool.h"
#include "varlane/memory_budget.h"
#include "varlane/runtime.h"
#include "varlane/scheduler.h"
#include "varlane/serving_pressure.h"
#include "varlane/status.h"

namespace varlane::tools {

struct ReplayOptions {
  ModelShape model;
  DType kv_dtype = DType::kBF16;
  int block_size = 16;
  SchedulerOptions scheduler;
  PlanOptions plan;
  double verify_share = 0;
  double rate = 0;           // > 0: open loop, time runs this much faster
  int64_t concurrency = 32;  // closed loop: requests in flight
  int64_t kv_blocks = 0;     // either of these fixes the pool; both 0: the
  int64_t kv_bytes = 0;      //   memory budget does
  double fraction = 0;       // claim policy; 0 = environment, else what fits
  int64_t weights_bytes = 0;
  bool shard_heads = false;  // KvPoolOptions'
  bool prefix_cache = true;  // what the pool knows of a prompt is not computed
  std::string memory_root;   // tests: where /proc and /sys are
  Tracer* tracer = nullptr;  // gets the pool's use, step by step
  bool pressure = false;     // gives memory back where it is short
  std::string metrics_file;  // rewritten each second and at the end
};

// How the pool's size came about.
struct PoolSizing {
  int64_t blocks = 0;           // the pool's
  int64_t budget_blocks = 0;    // what memory would allow; 0 = not asked
  int64_t workload_blocks = 0;  // what the trace can hold at once
  std::string reason;           // a sentence
};

// Where the wall time went, in seconds.
struct PhaseSeconds {
  double wall = 0;
  double schedule = 0;  // Schedule, Complete, block tables
  double plan = 0;
  double write_kv = 0;
  double attention = 0;  // Attention::Run
  double resize = 0;     // memory given back and taken again
  double idle = 0;       // open loop: waiting for arrivals
  double generate = 0;   // not on the serving clock
  double verify = 0;     // not on the serving clock

  double serving() const { return wall - generate - verify; }
};

struct ReplayResult {
  PoolSizing sizing;
  KvPoolStats pool;
  PrefixCacheStats prefixes;
  SchedulerStats scheduler;
  std::optional<ServingPressureStats> pressure;
  std::string simd_target;
  int workers = 0;
  int head_shards = 1;  // nodes that the KV heads are cut over
  int64_t submitted = 0;
  int64_t never_fit = 0;  // requests larger than the whole pool
  int64_t ended = 0;
  int64_t generated_tokens = 0;
  int64_t decode_steps = 0;   // steps of decodes only
  int64_t prefill_steps = 0;  // of prefill only
  int64_t mixed_steps = 0;
  LaunchReport launches;  // summed over all launches
  int64_t num_launches = 0;
  int64_t spread_launches = 0;
  Percentiles ttft;
  Percentiles tpot;
  Percentiles step_seconds;
  Percentiles step_tokens;
  Percentiles step_seqs;
  SampledSeries kv_use;  // share of blocks in use, a sample a step
  double peak_kv_use = 0;
  PhaseSeconds seconds;
  VerifyResult verify;
};

// Runs the whole workload. A failed verification is in the result, not an
// error. Errors: those of the library; kResourceExhausted when the pool cannot
//         be had.
Result<ReplayResult> RunReplay(const ReplayOptions& options,
                               const Workload& workload, Runtime* runtime);

// For people resp. programs.
std::string ReplayText(const ReplayOptions& options, const Workload& workload,
                       const ReplayResult& result);
Json ReplayJson(const ReplayOptions& options, const Workload& workload,
                const ReplayResult& result);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_REPLAY_H_
