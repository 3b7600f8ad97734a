// A synthetic serving trace.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/synthetic_trace.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <ostream>

#include "tools/random.h"
#include "tools/status_util.h"
#include "tools/timestamp.h"

namespace varlane::tools {
namespace {

Status Check(const SyntheticTraceOptions& options) {
  const auto positive = [](const char* name, double value,
                           double max) -> Status {
    if (value > 0 && value <= max) return {};
    return BadArgument("{} = {}, expected a number in (0, {}]", name, value,
                       max);
  };
  const auto max_tokens = static_cast<double>(kMaxTraceTokens);
  VARLANE_TOOLS_TRY(
      positive("requests", static_cast<double>(options.requests), 1e8));
  VARLANE_TOOLS_TRY(positive("rate", options.rate, 1e6));
  VARLANE_TOOLS_TRY(positive("input median", options.input_median, max_tokens));
  VARLANE_TOOLS_TRY(
      positive("output median", options.output_median, max_tokens));
  VARLANE_TOOLS_TRY(positive(
      "max input", static_cast<double>(options.max_input), max_tokens));
  VARLANE_TOOLS_TRY(positive(
      "max output", static_cast<double>(options.max_output), max_tokens));
  VARLANE_TOOLS_TRY(positive("system prompts",
                             static_cast<double>(options.system_prompts), 1e6));
  if (!(options.input_sigma >= 0 && options.input_sigma <= 10) ||
      !(options.output_sigma >= 0 && options.output_sigma <= 10)) {
    return BadArgument("sigma = {} and {}, expected numbers in [0, 10]",
                       options.input_sigma, options.output_sigma);
  }
  if (!(options.shared_share >= 0 && options.shared_share <= 1)) {
    return BadArgument("shared share = {}, expected a number in [0, 1]",
                       options.shared_share);
  }
  return {};
}

// Box-Muller; one of the pair is enough here.
double Normal(SplitMix64* random) {
  const double u = 1.0 - random->Uniform();  // (0, 1]: log is finite
  const double v = random->Uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

int64_t LogNormal(double median, double sigma, int64_t max,
                  SplitMix64* random) {
  const double draw = median * std::exp(sigma * Normal(random));
  return static_cast<int64_t>(
      std::clamp(std::round(draw), 1.0, static_cast<double>(max)));
}

void WriteAzure(const Trace& trace, std::ostream& out) {
  constexpr int64_t kStart = int64_t{19723} * 86400 * 1000000000;  // 2024
  out << "TIMESTAMP,ContextTokens,GeneratedTokens\r\n";
  for (const TraceRequest& request : trace.requests) {
    out << FormatTimestamp(kStart + request.arrival_ns) << ','
        << request.input_tokens << ',' << request.output_tokens << "\r\n";
  }
}

void WriteMooncake(const Trace& trace, std::ostream& out) {
  for (const TraceRequest& request : trace.requests) {
    out << fmt::format(
        "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, "
        "\"hash_ids\": [{}]}}\n",
        request.arrival_ns / 1000000, request.input_tokens,
        request.output_tokens, fmt::join(request.hash_ids, ", "));
  }
}

}  // namespace

Result<Trace> MakeSyntheticTrace(const SyntheticTraceOptions& options) {
  VARLANE_TOOLS_TRY(Check(options));
  Trace trace;
  trace.source = fmt::format("synthetic, seed {}", options.seed);
  trace.format = TraceFormat::kMooncakeJsonl;
  SplitMix64 random(options.seed);
  double seconds = 0;
  // The first ids are the system prompts'; every other block is its own.
  int64_t next_id = options.system_prompts;
  for (int64_t i = 0; i < options.requests; ++i) {
    TraceRequest request;
    request.arrival_ns = static_cast<int64_t>(seconds * 1e9);
    seconds += -std::log(1.0 - random.Uniform()) / options.rate;
    request.input_tokens = LogNormal(options.input_median, options.input_sigma,
                                     options.max_input, &random);
    request.output_tokens =
        LogNormal(options.output_median, options.output_sigma,
                  options.max_output, &random);
    const bool shared = random.Uniform() < options.shared_share;
    const auto prompt = static_cast<int64_t>(
        random.Uniform() * static_cast<double>(options.system_prompts));
    const int64_t blocks =
        (request.input_tokens + kHashBlockTokens - 1) / kHashBlockTokens;
    for (int64_t b = 0; b < blocks; ++b) {
      // Only whole blocks can be equal: a short prompt shares nothing.
      const bool whole = request.input_tokens >= kHashBlockTokens;
      request.hash_ids.push_back(b == 0 && shared && whole ? prompt
                                                           : next_id++);
    }
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

Status WriteTrace(const Trace& trace, TraceFormat format, std::ostream& out) {
  switch (format) {
    case TraceFormat::kAzureCsv:
      WriteAzure(trace, out);
      break;
    case TraceFormat::kMooncakeJsonl:
      for (const TraceRequest& request : trace.requests) {
        if (request.hash_ids.empty()) {
          return BadArgument("{} has no hash_ids to write", trace.source);
        }
      }
      WriteMooncake(trace, out);
      break;
    case TraceFormat::kBurstGptCsv:
      return Fail(StatusCode::kUnimplemented, "{} is read, not written",
                  TraceFormatName(format));
  }
  out.flush();
  if (!out) return Fail(StatusCode::kUnavailable, "writing the trace failed");
  return {};
}

}  // namespace varlane::tools
