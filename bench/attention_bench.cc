// Attention end to end on the reference shapes: every target, every cache type.
//
// K/V blocks stand in shuffled order. `varlane bench kernels` measures the same
// workloads beside this machine's limits.
// SPDX-License-Identifier: Apache-2.0

#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <utility>

#include "bench/workload.h"

namespace varlane::bench {
namespace {

const Shape kShapes[] = {
    {"decode_64x1@128", {{64, 1, 128}}},
    {"decode_64x1@2048", {{64, 1, 2048}}},
    {"decode_1x1@32768", {{1, 1, 32768}}},
    {"verify_64x5@2048", {{64, 5, 2048}}},
    {"prefill_8x512@512", {{8, 512, 512}}},
    {"prefill_1x4096@4096", {{1, 4096, 4096}}},
};

struct Problem {
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Attention> attention;
  std::unique_ptr<KvFixture> fixture;
  std::unique_ptr<Workload> work;
};

template <typename T>
Status Take(Result<T> result, T* to) {
  if (!result.ok()) return result.status();
  *to = std::move(result).value();
  return {};
}

Status Make(const Shape& shape, DType dtype, const std::string& target,
            Problem* p) {
  RuntimeOptions options;
  options.simd_target = target;
  Status status = Take(Runtime::Create(options), &p->runtime);
  if (status.ok()) {
    status = Take(Attention::Create(p->runtime.get()), &p->attention);
  }
  if (status.ok()) {
    status = Take(
        KvFixture::Create(p->runtime.get(), dtype, Heads{}, shape.num_blocks()),
        &p->fixture);
  }
  if (status.ok()) {
    status = Take(Workload::Create(p->attention.get(), p->fixture.get(), shape),
                  &p->work);
  }
  return status;
}

void BM_Attention(benchmark::State& state, const Shape& shape, DType dtype,
                  const std::string& target) {
  Problem problem;
  const Status status = Make(shape, dtype, target, &problem);
  if (!status.ok()) {
    state.SkipWithError(status.ToString().c_str());
    return;
  }
  double seconds = 0;
  for (auto _ : state) {
    const Result<double> run = problem.work->Run();
    if (!run.ok()) {
      state.SkipWithError(run.status().ToString().c_str());
      return;
    }
    seconds += *run;
  }
  const LaunchReport& report = problem.work->report();
  const auto runs = static_cast<double>(state.iterations());
  state.counters["kv_GB_per_s"] =
      double(report.kv_bytes) * runs / seconds / 1e9;
  state.counters["GFLOP_per_s"] = double(report.flops) * runs / seconds / 1e9;
}

void RegisterAll() {
  for (const Shape& shape : kShapes) {
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      for (const std::string& target : SupportedSimdTargets()) {
        const std::string name = "BM_Attention/" + shape.name + "/" +
                                 DTypeName(dtype) + "/" + target;
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
}  // namespace varlane::bench

int main(int argc, char** argv) {
  varlane::bench::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
