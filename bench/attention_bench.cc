// Attention end to end on the reference shapes: every target, every cache type.
//
// K/V blocks stand in shuffled order, in a pool larger than the last-level
// cache where the shape's name does not say otherwise.
// SPDX-License-Identifier: Apache-2.0

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "varlane/attention.h"
#include "varlane/kv_pool.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

struct Shape {
  const char* name;
  int num_seqs;
  int q_len;
  int context;
};

constexpr Shape kShapes[] = {
    {"decode_64x1@128", 64, 1, 128},    {"decode_64x1@2048", 64, 1, 2048},
    {"decode_1x1@32768", 1, 1, 32768},  {"verify_64x5@2048", 64, 5, 2048},
    {"prefill_8x512@512", 8, 512, 512}, {"prefill_1x4096@4096", 1, 4096, 4096},
};

// 16 query heads, 4 KV heads, head size 128: the reference head counts.
constexpr int kQueryHeads = 16;

struct Problem {
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Attention> attention;
  std::unique_ptr<KvPool> pool;
  AttentionPlan plan;
  std::vector<BF16> q;
  std::vector<float> out;
  Status status;
};

Status Fill(const Shape& shape, DType dtype, const std::string& target,
            Problem* problem) {
  RuntimeOptions options;
  options.simd_target = target;
  auto runtime = Runtime::Create(options);
  if (!runtime.ok()) return runtime.status();
  problem->runtime = std::move(runtime).value();
  auto attention = Attention::Create(problem->runtime.get());
  if (!attention.ok()) return attention.status();
  problem->attention = std::move(attention).value();

  KvPoolOptions pool_options;
  pool_options.layout = {.dtype = dtype,
                         .num_layers = 1,
                         .num_kv_heads = 4,
                         .head_size = 128,
                         .v_head_size = 128,
                         .block_size = 16};
  const int64_t per_seq = (shape.context + 15) / 16;
  pool_options.num_blocks = per_seq * shape.num_seqs;
  auto pool = KvPool::Create(pool_options, problem->runtime.get());
  if (!pool.ok()) return pool.status();
  problem->pool = std::move(pool).value();

  std::vector<int32_t> tables(size_t(pool_options.num_blocks));
  std::iota(tables.begin(), tables.end(), 0);
  std::shuffle(tables.begin(), tables.end(), std::mt19937(1));
  std::mt19937 rng(2);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> kv(16 * 4 * 128);
  std::vector<int64_t> slots(16);
  for (int64_t block = 0; block < pool_options.num_blocks; ++block) {
    for (float& x : kv) x = uniform(rng);
    std::iota(slots.begin(), slots.end(), block * 16);
    const Status status = problem->attention->WriteKv(
        problem->pool->view(), 0, {kv.data(), DType::kF32},
        {kv.data(), DType::kF32}, slots);
    if (!status.ok()) return status;
  }
  std::vector<int32_t> cu = {0};
  for (int i = 0; i < shape.num_seqs; ++i)
    cu.push_back(cu.back() + shape.q_len);
  const std::vector<int32_t> lens(size_t(shape.num_seqs), shape.context);
  problem->q.resize(size_t(cu.back()) * kQueryHeads * 128);
  for (BF16& x : problem->q) x = ToBF16(uniform(rng));
  problem->out.resize(problem->q.size());
  AttentionShape attention_shape;
  attention_shape.num_q_heads = kQueryHeads;
  return problem->attention->Plan({cu, lens, tables, per_seq}, attention_shape,
                                  problem->pool->view(), {}, &problem->plan);
}

void BM_Attention(benchmark::State& state, const Shape& shape, DType dtype,
                  const std::string& target) {
  Problem problem;
  const Status status = Fill(shape, dtype, target, &problem);
  if (!status.ok()) {
    state.SkipWithError(status.ToString().c_str());
    return;
  }
  AttentionTensors tensors;
  tensors.q = {problem.q.data(), DType::kBF16};
  tensors.out = {problem.out.data(), DType::kF32};
  LaunchReport report;
  double seconds = 0;
  for (auto _ : state) {
    const Status run = problem.attention->Run(
        &problem.plan, problem.pool->view(), 0, tensors, &report);
    if (!run.ok()) {
      state.SkipWithError(run.ToString().c_str());
      return;
    }
    seconds += report.seconds;
  }
  const auto runs = static_cast<double>(state.iterations());
  state.counters["kv_GB_per_s"] =
      double(report.kv_bytes) * runs / seconds / 1e9;
  state.counters["GFLOP_per_s"] = double(report.flops) * runs / seconds / 1e9;
}

void RegisterAll() {
  for (const Shape& shape : kShapes) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      for (const std::string& target : SupportedSimdTargets()) {
        const std::string name = std::string("BM_Attention/") + shape.name +
                                 "/" + DTypeName(dtype) + "/" + target;
        benchmark::RegisterBenchmark(
            name.c_str(),
            [=](benchmark::State& s) { BM_Attention(s, shape, dtype, target); })
            ->UseRealTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
}

}  // namespace
}  // namespace varlane

int main(int argc, char** argv) {
  varlane::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
