// Fuzzes the trace readers - Azure CSV, BurstGPT CSV and Mooncake JSONL are
// told apart by content - and what a replay does first with a trace.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>

#include "tests/fuzz/fuzz_file.h"
#include "tools/replay_inputs.h"
#include "tools/trace.h"

using varlane::fuzzing::FuzzFile;
using varlane::fuzzing::Require;
using varlane::tools::kMaxTraceTokens;
using varlane::tools::ReadTrace;
using varlane::tools::Workload;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const FuzzFile file({data, size});
  const auto trace = ReadTrace(file.path(), 0);
  if (!trace.ok()) {
    Require(!trace.status().message().empty());
    return 0;
  }
  Require(!trace->requests.empty() && trace->skipped >= 0);
  int64_t last = 0;
  for (const auto& request : trace->requests) {
    Require(request.arrival_ns >= last);
    last = request.arrival_ns;
    Require(request.input_tokens >= 1);
    Require(request.input_tokens <= kMaxTraceTokens);
    Require(request.output_tokens >= 1);
    Require(request.output_tokens <= kMaxTraceTokens);
  }
  Require(trace->requests.front().arrival_ns == 0);
  const auto workload = Workload::Create(*trace, 0.25);
  Require(workload.ok());
  Require(workload->PeakBlocks(4, 16) >= 1);
  for (int64_t i = 0; i < workload->size(); ++i) {
    (void)workload->TokenAt(i, workload->request(i).input_tokens - 1);
  }
  return 0;
}
