// Rows on the launch engine: what an empty launch costs, and threadgroups that
// find nothing to do.
//
// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <utility>

#include "tools/bench_session.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::Heads;
using Clock = std::chrono::steady_clock;

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
  VARLANE_TOOLS_ASSIGN(const auto samples,
                       Interleave(samplers, session->budget()));
  row->value = Median(samples[0]) * 1e6;
  row->spread = RelativeSpread(samples[0]);
  row->rounds = static_cast<int>(samples[0].size());
  Judge(row);
  return {};
}

// Sequences without query tokens still have their over-provisioned query block:
// every one of its threadgroups searches its owner and returns.
Status MeasureSurplus(BenchSession* session, BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<bench::KvFixture> fixture,
                       session->MakeFixture(DType::kBF16, Heads{}, 1));
  const auto idle = static_cast<int>(kSurplus / Heads{}.kv);
  const bench::Shape shape = {"surplus", {{idle, 0, 0}, {1, 1, 16}}};
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<bench::Workload> work,
      bench::Workload::Create(session->attention(), fixture.get(), shape));
  const std::vector<Sampler> samplers = {
      {[&work] { return work->Run(); }},
      {[=] { return EmptyLaunch(session->runtime()); }}};
  VARLANE_TOOLS_ASSIGN(const auto samples,
                       Interleave(samplers, session->budget()));
  const int64_t surplus = work->report().surplus_threadgroups;
  if (surplus < kSurplus) {
    return Fail(StatusCode::kInternal, "only {} threadgroups were surplus",
                surplus);
  }
  std::vector<double> each;
  for (size_t i = 0; i < samples[0].size(); ++i) {
    each.push_back((samples[0][i] - samples[1][i]) /
                   static_cast<double>(surplus) * 1e9);
  }
  row->value = Median(each);
  row->spread = RelativeSpread(each);
  row->rounds = static_cast<int>(each.size());
  row->detail =
      fmt::format("{} surplus threadgroups, each with its search", surplus);
  Judge(row);
  return {};
}

}  // namespace

void AddLaunchRows(BenchSession* session) {
  BenchRow empty;
  empty.name = "launch of one empty threadgroup";
  empty.unit = "us";
  empty.sense = Sense::kValueAtMost;
  empty.must = 3;
  session->Add(std::move(empty),
               [=](BenchRow* row) { return MeasureEmpty(session, row); });
  BenchRow surplus;
  surplus.name = "surplus threadgroup of 100000";
  surplus.unit = "ns";
  surplus.sense = Sense::kValueAtMost;
  surplus.must = 15;
  session->Add(std::move(surplus),
               [=](BenchRow* row) { return MeasureSurplus(session, row); });
}

}  // namespace varlane::tools
