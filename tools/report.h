// Reports: percentiles, aligned tables for people, JSON for programs.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_REPORT_H_
#define VARLANE_TOOLS_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "varlane/status.h"

namespace varlane::tools {

// Objects keep the order they were filled in.
using Json = nlohmann::ordered_json;

struct Percentiles {
  int64_t count = 0;
  double mean = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double max = 0;
};

// Nearest-rank percentiles of `values` (reordered); all 0 where empty.
Percentiles ComputePercentiles(std::vector<double> values);
Json ToJson(const Percentiles& percentiles);

// "1.23 ms", "45.6 us", "2.10 s": three significant digits or so.
std::string FormatSeconds(double seconds);
// "1,234,567".
std::string FormatCount(int64_t count);
// ", heads sharded over 2 nodes", or nothing where there is one.
std::string FormatHeadShards(int head_shards);

// Rows of text cells; columns as wide as their widest cell.
class Table {
 public:
  enum class Align : uint8_t { kLeft, kRight };

  // One alignment a column; later columns repeat the last.
  explicit Table(std::vector<Align> align) : align_(std::move(align)) {}
  void AddRow(std::vector<std::string> cells);
  // Every line is indented by `indent` blanks and ends in '\n'.
  std::string ToString(int indent = 2) const;

 private:
  std::vector<Align> align_;
  std::vector<std::vector<std::string>> rows_;
};

// `values` in [0, 1] as a line of characters from ' ' (0) to '@' (1); at most
// `width`, each the maximum of the values it stands for.
std::string Sparkline(std::span<const double> values, int width);

// Keeps at most `capacity` values of a series of any length, evenly spaced:
// whenever it is full every second one is dropped.
class SampledSeries {
 public:
  explicit SampledSeries(size_t capacity = 1024) : capacity_(capacity) {}
  void Add(double value);
  const std::vector<double>& values() const { return values_; }
  int64_t stride() const { return stride_; }  // values between two samples

 private:
  size_t capacity_;
  int64_t stride_ = 1;
  int64_t seen_ = 0;
  std::vector<double> values_;
};

// Where a subcommand's result goes: a table on stdout unless the JSON goes
// there ("-").
Status Emit(const std::string& text, const Json& json,
            const std::string& json_path);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_REPORT_H_
