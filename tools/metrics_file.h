// MetricsFile: `--metrics FILE`, a running service's metrics as Prometheus'
// text, as a node exporter's textfile collector reads it.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_METRICS_FILE_H_
#define VARLANE_TOOLS_METRICS_FILE_H_

#include <chrono>
#include <string>
#include <utility>

#include "varlane/metrics.h"
#include "varlane/status.h"

namespace varlane::tools {

// Without a path nothing happens.
class MetricsFile {
 public:
  explicit MetricsFile(std::string path) : path_(std::move(path)) {}

  // Writes a new file and puts it in the place of the old one: a reader sees
  // one or the other, whole. Errors: kUnavailable.
  Status Write(const MetricsSources& sources);
  // The same where the last one is a second old.
  Status Update(const MetricsSources& sources);

 private:
  using Clock = std::chrono::steady_clock;

  const std::string path_;
  Clock::time_point written_{};
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_METRICS_FILE_H_
