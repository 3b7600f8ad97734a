// Attend: one AttentionCase through a real pool and one launch, and its check.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_ATTEND_H_
#define VARLANE_TOOLS_ATTEND_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tools/attention_case.h"
#include "tools/verify.h"
#include "varlane/attention.h"
#include "varlane/dtype.h"
#include "varlane/limits.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::tools {

struct AttendOptions {
  DType kv_dtype = DType::kBF16;
  int block_size = 16;
  PlanOptions plan;
  uint64_t seed = 0;  // permutes physical blocks
  int repeat = 1;     // launches, for timing
  bool measures_limit = false;
  bool shard_heads = false;  // KvPoolOptions'
};

struct AttendResult {
  std::vector<float> out;  // [total_q, Hq, Dv]
  std::vector<float> lse;  // [total_q, Hq]
  std::string simd_target;
  std::string plan;  // for people
  int64_t num_blocks = 0;
  int num_shards = 1;  // nodes that the KV heads are cut over
  bool spread = false;
  int kv_heads_per_threadgroup = 1;
  LaunchReport report;          // of the last launch
  std::vector<double> seconds;  // [repeat], the launch alone
  MachineRates rates;           // where measures_limit
};

// Writes K/V into a pool with a shuffled block table, plans, runs.
// Errors: those of KvPool, Attention; kResourceExhausted.
Result<AttendResult> RunAttend(const AttentionCase& c,
                               const AttendOptions& options, Runtime* runtime);

// Recomputes `share` of the (token, query head) rows from inputs rounded as the
// cache rounds them. Runs on `runtime`'s workers.
Result<VerifyResult> VerifyAttend(const AttentionCase& c, DType kv_dtype,
                                  const AttendResult& result, double share,
                                  Runtime* runtime);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_ATTEND_H_
