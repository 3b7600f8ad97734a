// Stress: a trace served again and again while memory is short and plentiful by
// turns, every output row compared bit for bit with a run left in peace.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_STRESS_H_
#define VARLANE_TOOLS_STRESS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/ballast.h"
#include "tools/child_cgroup.h"
#include "tools/replay.h"
#include "tools/report.h"
#include "tools/stress_engine.h"
#include "tools/stress_pressure.h"
#include "tools/supervise.h"
#include "varlane/runtime.h"
#include "varlane/serving_pressure.h"
#include "varlane/status.h"

namespace varlane::tools {

// Where the pressure comes from.
enum class StressMode : uint8_t {
  kAuto,      // the first of the others that can be had
  kCgroup,    // a ballast process in one memory cgroup with us
  kRlimit,    // a ballast in our own process, under RLIMIT_DATA
  kSchedule,  // KvPool::SetLimit every few steps
};
const char* StressModeName(StressMode mode);

struct StressOptions {
  StressMode mode = StressMode::kAuto;
  double seconds = 60;  // rounds begin until then; at least one
  int64_t period = 8;   // kSchedule: steps between two changes of the limit
  uint64_t seed = 1;    // of the sizes
  int64_t min_shrinks = 1;
  int64_t limit_bytes = int64_t{512} << 20;  // kCgroup, kRlimit
  BallastTimes ballast;
  double hang_seconds = 120;
  ModelShape model;
  DType kv_dtype = DType::kBF16;
  int block_size = 16;
  int64_t kv_blocks = 0;       // 0 = what the trace can hold, within the budget
  StressEngineOptions engine;  // but model, layout and num_blocks
  RuntimeOptions runtime;
};

// What a run under a limit has seen of it.
struct StressLimit {
  int64_t oom_kills = 0;   // in the cgroup; -1 = unknown
  int64_t limit_hits = 0;  // the kernel had to reclaim; likewise
  int64_t peak_bytes = 0;  // likewise
  ServingPressureStats ladder;
  // The ballast's.
  int64_t ballast_peak_bytes = 0;
  int64_t waves = 0;
  int64_t starved = 0;
  int64_t waits = 0;
  double wait_seconds = 0;
  double longest_wait_seconds = 0;
};

struct StressResult {
  StressMode mode = StressMode::kSchedule;
  std::string mode_reason;
  PoolSizing sizing;
  int head_shards = 1;       // nodes that the KV heads are cut over
  int64_t least_blocks = 0;  // what the longest request needs
  int64_t final_blocks = 0;  // when the pressure was over
  int64_t rounds = 0;
  double seconds = 0;          // of the rounds
  double serving_seconds = 0;  // of these, without inputs and digests
  SchedulerStats scheduler;    // the calm round included
  SwapStats swap;
  KvPoolStats pool;
  int64_t requests = 0;  // ended, in these rounds
  int64_t refused = 0;   // times that a request had to be offered again
  StressCounts pressure;
  std::optional<StressLimit> limit;  // kCgroup, kRlimit
  // Compared, all layers at once; repetitions included.
  int64_t rows = 0;
  int64_t wrong_rows = 0;
  int64_t skipped_rows = 0;  // prompts known to the prefix cache
  std::string first_wrong;
  Status empty;  // at each round's end: nothing leaked, the books agree
  int64_t rss_before_bytes = 0;  // before there was a pool
  int64_t rss_after_bytes = 0;   // when it was gone

  // Everything that should not be, a sentence each.
  std::vector<std::string> Failures(const StressOptions& options) const;
};

// Serves the workload in a child process, prints what came of it, and writes
// the JSON.
//
// Errors: kInternal naming all that was wrong; those of the library: under
//         pressure none is expected; Supervise's.
// Requires: no thread but the caller's.
Status RunStress(const StressOptions& options, const Workload& workload,
                 const std::string& title, const std::string& json_path);

std::string StressText(const StressOptions& options,
                       const StressResult& result);
Json StressJson(const StressOptions& options, const StressResult& result);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_STRESS_H_
