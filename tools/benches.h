// The benches: every demand on speed, measured in one process, each beside its
// limit.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_BENCHES_H_
#define VARLANE_TOOLS_BENCHES_H_

#include <string>
#include <vector>

#include "tools/bench_rows.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane::tools {

struct BenchOptions {
  bool quick = false;  // 16/4/128 and bf16 only
  std::string filter;  // regular expression on row names; "" = all
  double seconds = 1;  // a row, as far as the least number of rounds allows
  int64_t memory_bytes = 0;  // largest pool; 0 = 3/4 of what is available
  std::string trace;         // whose prefix hits BenchMemory tells; "" = none
  int kv_heads_per_threadgroup = 0;  // PlanOptions', of rows held to a limit
  RuntimeOptions runtime;
};

struct BenchResult {
  Json machine;
  std::vector<BenchRow> rows;
};

// Errors: kInvalidArgument (filter); those of Runtime::Create. What only one
//         row needs and cannot have is that row's `reason`.
Result<BenchResult> BenchKernels(const BenchOptions& options);
// The same of the pool: blocks, forks, prefixes, resizing, pressure.
Result<BenchResult> BenchMemory(const BenchOptions& options);
// The same of the runtime: launches, graphs, tracing, sharing cores.
Result<BenchResult> BenchRuntime(const BenchOptions& options);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_BENCHES_H_
