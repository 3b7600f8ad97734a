// Trace: arrivals and lengths of requests, read from what services publish.
//
// Three formats, told apart by content and not by name:
//   Azure LLM inference CSV   TIMESTAMP,ContextTokens,GeneratedTokens
//   Mooncake JSONL            timestamp (ms), input_length, output_length,
//                             hash_ids (one per 512 prompt tokens)
//   BurstGPT CSV              Timestamp (s), Request tokens, Response tokens
//   and
//                             others, in any order; a failed request has 0
//                             response tokens and is skipped and counted
// Rows are streamed: memory is one line, whatever the file's size.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_TRACE_H_
#define VARLANE_TOOLS_TRACE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "varlane/status.h"

namespace varlane::tools {

enum class TraceFormat : uint8_t { kAzureCsv, kMooncakeJsonl, kBurstGptCsv };
const char* TraceFormatName(TraceFormat format);

// Prompt tokens that share one Mooncake hash_id.
inline constexpr int64_t kHashBlockTokens = 512;
// Upper limit of one row's token counts: keeps every later product in int64.
inline constexpr int64_t kMaxTraceTokens = int64_t{1} << 30;

struct TraceRequest {
  int64_t arrival_ns = 0;    // after the first row of the file; may be negative
  int64_t input_tokens = 0;  // at least 1
  int64_t output_tokens = 0;      // at least 1
  std::vector<int64_t> hash_ids;  // [ceil(input_tokens / 512)] or empty
};

class TraceReader {
 public:
  // Errors: kNotFound (cannot be opened or read), kInvalidArgument (no known
  //         format).
  static Result<std::unique_ptr<TraceReader>> Open(const std::string& path);
  virtual ~TraceReader() = default;

  TraceFormat format() const { return format_; }
  // Rows left out because the service produced no token.
  int64_t skipped() const { return skipped_; }

  // The next request; nothing at the end of the file.
  // Errors: kInvalidArgument naming file, line, column or field, and value.
  virtual Result<std::optional<TraceRequest>> Next() = 0;

 protected:
  explicit TraceReader(TraceFormat format) : format_(format) {}
  void CountSkipped() { ++skipped_; }

 private:
  TraceFormat format_;
  int64_t skipped_ = 0;
};

struct Trace {
  std::string source;  // the path, or what generated it
  TraceFormat format = TraceFormat::kAzureCsv;
  int64_t skipped = 0;
  // In order of arrival; the first arrives at 0.
  std::vector<TraceRequest> requests;
};

// Reads the first `max_requests` rows (0 = all).
// Errors: as TraceReader; kInvalidArgument for a trace without a request.
Result<Trace> ReadTrace(const std::string& path, int64_t max_requests);

// Orders by arrival and shifts arrivals so that the first is 0.
void NormalizeArrivals(std::vector<TraceRequest>* requests);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_TRACE_H_
