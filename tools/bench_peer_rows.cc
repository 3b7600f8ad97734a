// Rows beside an optional peer: a composition of oneDNN GEMMs and softmax.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "bench/gemm_peer.h"
#include "tools/bench_session.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::GemmPeer;
using bench::Heads;
using bench::Shape;
using bench::Workload;

// Both compute the same thing: bf16 weights differ in the last bits.
Status Compare(const Workload& work, std::span<const float> theirs) {
  const auto* const ours = reinterpret_cast<const float*>(work.out().data());
  double worst = 0;
  double largest = 0;
  for (size_t i = 0; i < theirs.size(); ++i) {
    worst = std::max(worst, std::abs(double{ours[i]} - double{theirs[i]}));
    largest = std::max(largest, std::abs(double{ours[i]}));
  }
  if (worst <= 0.02 * largest) return {};
  return Fail(StatusCode::kInternal,
              "the peer computes something else: off by {} of {}", worst,
              largest);
}

// Why the peer is not left as far behind as it must be, for which the kernels
// would have to reach `share` of multiply-adds and softmax fed from L1.
std::string Obstacle(DType dtype, double must, double share) {
  if (GemmPeer::UsesAmx(dtype)) {
    return "AMX sums up a pair of products before it adds them: other bits "
           "than any chain of multiply-adds";
  }
  return fmt::format(
      "{:.2f} times its speed would be {:.2f} of multiply-adds and softmax fed "
      "from L1 and nothing else",
      must, share);
}

Status MeasurePeer(BenchSession* session, const Shape& shape, DType dtype,
                   BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const bench::KvFixture* const fixture,
                       session->Fixture(dtype, Heads{}, shape.num_blocks()));
  bench::WorkloadOptions options;
  options.out_dtype = DType::kF32;  // as the peer's
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<Workload> work,
      Workload::Create(session->attention(), fixture, shape, options));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<GemmPeer> by_head,
                       GemmPeer::Create(session->runtime(), *work, false));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<GemmPeer> by_group,
                       GemmPeer::Create(session->runtime(), *work, true));
  const std::vector<Sampler> samplers = {
      {.go = [&] { return work->Run(); }, .warms = true},
      {.go = [&] { return by_head->Run(); }, .warms = true},
      {.go = [&] { return by_group->Run(); }, .warms = true},
      {.go = [&] { return session->AttentionPeak(dtype, Heads{}.size); },
       .repeats = false}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  VARLANE_TOOLS_TRY(Compare(*work, by_head->out()));
  VARLANE_TOOLS_TRY(Compare(*work, by_group->out()));
  const bool head_wins = Median(samples.of[1]) <= Median(samples.of[2]);
  const std::vector<double>& peer = samples.of[head_wins ? 1 : 2];
  std::vector<double> ratios;
  for (size_t i = 0; i < peer.size(); ++i) {
    ratios.push_back(peer[i] / samples.of[0][i]);
  }
  row->value = Median(samples.of[0]) * 1e6;
  row->limit = Median(peer) * 1e6;
  row->best_ratio = std::min(samples.low[1], samples.low[2]) / samples.low[0];
  const auto flops = static_cast<double>(work->report().flops);
  row->detail = fmt::format(
      "limit: the peer, {}, {:.0f} GFLOP/s{}",
      head_wins ? "a query head a task" : "a KV head's group a task",
      flops / *row->limit * 1e-3,
      GemmPeer::UsesAmx(dtype) ? " in AMX tiles" : "");
  SetRatios(ratios, samples.disturbed, row);
  if (row->holds == false) {
    const double asked = *row->must * flops / Median(peer);
    row->reason = Obstacle(dtype, *row->must, asked / Median(samples.of[3]));
  }
  return {};
}

}  // namespace

void AddPeerRows(BenchSession* session) {
  static const std::vector<Shape> shapes = {
      {"prefill 1x4096@4096", {{1, 4096, 4096}}},
      {"prefill chunk 1x512@8192", {{1, 512, 8192}}},
      {"prefill 8x512@512", {{8, 512, 512}}},
  };
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    if (session->options().quick && dtype != DType::kBF16) continue;
    for (const Shape& shape : shapes) {
      BenchRow row;
      row.name = "oneDNN / ours, " + shape.name + " " + DTypeName(dtype) + " " +
                 Heads{}.Name();
      row.unit = "us";
      row.must = 1.25;
      session->Add(std::move(row), [&](BenchRow* to) {
        return MeasurePeer(session, shape, dtype, to);
      });
    }
  }
}

}  // namespace varlane::tools
