// Rows on the launch engine: what an empty launch costs, and threadgroups that
// find nothing to do.
//
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <utility>

#include "tools/bench_session.h"
#include "tools/clock.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::Heads;
constexpr int kEmptyLaunches = 200;
constexpr int64_t kSurplus = 100000;

// Mean seconds of one launch of one threadgroup that does nothing.
Result<double> EmptyLaunch(Runtime* runtime) {
  const auto body = [](const Threadgroup&) {};
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < kEmptyLaunches; ++i) {
    VARLANE_TOOLS_TRY(runtime->Launch(Grid{1}, body));
  }
  const std::chrono::duration<double> elapsed = Clock::now() - start;
  return elapsed.count() / kEmptyLaunches;
}

Status MeasureEmpty(BenchSession* session, BenchRow* row) {
  const std::vector<Sampler> samplers = {
      {[=] { return EmptyLaunch(session->runtime()); }}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> micros;
  for (const double seconds : samples.of[0]) micros.push_back(seconds * 1e6);
  SetValues(micros, samples.disturbed, row);
  return {};
}

// What each of `count` threadgroups adds to an empty launch.
Status MeasureEach(BenchSession* session, const Sampler& launch, int64_t count,
                   BenchRow* row) {
  const std::vector<Sampler> samplers = {
      launch, {[=] { return EmptyLaunch(session->runtime()); }}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> each;
  for (size_t i = 0; i < samples.of[0].size(); ++i) {
    each.push_back((samples.of[0][i] - samples.of[1][i]) /
                   static_cast<double>(count) * 1e9);
  }
  SetValues(each, samples.disturbed, row);
  return {};
}

// The engine alone: bodies that return at once.
Status MeasureBare(BenchSession* session, BenchRow* row) {
  const Sampler launch = {[=]() -> Result<double> {
    const auto body = [](const Threadgroup&) {};
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(session->runtime()->Launch(Grid{kSurplus}, body));
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    return elapsed.count();
  }};
  return MeasureEach(session, launch, kSurplus, row);
}

// Sequences without query tokens still have their over-provisioned query block:
// every one of its threadgroups asks for its owner and returns.
Status MeasureSurplus(BenchSession* session, OwnerPattern owner,
                      BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const bench::KvFixture* const fixture,
                       session->Fixture(DType::kBF16, Heads{}, 1));
  const auto idle = static_cast<int>(kSurplus / Heads{}.kv);
  const bench::Shape shape = {"surplus", {{idle, 0, 0}, {1, 1, 16}}};
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<bench::Workload> work,
      bench::Workload::Create(
          session->attention(), fixture, shape,
          {.plan = {.owner = owner, .kv_heads_per_threadgroup = 1}}));
  VARLANE_TOOLS_TRY(
      MeasureEach(session, {[&work] { return work->Run(); }}, kSurplus, row));
  const int64_t surplus = work->report().surplus_threadgroups;
  if (surplus >= kSurplus) return {};
  return Fail(StatusCode::kInternal, "only {} threadgroups were surplus",
              surplus);
}

BenchRow ValueRow(std::string name, const char* unit, double must) {
  BenchRow row;
  row.name = std::move(name);
  row.unit = unit;
  row.sense = Sense::kValueAtMost;
  row.must = must;
  return row;
}

}  // namespace

void AddLaunchRows(BenchSession* session) {
  session->Add(ValueRow("launch of one empty threadgroup", "us", 3),
               [=](BenchRow* row) { return MeasureEmpty(session, row); });
  session->Add(ValueRow("surplus threadgroup of 100000, bare", "ns", 15),
               [=](BenchRow* row) { return MeasureBare(session, row); });
  for (const OwnerPattern owner :
       {OwnerPattern::kSearch, OwnerPattern::kMap, OwnerPattern::kPadded}) {
    session->Add(
        ValueRow(std::string("surplus threadgroup of 100000, ") +
                     OwnerPatternName(owner),
                 "ns", 15),
        [=](BenchRow* row) { return MeasureSurplus(session, owner, row); });
  }
}

}  // namespace varlane::tools
