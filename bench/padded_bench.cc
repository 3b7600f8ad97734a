// Ragged against padded: what the rectangle costs on 30000 + 5000 + 10 tokens.
//
//   ragged       Varlane over the paged cache, one launch
//   padded       the baseline over [B, H, T, D], padded to the longest
//   one_by_one   the same baseline, each sequence alone and unpadded
//
// Padded against one by one is what padding costs, with the same kernel; ragged
// against one by one is what the kernel is worth. All fp32. The answers are
// compared before anything is timed.
// SPDX-License-Identifier: Apache-2.0

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench/padded_baseline.h"
#include "varlane/attention.h"
#include "varlane/kv_ops.h"
#include "varlane/kv_pool.h"
#include "varlane/runtime.h"

namespace varlane::bench {
namespace {

constexpr int kQueryHeads = 16;
constexpr int kKvHeads = 4;
constexpr int kHeadSize = 128;
constexpr int kBlock = 16;

struct Ragged {
  const char* name;
  std::vector<int64_t> lens;
  bool prefill;  // every token is a query; else the last one

  int64_t q_len(size_t i) const { return prefill ? lens[i] : 1; }
  int64_t longest() const {
    return *std::max_element(lens.begin(), lens.end());
  }
  int64_t total() const {
    return std::accumulate(lens.begin(), lens.end(), int64_t{0});
  }
};

// A prefill computes the square of its length: a tenth of it runs in seconds.
const Ragged kShapes[] = {
    {"decode_30000+5000+10", {30000, 5000, 10}, false},
    {"prefill_3000+500+1", {3000, 500, 1}, true},
    {"prefill_300+50+1", {300, 50, 1}, true},  // quick enough for a test
};

// A rectangle for the baseline: all sequences, or one alone.
struct Rectangle {
  PaddedShape shape;
  std::vector<int64_t> lens;
  std::vector<int64_t> first_position;
  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> out;

  PaddedTensors tensors() {
    return {q.data(), k.data(), v.data(), lens, first_position, out.data()};
  }
};

class Problem {
 public:
  static std::unique_ptr<Problem> Make(const Ragged& ragged, Status* status) {
    std::unique_ptr<Problem> problem(new Problem(ragged));
    *status = problem->Fill();
    if (status->ok()) *status = problem->Compare();
    return problem;
  }

  Status RunRagged() {
    AttentionTensors tensors;
    tensors.q = {q_.data(), DType::kF32};
    tensors.out = {out_.data(), DType::kF32};
    return attention_->Run(&plan_, pool_->view(), 0, tensors);
  }
  Status RunPadded() {
    return PaddedAttention(runtime_.get(), all_.shape, all_.tensors());
  }
  Status RunOneByOne() {
    for (Rectangle& one : alone_) {
      const Status status =
          PaddedAttention(runtime_.get(), one.shape, one.tensors());
      if (!status.ok()) return status;
    }
    return {};
  }

 private:
  explicit Problem(const Ragged& ragged) : ragged_(ragged) {}

  Status Fill();
  Status FillCache();
  Status MakeRectangle(size_t begin, size_t end, Rectangle* rectangle);
  Status Compare();
  // Of sequence i, in q_ and out_ [total_q, Hq, D].
  size_t RaggedAt(size_t i, int64_t token, int head) const {
    return size_t((cu_seqlens_q_[i] + token) * kQueryHeads + head) * kHeadSize;
  }

  Ragged ragged_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Attention> attention_;
  std::unique_ptr<KvPool> pool_;
  AttentionPlan plan_;
  std::vector<int32_t> cu_seqlens_q_ = {0};
  std::vector<int32_t> tables_;
  int64_t stride_ = 0;
  std::vector<float> q_;
  std::vector<float> out_;
  Rectangle all_;
  std::vector<Rectangle> alone_;
};

void FillRandom(std::vector<float>* values, uint32_t seed) {
  std::minstd_rand rng(seed);
  for (float& x : *values) x = float(rng() % 65536) / 32768.0f - 1.0f;
}

Status Problem::FillCache() {
  KvPoolOptions options;
  options.layout = {.dtype = DType::kF32,
                    .num_layers = 1,
                    .num_kv_heads = kKvHeads,
                    .head_size = kHeadSize,
                    .v_head_size = kHeadSize,
                    .block_size = kBlock};
  stride_ = (ragged_.longest() + kBlock - 1) / kBlock;
  const auto num_seqs = static_cast<int64_t>(ragged_.lens.size());
  options.num_blocks = 0;
  for (const int64_t len : ragged_.lens) {
    options.num_blocks += (len + kBlock - 1) / kBlock;
  }
  auto pool = KvPool::Create(options, runtime_.get());
  if (!pool.ok()) return pool.status();
  pool_ = std::move(pool).value();
  std::vector<int32_t> ids(size_t(options.num_blocks));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
  tables_.assign(size_t(num_seqs * stride_), 0);
  size_t next = 0;
  for (size_t i = 0; i < ragged_.lens.size(); ++i) {
    for (int64_t b = 0; b * kBlock < ragged_.lens[i]; ++b) {
      tables_[i * size_t(stride_) + size_t(b)] = ids[next++];
    }
  }
  std::vector<float> k(size_t{kBlock} * kKvHeads * kHeadSize);
  std::vector<float> v(k.size());
  std::vector<int64_t> slots(kBlock);
  for (int64_t block = 0; block < options.num_blocks; ++block) {
    FillRandom(&k, uint32_t(2 * block + 1));
    FillRandom(&v, uint32_t(2 * block + 2));
    std::iota(slots.begin(), slots.end(), block * kBlock);
    const Status status =
        attention_->WriteKv(pool_->view(), 0, {k.data(), DType::kF32},
                            {v.data(), DType::kF32}, slots);
    if (!status.ok()) return status;
  }
  return {};
}

Status Problem::Fill() {
  auto runtime = Runtime::Create({});
  if (!runtime.ok()) return runtime.status();
  runtime_ = std::move(runtime).value();
  auto attention = Attention::Create(runtime_.get());
  if (!attention.ok()) return attention.status();
  attention_ = std::move(attention).value();
  Status status = FillCache();
  if (!status.ok()) return status;

  std::vector<int32_t> lens;
  for (size_t i = 0; i < ragged_.lens.size(); ++i) {
    cu_seqlens_q_.push_back(cu_seqlens_q_.back() + int32_t(ragged_.q_len(i)));
    lens.push_back(int32_t(ragged_.lens[i]));
  }
  q_.resize(size_t(cu_seqlens_q_.back()) * kQueryHeads * kHeadSize);
  FillRandom(&q_, 3);
  out_.resize(q_.size());
  AttentionShape shape;
  shape.num_q_heads = kQueryHeads;
  status = attention_->Plan({cu_seqlens_q_, lens, tables_, stride_}, shape,
                            pool_->view(), {}, &plan_);
  if (!status.ok()) return status;
  status = MakeRectangle(0, ragged_.lens.size(), &all_);
  alone_.resize(ragged_.lens.size());
  for (size_t i = 0; i < alone_.size() && status.ok(); ++i) {
    status = MakeRectangle(i, i + 1, &alone_[i]);
  }
  return status;
}

// Sequences [begin, end), padded to the longest of them.
Status Problem::MakeRectangle(size_t begin, size_t end, Rectangle* rectangle) {
  PaddedShape& shape = rectangle->shape;
  shape.batch = int64_t(end - begin);
  shape.q_heads = kQueryHeads;
  shape.kv_heads = kKvHeads;
  shape.head_size = kHeadSize;
  for (size_t i = begin; i < end; ++i) {
    shape.kv_len = std::max(shape.kv_len, ragged_.lens[i]);
    shape.q_len = std::max(shape.q_len, ragged_.q_len(i));
    rectangle->lens.push_back(ragged_.lens[i]);
    rectangle->first_position.push_back(ragged_.lens[i] - ragged_.q_len(i));
  }
  const size_t kv = size_t(shape.kv_len) * kHeadSize;  // of one head
  const size_t q = size_t(shape.q_len) * kHeadSize;
  rectangle->k.resize((end - begin) * kKvHeads * kv);
  rectangle->v.resize(rectangle->k.size());
  rectangle->q.resize((end - begin) * kQueryHeads * q);
  rectangle->out.resize(rectangle->q.size());
  for (size_t i = begin; i < end; ++i) {
    const size_t at = (i - begin) * kKvHeads * kv;
    const std::span<const int32_t> table =
        std::span(tables_).subspan(i * size_t(stride_), size_t(stride_));
    const Status status = GatherKv(
        runtime_.get(), pool_->view(), {table, 0, 0, ragged_.lens[i]},
        {rectangle->k.data() + at, DType::kF32, kHeadSize, int64_t(kv)},
        {rectangle->v.data() + at, DType::kF32, kHeadSize, int64_t(kv)});
    if (!status.ok()) return status;
    for (int head = 0; head < kQueryHeads; ++head) {
      for (int64_t token = 0; token < ragged_.q_len(i); ++token) {
        std::copy_n(q_.data() + RaggedAt(i, token, head), kHeadSize,
                    rectangle->q.data() +
                        ((i - begin) * kQueryHeads + size_t(head)) * q +
                        size_t(token) * kHeadSize);
      }
    }
  }
  return {};
}

// All three give one answer.
Status Problem::Compare() {
  Status status = RunRagged();
  if (status.ok()) status = RunPadded();
  if (status.ok()) status = RunOneByOne();
  if (!status.ok()) return status;
  const size_t q = size_t(all_.shape.q_len) * kHeadSize;
  for (size_t i = 0; i < alone_.size(); ++i) {
    const size_t own = size_t(alone_[i].shape.q_len) * kHeadSize;
    for (int head = 0; head < kQueryHeads; ++head) {
      for (int64_t token = 0; token < ragged_.q_len(i); ++token) {
        const float* want = out_.data() + RaggedAt(i, token, head);
        const float* padded = all_.out.data() +
                              (i * kQueryHeads + size_t(head)) * q +
                              size_t(token) * kHeadSize;
        const float* alone = alone_[i].out.data() + size_t(head) * own +
                             size_t(token) * kHeadSize;
        for (int d = 0; d < kHeadSize; ++d) {
          if (std::abs(padded[d] - want[d]) < 1e-4f &&
              std::abs(alone[d] - want[d]) < 1e-4f) {
            continue;
          }
          return {StatusCode::kInternal, "the baseline disagrees at sequence " +
                                             std::to_string(i) + ", token " +
                                             std::to_string(token)};
        }
      }
    }
  }
  return {};
}

void BM_Padded(benchmark::State& state, const Ragged& ragged,
               Status (Problem::*run)(), int64_t slots) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    state.SkipWithError("the padded baseline is compiled for AVX2 and FMA");
    return;
  }
#endif
  // The last shape's problem: they are large, and come in order.
  static const Ragged* made_for = nullptr;
  static std::unique_ptr<Problem> problem;
  Status status;
  if (made_for != &ragged) {
    problem.reset();
    problem = Problem::Make(ragged, &status);
    made_for = status.ok() ? &ragged : nullptr;
  }
  for (auto _ : state) {
    if (status.ok()) status = (problem.get()->*run)();
    if (!status.ok()) {
      state.SkipWithError(status.ToString().c_str());
      return;
    }
  }
  state.counters["tokens"] = double(ragged.total());
  state.counters["slots"] = double(slots);
}

void RegisterAll() {
  for (const Ragged& ragged : kShapes) {
    const auto add = [&ragged](const char* name, Status (Problem::*run)(),
                               int64_t slots) {
      const std::string full =
          std::string("BM_Padded/") + ragged.name + "/" + name;
      benchmark::RegisterBenchmark(full.c_str(),
                                   [&ragged, run, slots](benchmark::State& s) {
                                     BM_Padded(s, ragged, run, slots);
                                   })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    };
    const auto num_seqs = static_cast<int64_t>(ragged.lens.size());
    add("ragged", &Problem::RunRagged, ragged.total());
    add("padded", &Problem::RunPadded, num_seqs * ragged.longest());
    add("one_by_one", &Problem::RunOneByOne, ragged.total());
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
