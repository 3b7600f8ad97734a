// Rows on whole batches: mixed and ragged ones beside their parts, a window
// beside a short context, modified scores beside plain ones, two workers beside
// one, other kernel tables.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <numeric>
#include <utility>

#include "tools/bench_session.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::Heads;
using bench::KvFixture;
using bench::Shape;
using bench::Workload;

constexpr const char* kSuffix = " bf16 16/4/128";

// --- a batch beside the sum of its parts -------------------------------------

// Each part on its own stretch of the pool: the same blocks as in the whole
// would be warm.
Status MeasureParts(BenchSession* session, const Shape& whole,
                    const std::vector<Shape>& parts, SampleBudget budget,
                    BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(
      const KvFixture* const fixture,
      session->Fixture(DType::kBF16, Heads{}, 2 * whole.num_blocks()));
  std::vector<std::unique_ptr<Workload>> works;
  std::vector<Sampler> samplers;
  const auto add = [&](const Shape& shape, int64_t first_block) -> Status {
    VARLANE_TOOLS_ASSIGN(std::unique_ptr<Workload> work,
                         Workload::Create(session->attention(), fixture, shape,
                                          {.first_block = first_block}));
    works.push_back(std::move(work));
    // Goes are not repeated one by one: whole and parts alternate.
    samplers.push_back(
        {[at = works.back().get()] { return at->Run(); }, false});
    return {};
  };
  VARLANE_TOOLS_TRY(add(whole, 0));
  int64_t first_block = whole.num_blocks();
  for (const Shape& part : parts) {
    VARLANE_TOOLS_TRY(add(part, first_block));
    first_block += part.num_blocks();
  }
  VARLANE_TOOLS_ASSIGN(const auto samples, Interleave(samplers, budget));
  std::vector<double> sums;
  std::vector<double> ratios;
  for (size_t round = 0; round < samples.of[0].size(); ++round) {
    double sum = 0;
    for (size_t part = 1; part < samples.of.size(); ++part) {
      sum += samples.of[part][round];
    }
    sums.push_back(sum);
    ratios.push_back(samples.of[0][round] / sum);
  }
  row->value = Median(samples.of[0]) * 1e6;
  row->limit = Median(sums) * 1e6;
  row->best_ratio = samples.low[0] / std::accumulate(samples.low.begin() + 1,
                                                     samples.low.end(), 0.0);
  row->detail = "limit: the parts one after the other";
  SetRatios(ratios, samples.disturbed, row);
  return {};
}

void AddPartsRow(BenchSession* session, const Shape& whole,
                 const std::vector<Shape>& parts) {
  BenchRow row;
  row.name = whole.name + kSuffix;
  row.unit = "us";
  row.sense = Sense::kRatioAtMost;
  row.must = 1.05;
  // Where a round takes seconds, few must do.
  constexpr int64_t kLongPrefill = 16384;
  const bool is_long = whole.total_q() > kLongPrefill;
  SampleBudget budget = session->budget();
  if (is_long) budget.min_rounds = 3;
  const Measure measure = [&](BenchRow* to) {
    return MeasureParts(session, whole, parts, budget, to);
  };
  if (is_long) {
    session->AddLong(std::move(row), measure);
  } else {
    session->Add(std::move(row), measure);
  }
}

// One workload in turns with what it is held against.
Status MeasureBeside(BenchSession* session, Workload* work, Workload* limit,
                     BenchRow* row) {
  const std::vector<Sampler> samplers = {{[=] { return work->Run(); }},
                                         {[=] { return limit->Run(); }}};
  VARLANE_TOOLS_ASSIGN(const auto samples,
                       Interleave(samplers, session->budget()));
  SetPair(samples, false, row);
  return {};
}

// --- a window beside a short context -----------------------------------------

Status MeasureWindow(BenchSession* session, BenchRow* row) {
  constexpr int kWindow = 1024;
  constexpr int kSeqs = 8;
  Shape windowed = {"windowed", {{kSeqs, 1, 32768}}};
  windowed.mask.window_left = kWindow - 1;
  const Shape plain = {"plain", {{kSeqs, 1, kWindow}}};
  VARLANE_TOOLS_ASSIGN(
      const KvFixture* const fixture,
      session->Fixture(DType::kBF16, Heads{},
                       windowed.num_blocks() + plain.num_blocks()));
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<Workload> with,
      Workload::Create(session->attention(), fixture, windowed));
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<Workload> without,
      Workload::Create(session->attention(), fixture, plain,
                       {.first_block = windowed.num_blocks()}));
  row->detail = "limit: a context of 1024, no window";
  return MeasureBeside(session, with.get(), without.get(), row);
}

// --- modified scores beside plain ones ---------------------------------------

Status MeasureModified(BenchSession* session, const Shape& modified,
                       DType dtype, BenchRow* row) {
  Shape plain = modified;
  plain.softcap = 0;
  plain.alibi = false;
  VARLANE_TOOLS_ASSIGN(const KvFixture* const fixture,
                       session->Fixture(dtype, Heads{}, plain.num_blocks()));
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<Workload> with,
      Workload::Create(session->attention(), fixture, modified));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Workload> without,
                       Workload::Create(session->attention(), fixture, plain));
  row->detail = "limit: the same without";
  return MeasureBeside(session, with.get(), without.get(), row);
}

void AddModifiedRow(BenchSession* session, const Shape& modified, DType dtype) {
  BenchRow row;
  row.name = modified.name + " " + DTypeName(dtype) + " " + Heads{}.Name();
  row.unit = "us";
  row.sense = Sense::kRatioAtMost;
  session->Add(std::move(row), [=](BenchRow* to) {
    return MeasureModified(session, modified, dtype, to);
  });
}

// --- two workers beside one --------------------------------------------------

// Multiplies bind, not memory: what one core can do two can do twice.
const std::vector<Shape>& ComputeBound() {
  static const std::vector<Shape> shapes = {
      {"prefill 1x4096@4096", {{1, 4096, 4096}}},
      {"prefill chunk 1x512@8192", {{1, 512, 8192}}},
      {"prefill 8x512@512", {{8, 512, 512}}},
  };
  return shapes;
}

Status MeasureScaling(BenchSession* session, const Shape& shape, DType dtype,
                      BenchRow* row) {
  RuntimeOptions options = session->options().runtime;
  options.num_threads = 1;
  VARLANE_TOOLS_ASSIGN(const Engine one, MakeEngine(options));
  options.num_threads = 2;
  VARLANE_TOOLS_ASSIGN(const Engine two, MakeEngine(options));
  if (two.runtime->num_workers() < 2) {
    return Fail(StatusCode::kFailedPrecondition,
                "this machine lets us have one core only");
  }
  VARLANE_TOOLS_ASSIGN(const KvFixture* const fixture,
                       session->Fixture(dtype, Heads{}, shape.num_blocks()));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Workload> with_one,
                       Workload::Create(one.attention.get(), fixture, shape));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Workload> with_two,
                       Workload::Create(two.attention.get(), fixture, shape));
  const std::vector<Sampler> samplers = {
      {[&] { return with_two->Run(); }},
      {[&] { return with_one->Run(); }},
      {[&] { return session->Peak(two.runtime.get(), dtype); }, false},
      {[&] { return session->Peak(one.runtime.get(), dtype); }, false}};
  VARLANE_TOOLS_ASSIGN(const auto samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> ratios;
  std::vector<double> machine;
  for (size_t i = 0; i < samples.of[0].size(); ++i) {
    ratios.push_back(samples.of[1][i] / samples.of[0][i]);
    machine.push_back(samples.of[2][i] / samples.of[3][i]);
  }
  row->value = Median(samples.of[0]) * 1e6;
  row->limit = Median(samples.of[1]) * 1e6;
  row->detail =
      fmt::format("limit: one worker; the multiply peak itself grows {:.2f}x",
                  Median(machine));
  SetRatios(ratios, samples.disturbed, row);
  if (row->holds == false && Median(machine) < *row->must) {
    row->reason = "two cores do not multiply that much faster than one";
  }
  return {};
}

void AddScalingRow(BenchSession* session, const Shape& shape, DType dtype) {
  BenchRow row;
  row.name = "2 workers / 1, " + shape.name + " " + DTypeName(dtype) + " " +
             Heads{}.Name();
  row.unit = "us";
  row.must = 1.9;
  session->Add(std::move(row), [&](BenchRow* to) {
    return MeasureScaling(session, shape, dtype, to);
  });
}

// --- other kernel tables -----------------------------------------------------

Status MeasureTarget(BenchSession* session, const std::string& target,
                     const Shape& shape, DType dtype, BenchRow* row) {
  RuntimeOptions options = session->options().runtime;
  options.simd_target = target;
  VARLANE_TOOLS_ASSIGN(const Engine other, MakeEngine(options));
  options.simd_target = SupportedSimdTargets().front();
  VARLANE_TOOLS_ASSIGN(const Engine best, MakeEngine(options));
  VARLANE_TOOLS_ASSIGN(const KvFixture* const fixture,
                       session->Fixture(dtype, Heads{}, shape.num_blocks()));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Workload> work,
                       Workload::Create(other.attention.get(), fixture, shape));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Workload> reference,
                       Workload::Create(best.attention.get(), fixture, shape));
  VARLANE_TOOLS_ASSIGN(const double first, reference->Run());
  (void)first;
  const std::vector<Sampler> samplers = {
      {[&] { return work->Run(); }},
      {[&] { return session->Peak(other.runtime.get(), dtype); }, false}};
  VARLANE_TOOLS_ASSIGN(const auto samples,
                       Interleave(samplers, session->budget()));
  const auto flops = static_cast<double>(work->report().flops);
  std::vector<double> ratios;
  for (size_t i = 0; i < samples.of[0].size(); ++i) {
    ratios.push_back(flops / samples.of[0][i] / samples.of[1][i]);
  }
  row->value = flops / Median(samples.of[0]) * 1e-9;
  row->limit = Median(samples.of[1]) * 1e-9;
  row->best_ratio = flops / samples.low[0] / samples.high[1];
  SetRatios(ratios, samples.disturbed, row);
  row->holds = std::ranges::equal(work->out(), reference->out());
  row->detail =
      std::string(*row->holds ? "the same bits as " : "other bits than ") +
      best.attention->simd_target();
  return {};
}

void AddTargetRow(BenchSession* session, const std::string& target,
                  DType dtype) {
  static const Shape shape = {"prefill 1x512@512", {{1, 512, 512}}};
  BenchRow row;
  row.name = target + " bits, " + shape.name + " " + DTypeName(dtype) + " " +
             Heads{}.Name();
  row.unit = "GFLOP/s";
  session->Add(std::move(row), [&](BenchRow* to) {
    return MeasureTarget(session, target, shape, dtype, to);
  });
}

std::vector<DType> DTypes(const BenchSession* session,
                          const std::vector<DType>& all) {
  return session->options().quick ? std::vector{DType::kBF16} : all;
}

}  // namespace

void AddBatchRows(BenchSession* session) {
  const bench::Group decodes = {32, 1, 512};
  const bench::Group prefills = {4, 512, 512};
  AddPartsRow(session, {"mixed 32x1@512 + 4x512@512", {decodes, prefills}},
              {{"decodes", {decodes}}, {"prefills", {prefills}}});
  AddPartsRow(
      session,
      {"decode 30000 + 5000 + 10", {{1, 1, 30000}, {1, 1, 5000}, {1, 1, 10}}},
      {{"30000", {{1, 1, 30000}}},
       {"5000", {{1, 1, 5000}}},
       {"10", {{1, 1, 10}}}});
  AddPartsRow(session,
              {"prefill 30000 + 5000 + 10",
               {{1, 30000, 30000}, {1, 5000, 5000}, {1, 10, 10}}},
              {{"30000", {{1, 30000, 30000}}},
               {"5000", {{1, 5000, 5000}}},
               {"10", {{1, 10, 10}}}});
  BenchRow window;
  window.name = std::string("window 1024 of 8x1@32768") + kSuffix;
  window.unit = "us";
  window.sense = Sense::kRatioAtMost;
  session->Add(std::move(window),
               [=](BenchRow* row) { return MeasureWindow(session, row); });
}

void AddModifiedRows(BenchSession* session) {
  for (const DType dtype : DTypes(session, {DType::kBF16, DType::kF32})) {
    Shape chunk = {"softcap, prefill chunk 1x512@8192", {{1, 512, 8192}}};
    chunk.softcap = 30;
    AddModifiedRow(session, chunk, dtype);
    chunk.name = "ALiBi, prefill chunk 1x512@8192";
    chunk.softcap = 0;
    chunk.alibi = true;
    AddModifiedRow(session, chunk, dtype);
  }
}

void AddScalingRows(BenchSession* session) {
  for (const DType dtype :
       DTypes(session, {DType::kBF16, DType::kF32, DType::kF16})) {
    for (const Shape& shape : ComputeBound()) {
      AddScalingRow(session, shape, dtype);
    }
  }
}

void AddTargetRows(BenchSession* session) {
  const std::vector<std::string> targets = SupportedSimdTargets();
  for (size_t i = 1; i < targets.size(); ++i) {
    for (const DType dtype : DTypes(session, {DType::kBF16, DType::kF32})) {
      AddTargetRow(session, targets[i], dtype);
    }
  }
}

}  // namespace varlane::tools
