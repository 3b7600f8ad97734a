// Rows that hold a launch against the machine: reading, multiplying, or the
// slower of the two.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <optional>
#include <utility>

#include "tools/bench_session.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::Heads;
using bench::KvFixture;
using bench::Shape;
using bench::Workload;

enum class Bound : uint8_t {
  kRead,     // paged read bandwidth
  kTighter,  // that or the multiply peak, whichever takes longer
  kPeak,     // the multiply peak
};

struct Demand {
  Shape shape;
  Bound bound;
  bool cold;
  // By dtype; 0 = not measured for this type.
  double bf16;
  double f32;
  double f16;

  double must(DType dtype) const {
    return dtype == DType::kBF16 ? bf16 : dtype == DType::kF32 ? f32 : f16;
  }
};

// What is measured, and nothing demanded.
constexpr double kShown = -1;
Demand Shown(Shape shape, Bound bound, bool cold) {
  return {std::move(shape), bound, cold, kShown, kShown, kShown};
}

// `count` sequences of a token each.
Shape Decode(int count, int context) {
  return {fmt::format("decode {}x1@{}", count, context), {{count, 1, context}}};
}

// Contexts of any length, as a service has them: few end where a tile does.
Shape MixedLengths() {
  Shape shape = {"decode 64x1@8..2087", {}};
  for (int i = 0; i < 64; ++i) shape.groups.push_back({1, 1, 8 + 33 * i});
  return shape;
}

// Each row sees the keys of two tiles, in two or three.
Shape WindowedPrefill() {
  Shape shape = {"prefill 1x4096, window 128", {{1, 4096, 4096}}};
  shape.mask.window_left = 127;
  return shape;
}

// The smallest cold decode stands first: its comparison of read loops serves
// the larger ones.
const std::vector<Demand>& Demands() {
  static const std::vector<Demand> demands = {
      {Decode(8, 8192), Bound::kRead, true, .9, .9, .9},
      {Decode(64, 2048), Bound::kRead, true, .9, .9, .9},
      {Decode(1024, 2048), Bound::kRead, true, .9, .9, .9},
      {Decode(1, 32768), Bound::kRead, true, .9, .9, .9},
      Shown(MixedLengths(), Bound::kRead, true),
      {Decode(64, 128), Bound::kTighter, false, .75, 0, 0},
      {Decode(256, 128), Bound::kTighter, false, .75, 0, 0},
      {Decode(1024, 128), Bound::kTighter, false, .75, 0, 0},
      {{"verify 64x5@2048", {{64, 5, 2048}}}, Bound::kTighter, false, .8, 0, 0},
      {{"prefill 1x4096@4096", {{1, 4096, 4096}}},
       Bound::kPeak,
       false,
       .85,
       .8,
       .8},
      {{"prefill chunk 1x512@8192", {{1, 512, 8192}}},
       Bound::kPeak,
       false,
       .85,
       .8,
       .8},
      {{"prefill 8x512@512", {{8, 512, 512}}},
       Bound::kPeak,
       false,
       .75,
       .8,
       .8},
      Shown(WindowedPrefill(), Bound::kPeak, false),
  };
  return demands;
}

// What is shown of large GQA groups, whose rows take several register groups or
// one of more rows beside fewer vectors.
const std::vector<Demand>& LargeGroups() {
  static const std::vector<Demand> demands = {
      Shown(Decode(64, 2048), Bound::kTighter, true),
      Shown(Decode(64, 128), Bound::kTighter, false),
  };
  return demands;
}

// What is shown of blocks of other sizes.
const std::vector<Demand>& OtherBlocks() {
  static const std::vector<Demand> demands = {
      Shown(Decode(64, 2048), Bound::kRead, true),
  };
  return demands;
}

std::string RowName(const Demand& demand, DType dtype, const Heads& heads) {
  return demand.shape.name + " " + DTypeName(dtype) + " " + heads.Name();
}

int Copies(const Demand& demand, DType dtype, const Heads& heads) {
  return demand.cold ? ColdCopies(KvBytes(demand.shape, heads, dtype)) : 1;
}

// Filling a pool of this size takes longer than a quick row may.
bool IsLong(const Demand& demand, DType dtype, const Heads& heads) {
  constexpr int64_t kLongBytes = int64_t{1} << 30;
  return KvBytes(demand.shape, heads, dtype) > kLongBytes;
}

// Few enough for every worker's L2 beside what else it holds, whatever the
// type.
constexpr int kNearTokens = 64;

// Times of one round: the launch, the same over blocks in the nearest cache,
// the plain read, the multiplies in registers, the launch's own kind of them
// fed from L1, and those with softmax between them.
struct Times {
  std::vector<double> run;
  std::vector<double> near;
  std::vector<double> read;
  std::vector<double> multiply;
  std::vector<double> fed;
  std::vector<double> weighed;
  int disturbed = 0;
  double best_run = 0;  // of single goes
  double best_limit = 0;
};

Status TakeSamples(BenchSession* session, Bound bound, DType dtype,
                   Workload* work, Workload* near, Times* times,
                   BenchRow* row) {
  // What is near is so at its second go.
  std::vector<Sampler> samplers = {
      {.go = [=] { return work->Run(); }, .warms = true},
      {.go = [=] { return near->Run(); }}};
  std::vector<int> loops;
  if (bound != Bound::kPeak) {
    VARLANE_TOOLS_ASSIGN(loops, session->BestLoops(work));
    for (const int loop : loops) {
      samplers.push_back(
          {.go = [=] { return work->Read(session->runtime(), loop); },
           .warms = true});
    }
  }
  const size_t multiplies = samplers.size();
  if (bound != Bound::kRead) {
    // What a launch takes at least is a matter of the faster way to multiply.
    Runtime* of = session->runtime();
    if (bound == Bound::kPeak) {
      VARLANE_TOOLS_ASSIGN(of, session->DotRuntime(dtype));
    }
    samplers.push_back(
        {.go = [=] { return session->Peak(of, dtype); }, .repeats = false});
    samplers.push_back(
        {.go = [=] { return session->Peak(dtype, Operands::kL1); },
         .repeats = false});
    const int head_size = work->fixture().heads().size;
    samplers.push_back(
        {.go = [=] { return session->AttentionPeak(dtype, head_size); },
         .repeats = false});
    if (of != session->runtime()) {
      samplers.push_back(
          {.go = [=] { return session->Peak(dtype); }, .repeats = false});
    }
  }
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  times->run = samples.of[0];
  times->near = samples.of[1];
  times->best_run = samples.low[0];
  times->disturbed = samples.disturbed;
  if (bound != Bound::kPeak) {
    const size_t best = Median(samples.of[2]) <= Median(samples.of[3]) ? 0 : 1;
    times->read = samples.of[2 + best];
    times->best_limit = std::min(samples.low[2], samples.low[3]);
    VARLANE_TOOLS_ASSIGN(const ReadProbe* const probe,
                         work->Probe(session->runtime()));
    row->detail = "read: " + probe->LoopName(loops[best]);
  }
  if (bound != Bound::kRead) {
    const auto flops = static_cast<double>(work->report().flops);
    for (size_t i = 0; i < times->run.size(); ++i) {
      times->multiply.push_back(flops / samples.of[multiplies][i]);
      times->fed.push_back(flops / samples.of[multiplies + 1][i]);
      times->weighed.push_back(flops / samples.of[multiplies + 2][i]);
    }
    times->best_limit =
        std::max(times->best_limit, flops / samples.high[multiplies]);
    if (multiplies + 3 < samplers.size()) {
      row->detail = fmt::format(
          "limit: dot products; multiply-adds reach {:.0f}, this {:.2f} of it",
          Median(samples.of.back()) * 1e-9,
          flops / Median(times->run) / Median(samples.of.back()));
    }
  }
  return {};
}

// Seconds no launch can beat, round by round.
std::vector<double> LimitSeconds(const Times& times) {
  if (times.read.empty()) return times.multiply;
  if (times.multiply.empty()) return times.read;
  std::vector<double> limit;
  for (size_t i = 0; i < times.read.size(); ++i) {
    limit.push_back(std::max(times.read[i], times.multiply[i]));
  }
  return limit;
}

BoundTimes Medians(const Times& times) {
  const auto median = [](const std::vector<double>& of) {
    return of.empty() ? 0 : Median(of);
  };
  return {.run = median(times.run),
          .near = median(times.near),
          .read = median(times.read),
          .multiply = median(times.multiply),
          .fed = median(times.fed),
          .weighed = median(times.weighed)};
}

// Which limit is the tighter one, and what was had of either.
std::string TighterText(const BoundTimes& times, double bytes, double flops) {
  return fmt::format(
      "{} binds; {:.1f} GB/s of {:.1f}, {:.0f} GFLOP/s of {:.0f}; ",
      times.read >= times.multiply ? "reading" : "multiplying",
      bytes / times.run * 1e-9, bytes / times.read * 1e-9,
      flops / times.run * 1e-9, flops / times.multiply * 1e-9);
}

// What is lost before anything but multiply-adds and softmax is done.
std::string FedText(const BoundTimes& times, double flops) {
  return fmt::format(
      "fed from L1 {:.0f}, with softmax {:.0f}, this {:.2f} of it; ",
      flops / times.fed * 1e-9, flops / times.weighed * 1e-9,
      times.weighed / times.run);
}

Status MeasureDemand(BenchSession* session, const Demand& demand,
                     const KvFixture& fixture, BenchRow* row) {
  const PlanOptions plan = {.kv_heads_per_threadgroup =
                                session->options().kv_heads_per_threadgroup};
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<Workload> work,
      Workload::Create(
          session->attention(), &fixture, demand.shape,
          {.copies = Copies(demand, fixture.dtype(), fixture.heads()),
           .plan = plan}));
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<Workload> near,
      Workload::Create(session->attention(), &fixture, demand.shape,
                       {.distinct_blocks = std::max(
                            kNearTokens / fixture.heads().block_size, 1),
                        .plan = plan}));
  Times times;
  VARLANE_TOOLS_TRY(TakeSamples(session, demand.bound, fixture.dtype(),
                                work.get(), near.get(), &times, row));
  const std::vector<double> limits = LimitSeconds(times);
  std::vector<double> ratios;
  for (size_t i = 0; i < limits.size(); ++i) {
    ratios.push_back(limits[i] / times.run[i]);
  }
  const LaunchReport& report = work->report();
  const auto bytes = static_cast<double>(report.kv_bytes);
  const auto flops = static_cast<double>(report.flops);
  const BoundTimes median = Medians(times);
  const double limit = Median(limits);
  if (demand.bound == Bound::kTighter) {
    row->detail = TighterText(median, bytes, flops) + row->detail;
    row->value = median.run * 1e6;
    row->limit = limit * 1e6;
  } else {
    const double work_done = demand.bound == Bound::kRead ? bytes : flops;
    row->value = work_done / median.run * 1e-9;
    row->limit = work_done / limit * 1e-9;
  }
  if (!row->detail.empty()) row->detail += "; ";
  if (!times.fed.empty()) row->detail += FedText(median, flops);
  row->detail += fmt::format("with K/V in the nearest cache {:.2f} of it",
                             median.near / median.run);
  row->best_ratio = times.best_limit / times.best_run;
  SetRatios(ratios, times.disturbed, row);
  if (row->holds == false) row->reason = WhatHoldsBack(median, *row->must);
  return {};
}

const char* UnitOf(Bound bound) {
  return bound == Bound::kRead   ? "GB/s"
         : bound == Bound::kPeak ? "GFLOP/s"
                                 : "us";
}

void AddDemands(BenchSession* session, const Heads& heads, DType dtype,
                const std::vector<Demand>& demands) {
  // One pool as large as the largest shape needs that memory allows.
  std::vector<const Demand*> wanted;
  int64_t num_blocks = 0;
  for (const Demand& demand : demands) {
    if (demand.must(dtype) == 0) continue;
    if (!session->Wants(RowName(demand, dtype, heads))) continue;
    wanted.push_back(&demand);
    const int64_t blocks = demand.shape.num_blocks(heads.block_size) *
                           Copies(demand, dtype, heads);
    if (session->options().quick && IsLong(demand, dtype, heads)) continue;
    if (blocks * bench::KvBlockBytes(heads, dtype) <=
        session->options().memory_bytes) {
      num_blocks = std::max(num_blocks, blocks);
    }
  }
  for (const Demand* demand : wanted) {
    BenchRow row;
    row.name = RowName(*demand, dtype, heads);
    row.unit = UnitOf(demand->bound);
    if (const double must = demand->must(dtype); must != kShown) {
      row.must = must;
    }
    const Measure measure = [&](BenchRow* to) -> Status {
      const int64_t blocks = demand->shape.num_blocks(heads.block_size) *
                             Copies(*demand, dtype, heads);
      VARLANE_TOOLS_ASSIGN(
          const KvFixture* const fixture,
          session->Fixture(dtype, heads, std::max(blocks, num_blocks)));
      return MeasureDemand(session, *demand, *fixture, to);
    };
    if (IsLong(*demand, dtype, heads)) {
      session->AddLong(std::move(row), measure);
    } else {
      session->Add(std::move(row), measure);
    }
  }
}

}  // namespace

void AddRatioRows(BenchSession* session, const Heads& heads, DType dtype) {
  AddDemands(session, heads, dtype, Demands());
}

void AddBlockSizeRows(BenchSession* session, const Heads& heads, DType dtype) {
  for (const int block_size : {32, 64, 128, 256}) {
    Heads other = heads;
    other.block_size = block_size;
    AddDemands(session, other, dtype, OtherBlocks());
  }
}

void AddLargeGroupRows(BenchSession* session) {
  for (const Heads& heads : {Heads{32, 4, 128}, Heads{64, 4, 128},
                             Heads{64, 8, 64}, Heads{8, 1, 256}}) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      AddDemands(session, heads, dtype, LargeGroups());
    }
  }
}

}  // namespace varlane::tools
