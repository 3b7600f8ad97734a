// SPDX-License-Identifier: Apache-2.0

#include "tools/bench_rows.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A sample shorter than this is noise of the clock and the scheduler.
constexpr double kMinSampleSeconds = 2e-3;

double Rank(const std::vector<double>& sorted, double share) {
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<size_t>(std::lround(share * last))];
}

Json OrNull(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

std::string SenseText(const BenchRow& row) {
  if (!row.must) return "reported";
  switch (row.sense) {
    case Sense::kRatioAtLeast:
      return fmt::format(">= {:.2f}", *row.must);
    case Sense::kRatioAtMost:
      return fmt::format("<= {:.2f}", *row.must);
    case Sense::kValueAtMost:
      return fmt::format("<= {:g} {}", *row.must, row.unit);
  }
  return "?";
}

std::string Cell(const std::optional<double>& value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "-";
}

// The mean of as many goes as fill a sample.
Result<double> Sample(const Sampler& sampler, int repeats) {
  double sum = 0;
  for (int i = 0; i < repeats; ++i) {
    VARLANE_TOOLS_ASSIGN(const double one, sampler.go());
    sum += one;
  }
  return sum / repeats;
}

}  // namespace

void Judge(BenchRow* row) {
  const std::optional<double> held =
      row->sense == Sense::kValueAtMost ? row->value : row->ratio;
  if (!row->must || !held) return;
  row->holds = row->sense == Sense::kRatioAtLeast ? *held >= *row->must
                                                  : *held <= *row->must;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return Rank(values, 0.5);
}

double RelativeSpread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const double median = Rank(values, 0.5);
  return median > 0 ? (Rank(values, 0.9) - Rank(values, 0.1)) / median : 0;
}

void SetRatios(const std::vector<double>& ratios, BenchRow* row) {
  row->ratio = Median(ratios);
  row->rounds = static_cast<int>(ratios.size());
  if (ratios.size() > 1) row->spread = RelativeSpread(ratios);
  Judge(row);
}

Json ToJson(const BenchRow& row) {
  static constexpr const char* kSenses[] = {"ratio >= must", "ratio <= must",
                                            "value <= must"};
  Json json = {{"name", row.name},
               {"value", OrNull(row.value)},
               {"unit", row.unit},
               {"limit", OrNull(row.limit)},
               {"ratio", OrNull(row.ratio)},
               {"spread", OrNull(row.spread)},
               {"must", OrNull(row.must)},
               {"holds", row.holds ? Json(*row.holds) : Json(nullptr)},
               {"sense", kSenses[static_cast<size_t>(row.sense)]},
               {"rounds", row.rounds}};
  if (!row.reason.empty()) json["reason"] = row.reason;
  if (!row.detail.empty()) json["detail"] = row.detail;
  return json;
}

std::string RowsText(std::span<const BenchRow> rows) {
  using Align = Table::Align;
  Table table({Align::kLeft, Align::kRight, Align::kRight, Align::kLeft,
               Align::kRight, Align::kRight, Align::kLeft, Align::kLeft});
  table.AddRow(
      {"", "value", "limit", "unit", "ratio", "+-", "must", "holds", ""});
  for (const BenchRow& row : rows) {
    table.AddRow({row.name, Cell(row.value, 1), Cell(row.limit, 1), row.unit,
                  Cell(row.ratio, 3), Cell(row.spread, 2), SenseText(row),
                  row.holds ? (*row.holds ? "yes" : "NO") : "-",
                  row.reason.empty() ? row.detail : row.reason});
  }
  return table.ToString();
}

Result<std::vector<std::vector<double>>> Interleave(
    std::span<const Sampler> samplers, const SampleBudget& budget) {
  std::vector<int> repeats;
  double round_seconds = 0;
  for (const Sampler& sampler : samplers) {
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_ASSIGN(const double warm, sampler.go());
    (void)warm;
    const double seconds = std::max(SecondsSince(start), 1e-9);
    repeats.push_back(
        sampler.repeats
            ? std::max(1, static_cast<int>(std::ceil(
                              std::min(kMinSampleSeconds, budget.seconds / 20) /
                              seconds)))
            : 1);
    round_seconds += seconds * repeats.back();
  }
  const int rounds = static_cast<int>(std::clamp(budget.seconds / round_seconds,
                                                 double(budget.min_rounds),
                                                 double(budget.max_rounds)));
  std::vector<std::vector<double>> samples(samplers.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < samplers.size(); ++i) {
      VARLANE_TOOLS_ASSIGN(const double sample,
                           Sample(samplers[i], repeats[i]));
      samples[i].push_back(sample);
    }
  }
  return samples;
}

}  // namespace varlane::tools
