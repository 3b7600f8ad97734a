// BenchRow: one demand on speed, what was measured for it and whether it holds.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_BENCH_ROWS_H_
#define VARLANE_TOOLS_BENCH_ROWS_H_

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/report.h"
#include "varlane/status.h"

namespace varlane::tools {

// What a demand is about.
enum class Sense : uint8_t {
  kRatioAtLeast,
  kRatioAtMost,
  kValueAtMost,
};

// Numbers that could not be had stay empty; `reason` then says why.
struct BenchRow {
  std::string name;
  std::string unit;              // of value and limit
  std::optional<double> value;   // median
  std::optional<double> limit;   // median
  std::optional<double> ratio;   // median over rounds of the rounds' own ratios
  std::optional<double> spread;  // (p90 - p10) / median of ratio, or of value
  // Of the fastest goes of either side, whenever they were: what is left to
  // go by on a machine that is never quiet. Decides nothing.
  std::optional<double> best_ratio;
  Sense sense = Sense::kRatioAtLeast;
  std::optional<double> must;  // empty = reported only
  std::optional<bool> holds;
  int rounds = 0;
  int disturbed = 0;  // rounds in which other processes took cores
  std::string reason;
  std::string detail;  // e.g. the read loop that was the limit
};

// Sets `holds` from must, sense, ratio and value, where there is all of it.
void Judge(BenchRow* row);

// Nearest-rank; `values` not empty.
double Median(std::vector<double> values);
double RelativeSpread(std::vector<double> values);

// Fills ratio, spread and rounds from the rounds' ratios and judges.
void SetRatios(const std::vector<double>& ratios, int disturbed, BenchRow* row);
// The same for a row that is held by its values.
void SetValues(const std::vector<double>& values, int disturbed, BenchRow* row);

// Median seconds of a launch, of the same with K/V in the nearest cache, and of
// what it is held against, 0 = it is not: reading; multiplying in registers,
// fed from L1, and with softmax as well.
struct BoundTimes {
  double run = 0;
  double near = 0;
  double read = 0;
  double multiply = 0;
  double fed = 0;
  double weighed = 0;
};

// What holds a launch back that does not reach `must` of its limit.
std::string WhatHoldsBack(const BoundTimes& times, double must);

Json ToJson(const BenchRow& row);
std::string RowsText(std::span<const BenchRow> rows);

// One thing to measure: returns seconds, or a rate, of one go.
struct Sampler {
  std::function<Result<double>()> go;
  bool repeats = true;  // short goes are repeated to a sample of a few ms
  // Each sample begins with some 20 ms of goes that do not count, so that none
  // is measured as the samplers before it leave the machine. They bring back to
  // its cache what those, and whoever shares the cache, drove out (Zen 5, 17 MB
  // of K/V after 30 ms of other work: 446 us, 239, 186, the 7th to the 14th 178
  // to 164, and 137 from the 60th on); and workers that were at L2 find the
  // pace of DRAM again (decode from there up to 10% slower at first).
  bool warms = false;
};

struct SampleBudget {
  double seconds = 1;  // of all rounds together, as far as min_rounds allows
  int min_rounds = 7;
  int max_rounds = 41;
  bool retries = true;  // takes more rounds in place of disturbed ones
};

struct Samples {
  std::vector<std::vector<double>> of;  // [samplers][rounds that count]
  std::vector<double> low;              // [samplers] least single go
  std::vector<double> high;             // [samplers] greatest
  int rounds = 0;                       // taken
  int disturbed = 0;                    // of those: somebody took a core
};

// Takes every sampler in turn, round after round (A B C A B C ...), after one
// warm-up go each. A round in which this process lost a core to another one
// says nothing of either side: it is left out, and with `retries` up to twice
// the budget is spent on min_rounds quiet ones. Where there are still fewer,
// all count. Where one round is enough and dearer than the budget, the warm-up
// is that round.
Result<Samples> Interleave(std::span<const Sampler> samplers,
                           const SampleBudget& budget);

// A row of two samplers that took turns: value and limit are their medians in
// us, the ratio is that of first to second, round by round; `is_speedup` turns
// it round.
void SetPair(const Samples& samples, bool is_speedup, BenchRow* row);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_BENCH_ROWS_H_
