// SPDX-License-Identifier: Apache-2.0

#include "tools/metrics_file.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <system_error>

#include "tools/status_util.h"

namespace varlane::tools {

Status MetricsFile::Write(const MetricsSources& sources) {
  if (path_.empty()) return {};
  written_ = Clock::now();
  VARLANE_TOOLS_ASSIGN(const Metrics metrics, TakeMetrics(sources));
  VARLANE_TOOLS_ASSIGN(const std::string text, PrometheusText(metrics));
  const std::string next = path_ + ".next";
  std::ofstream file(next, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) {
    return Fail(StatusCode::kUnavailable, "{} cannot be written", next);
  }
  if (std::rename(next.c_str(), path_.c_str()) != 0) {
    return Fail(StatusCode::kUnavailable, "{} cannot be written: {}", path_,
                std::generic_category().message(errno));
  }
  return {};
}

Status MetricsFile::Update(const MetricsSources& sources) {
  if (path_.empty() || Clock::now() - written_ < std::chrono::seconds(1)) {
    return {};
  }
  return Write(sources);
}

}  // namespace varlane::tools
