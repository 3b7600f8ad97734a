// RequestLog: when each request arrived, got its first token, and ended.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/replay_log.h"

#include <utility>

namespace varlane::tools {

void RequestLog::Arrived(int64_t request, double now) {
  At(request).arrival = now;
}

void RequestLog::Token(int64_t request, double now) {
  Entry& entry = At(request);
  if (entry.tokens == 0) entry.first = now;
  entry.last = now;
  ++entry.tokens;
  ++generated_tokens_;
}

void RequestLog::Ended(int64_t request) {
  At(request).ended = true;
  ++ended_;
}

Percentiles RequestLog::TimeToFirstToken() const {
  std::vector<double> values;
  for (const Entry& entry : requests_) {
    if (entry.tokens > 0) values.push_back(entry.first - entry.arrival);
  }
  return ComputePercentiles(std::move(values));
}

Percentiles RequestLog::TimePerOutputToken() const {
  std::vector<double> values;
  for (const Entry& entry : requests_) {
    if (!entry.ended || entry.tokens < 2) continue;
    values.push_back((entry.last - entry.first) /
                     static_cast<double>(entry.tokens - 1));
  }
  return ComputePercentiles(std::move(values));
}

}  // namespace varlane::tools
