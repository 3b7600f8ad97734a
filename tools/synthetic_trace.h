// A synthetic serving trace, for demos and tests; the same for a seed anywhere.
//
// Chat-shaped, after what public traces of chat services show: requests arrive
// as a Poisson process; prompt and answer lengths are log-normal and
// independent. A share of the requests starts with one of a few system prompts:
// in the Mooncake format those share the hash_ids of their first blocks.
// docs: `varlane trace --help` names every parameter with its default.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_SYNTHETIC_TRACE_H_
#define VARLANE_TOOLS_SYNTHETIC_TRACE_H_

#include <cstdint>
#include <iosfwd>

#include "tools/trace.h"
#include "varlane/status.h"

namespace varlane::tools {

struct SyntheticTraceOptions {
  int64_t requests = 64;
  uint64_t seed = 1;
  double rate = 4.0;          // mean arrivals a second
  double input_median = 160;  // tokens; the mean is median x exp(sigma^2/2)
  double input_sigma = 0.9;   // of ln(tokens)
  int64_t max_input = 2048;   // longer draws are cut
  double output_median = 32;
  double output_sigma = 0.6;
  int64_t max_output = 256;
  double shared_share = 0.5;   // requests that start with a system prompt
  int64_t system_prompts = 4;  // how many different ones
};

// Errors: kInvalidArgument naming the option, its value and the limits.
Result<Trace> MakeSyntheticTrace(const SyntheticTraceOptions& options);

// Writes `trace` as the public traces are written: Azure CSV with CRLF and
// seven fractional digits, or Mooncake JSONL (needs hash_ids).
// Errors: kInvalidArgument (no hash_ids), kUnimplemented (other formats),
//         kUnavailable (the stream failed).
Status WriteTrace(const Trace& trace, TraceFormat format, std::ostream& out);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_SYNTHETIC_TRACE_H_
