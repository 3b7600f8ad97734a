// RequestLog: when each request arrived, got its first token, and ended.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_REPLAY_LOG_H_
#define VARLANE_TOOLS_REPLAY_LOG_H_

#include <cstdint>
#include <vector>

#include "tools/report.h"

namespace varlane::tools {

// All times are seconds on the serving clock.
class RequestLog {
 public:
  explicit RequestLog(size_t num_requests) : requests_(num_requests) {}

  void Arrived(int64_t request, double now);
  void Token(int64_t request, double now);
  void Ended(int64_t request);

  int64_t generated_tokens() const { return generated_tokens_; }
  int64_t ended() const { return ended_; }

  // From arrival to the first token, over requests that have one.
  Percentiles TimeToFirstToken() const;
  // (last - first) / (tokens - 1), over ended requests of two tokens or more.
  Percentiles TimePerOutputToken() const;

 private:
  struct Entry {
    double arrival = 0;
    double first = 0;
    double last = 0;
    int64_t tokens = 0;
    bool ended = false;
  };
  Entry& At(int64_t request) { return requests_[static_cast<size_t>(request)]; }

  std::vector<Entry> requests_;
  int64_t generated_tokens_ = 0;
  int64_t ended_ = 0;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_REPLAY_LOG_H_
