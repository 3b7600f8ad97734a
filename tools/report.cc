// Reports: percentiles, tables, JSON.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/report.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>
#include <string_view>
#include <utility>

#include "tools/status_util.h"

namespace varlane::tools {

Percentiles ComputePercentiles(std::vector<double> values) {
  Percentiles result;
  if (values.empty()) return result;
  std::sort(values.begin(), values.end());
  const auto rank = [&](double p) {
    const double position = std::ceil(p * static_cast<double>(values.size()));
    return values[static_cast<size_t>(std::max(position, 1.0)) - 1];
  };
  result.count = static_cast<int64_t>(values.size());
  result.mean = std::accumulate(values.begin(), values.end(), 0.0) /
                static_cast<double>(values.size());
  result.p50 = rank(0.5);
  result.p90 = rank(0.9);
  result.p99 = rank(0.99);
  result.max = values.back();
  return result;
}

Json ToJson(const Percentiles& percentiles) {
  return {{"count", percentiles.count}, {"mean", percentiles.mean},
          {"p50", percentiles.p50},     {"p90", percentiles.p90},
          {"p99", percentiles.p99},     {"max", percentiles.max}};
}

std::string FormatSeconds(double seconds) {
  if (seconds >= 100) return fmt::format("{:.0f} s", seconds);
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.1f} us", seconds * 1e6);
}

std::string FormatCount(int64_t count) {
  std::string digits = std::to_string(count);
  const size_t first = digits.front() == '-' ? 1 : 0;
  for (size_t i = digits.size(); i > first + 3;) {
    i -= 3;
    digits.insert(i, 1, ',');
  }
  return digits;
}

std::string FormatHeadShards(int head_shards) {
  if (head_shards == 1) return "";
  return fmt::format(", heads sharded over {} nodes", head_shards);
}

void Table::AddRow(std::vector<std::string> cells) {
  rows_.push_back(std::move(cells));
}

std::string Table::ToString(int indent) const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line(static_cast<size_t>(indent), ' ');
    for (size_t i = 0; i < row.size(); ++i) {
      const Align align = align_[std::min(i, align_.size() - 1)];
      line += i == 0 ? "" : "  ";
      line += align == Align::kLeft ? fmt::format("{:<{}}", row[i], widths[i])
                                    : fmt::format("{:>{}}", row[i], widths[i]);
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    text += line + "\n";
  }
  return text;
}

std::string Sparkline(std::span<const double> values, int width) {
  static constexpr std::string_view kRamp = " .:-=+*#%@";
  const size_t count =
      std::min(values.size(), static_cast<size_t>(std::max(width, 0)));
  std::string line;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * values.size() / count;
    const size_t end = (i + 1) * values.size() / count;
    const double high =
        *std::max_element(values.begin() + static_cast<ptrdiff_t>(begin),
                          values.begin() + static_cast<ptrdiff_t>(end));
    const double level = std::clamp(high, 0.0, 1.0) * (kRamp.size() - 1);
    line += kRamp[static_cast<size_t>(std::lround(level))];
  }
  return line;
}

void SampledSeries::Add(double value) {
  if (seen_++ % stride_ != 0) return;
  if (values_.size() == capacity_) {
    for (size_t i = 0; 2 * i < values_.size(); ++i) values_[i] = values_[2 * i];
    values_.resize((values_.size() + 1) / 2);
    stride_ *= 2;
    if ((seen_ - 1) % stride_ != 0) return;
  }
  values_.push_back(value);
}

Status Emit(const std::string& text, const Json& json,
            const std::string& json_path) {
  const std::string dump =
      json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  const std::string& shown = json_path == "-" ? dump : text;
  std::fwrite(shown.data(), 1, shown.size(), stdout);
  if (std::fflush(stdout) != 0) {
    return Fail(StatusCode::kUnavailable, "writing to stdout failed");
  }
  if (json_path.empty() || json_path == "-") return {};
  errno = 0;
  std::ofstream file(json_path, std::ios::trunc);
  if (file) {
    file << dump;
    file.close();
  }
  if (file) return {};
  return Fail(StatusCode::kUnavailable, "{} cannot be written: {}", json_path,
              std::strerror(errno));
}

}  // namespace varlane::tools
