// SPDX-License-Identifier: Apache-2.0

#include "tools/bench_rows.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/clock.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

// A sample shorter than this is noise of the clock and the scheduler.
constexpr double kMinSampleSeconds = 2e-3;
// What brings a sampler's data back to its cache; see Sampler::warms.
constexpr double kWarmSeconds = 20e-3;

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

std::string NoteText(const BenchRow& row) {
  std::vector<std::string> parts;
  if (!row.reason.empty()) parts.push_back(row.reason);
  if (!row.detail.empty()) parts.push_back(row.detail);
  if (row.disturbed != 0) {
    parts.push_back(fmt::format("{} rounds disturbed", row.disturbed));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

std::string Cell(const std::optional<double>& value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "-";
}

// Whether other processes took cores from us while it lived.
class DisturbanceMeter {
 public:
  DisturbanceMeter() : switches_(Switches()), start_(Clock::now()) {}

  // The kernel's own threads interrupt a few times a second at most; a busy
  // neighbour's time slices come in hundreds.
  bool IsDisturbed() const {
    return static_cast<double>(Switches() - switches_) >
           1 + 20 * SecondsSince(start_);
  }

 private:
  static int64_t Switches() {  // involuntary, all threads
    rusage usage = {};
    return getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_nivcsw : 0;
  }

  int64_t switches_;
  Clock::time_point start_;
};

// Goes of one sample: first those that do not count.
struct Goes {
  int warm;
  int counted;
};

Goes GoesOf(const Sampler& sampler, double seconds, double budget_seconds) {
  const auto fill = [=](double least) {
    const double goes = std::min(least, budget_seconds / 20) / seconds;
    return std::max(1, static_cast<int>(std::ceil(goes)));
  };
  return {.warm = sampler.warms ? fill(kWarmSeconds) : 0,
          .counted = sampler.repeats ? fill(kMinSampleSeconds) : 1};
}

// The mean of the goes that count; keeps the least and the greatest.
Result<double> Sample(const Sampler& sampler, const Goes& goes, double* low,
                      double* high) {
  for (int i = 0; i < goes.warm; ++i) {
    VARLANE_TOOLS_TRY(sampler.go().status());
  }
  double sum = 0;
  for (int i = 0; i < goes.counted; ++i) {
    VARLANE_TOOLS_ASSIGN(const double one, sampler.go());
    *low = std::min(*low, one);
    *high = std::max(*high, one);
    sum += one;
  }
  return sum / goes.counted;
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

void SetRatios(const std::vector<double>& ratios, int disturbed,
               BenchRow* row) {
  row->ratio = Median(ratios);
  row->rounds = static_cast<int>(ratios.size());
  row->disturbed = disturbed;
  if (ratios.size() > 1) row->spread = RelativeSpread(ratios);
  Judge(row);
}

void SetValues(const std::vector<double>& values, int disturbed,
               BenchRow* row) {
  row->value = Median(values);
  row->rounds = static_cast<int>(values.size());
  row->disturbed = disturbed;
  if (values.size() > 1) row->spread = RelativeSpread(values);
  Judge(row);
}

std::string WhatHoldsBack(const BoundTimes& times, double must) {
  if (times.multiply > times.read) {
    return fmt::format(
        "multiply-adds fed from L1 reach {:.2f} of the limit, with softmax and "
        "nothing else {:.2f}",
        times.multiply / times.fed, times.multiply / times.weighed);
  }
  const double near = times.read / times.near;
  return fmt::format(
      "held back by {}: with K/V in the nearest cache {:.2f} of the limit",
      near < must ? "its loops, not by reading" : "reading", near);
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
               {"best_ratio", OrNull(row.best_ratio)},
               {"must", OrNull(row.must)},
               {"holds", row.holds ? Json(*row.holds) : Json(nullptr)},
               {"sense", kSenses[static_cast<size_t>(row.sense)]},
               {"rounds", row.rounds},
               {"disturbed_rounds", row.disturbed}};
  if (!row.reason.empty()) json["reason"] = row.reason;
  if (!row.detail.empty()) json["detail"] = row.detail;
  return json;
}

std::string RowsText(std::span<const BenchRow> rows) {
  using Align = Table::Align;
  Table table({Align::kLeft, Align::kRight, Align::kRight, Align::kLeft,
               Align::kRight, Align::kRight, Align::kRight, Align::kLeft,
               Align::kLeft});
  table.AddRow({"", "value", "limit", "unit", "ratio", "+-", "best", "must",
                "holds", ""});
  for (const BenchRow& row : rows) {
    table.AddRow({row.name, Cell(row.value, 1), Cell(row.limit, 1), row.unit,
                  Cell(row.ratio, 3), Cell(row.spread, 2),
                  Cell(row.best_ratio, 3), SenseText(row),
                  row.holds ? (*row.holds ? "yes" : "NO") : "-",
                  NoteText(row)});
  }
  return table.ToString();
}

namespace {

Samples OneRound(const std::vector<double>& goes) {
  Samples samples;
  for (const double go : goes) samples.of.push_back({go});
  samples.low = samples.high = goes;
  samples.rounds = 1;
  return samples;
}

}  // namespace

Result<Samples> Interleave(std::span<const Sampler> samplers,
                           const SampleBudget& budget) {
  std::vector<Goes> goes;
  std::vector<double> first_goes;
  double round_seconds = 0;
  for (const Sampler& sampler : samplers) {
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_ASSIGN(const double first, sampler.go());
    first_goes.push_back(first);
    const double seconds = std::max(SecondsSince(start), 1e-9);
    goes.push_back(GoesOf(sampler, seconds, budget.seconds));
    round_seconds += seconds * (goes.back().warm + goes.back().counted);
  }
  if (budget.min_rounds == 1 && round_seconds > budget.seconds) {
    return OneRound(first_goes);  // one costs more than there is to spend
  }
  const int wanted = static_cast<int>(std::clamp(budget.seconds / round_seconds,
                                                 double(budget.min_rounds),
                                                 double(budget.max_rounds)));
  Samples all;
  Samples quiet;
  all.of.resize(samplers.size());
  all.low.assign(samplers.size(), std::numeric_limits<double>::infinity());
  all.high.assign(samplers.size(), 0);
  quiet.of.resize(samplers.size());
  const auto num_quiet = [&quiet] { return int(quiet.of[0].size()); };
  while (all.rounds < wanted ||
         (budget.retries && num_quiet() < budget.min_rounds &&
          all.rounds < 2 * wanted)) {
    const DisturbanceMeter meter;
    for (size_t i = 0; i < samplers.size(); ++i) {
      VARLANE_TOOLS_ASSIGN(
          const double sample,
          Sample(samplers[i], goes[i], &all.low[i], &all.high[i]));
      all.of[i].push_back(sample);
    }
    ++all.rounds;
    if (meter.IsDisturbed()) {
      ++all.disturbed;
      continue;
    }
    for (size_t i = 0; i < samplers.size(); ++i) {
      quiet.of[i].push_back(all.of[i].back());
    }
  }
  if (num_quiet() < budget.min_rounds) return all;
  quiet.low = all.low;
  quiet.high = all.high;
  quiet.rounds = all.rounds;
  quiet.disturbed = all.disturbed;
  return quiet;
}

void SetPair(const Samples& samples, bool is_speedup, BenchRow* row) {
  const size_t above = is_speedup ? 1 : 0;
  const size_t below = 1 - above;
  std::vector<double> ratios;
  for (size_t i = 0; i < samples.of[0].size(); ++i) {
    ratios.push_back(samples.of[above][i] / samples.of[below][i]);
  }
  row->value = Median(samples.of[0]) * 1e6;
  row->limit = Median(samples.of[1]) * 1e6;
  row->best_ratio = samples.low[above] / samples.low[below];
  SetRatios(ratios, samples.disturbed, row);
}

}  // namespace varlane::tools
