// SPDX-License-Identifier: Apache-2.0

#include "bench/workload.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

namespace varlane::bench {
namespace {

int64_t BlocksOf(int tokens, int block_size) {
  return (int64_t{tokens} + block_size - 1) / block_size;
}

KvLayout LayoutOf(const Heads& heads, DType dtype) {
  return {.dtype = dtype,
          .num_layers = 1,
          .num_kv_heads = heads.kv,
          .head_size = heads.size,
          .v_head_size = heads.size,
          .block_size = heads.block_size};
}

// Press et al., "Train Short, Test Long" (2022): 2^(-8/n), its square, ...
std::vector<float> AlibiSlopes(int num_heads) {
  std::vector<float> slopes;
  for (int head = 1; head <= num_heads; ++head) {
    slopes.push_back(std::exp2(-8.0f * static_cast<float>(head) /
                               static_cast<float>(num_heads)));
  }
  return slopes;
}

// Blocks with numbers of their own; the others repeat them, since what stands
// in the cache does not change what a launch costs.
constexpr int64_t kDistinctBlocks = 64;

}  // namespace

std::string Heads::Name() const {
  std::string name =
      std::to_string(q) + "/" + std::to_string(kv) + "/" + std::to_string(size);
  if (block_size != kBlockTokens) {
    name += ", blocks of " + std::to_string(block_size);
  }
  return name;
}

int64_t Shape::num_blocks(int block_size) const {
  int64_t blocks = 0;
  for (const Group& g : groups) {
    blocks += g.count * BlocksOf(g.context, block_size);
  }
  return blocks;
}

int64_t Shape::total_q() const {
  int64_t tokens = 0;
  for (const Group& g : groups) tokens += int64_t{g.count} * g.q_len;
  return tokens;
}

int64_t KvBytes(const Shape& shape, const Heads& heads, DType dtype) {
  return shape.num_blocks(heads.block_size) * KvBlockBytes(heads, dtype);
}

int64_t KvBlockBytes(const Heads& heads, DType dtype) {
  return LayoutOf(heads, dtype).block_bytes();
}

// --- KvFixture ---------------------------------------------------------------

Result<std::unique_ptr<KvFixture>> KvFixture::Create(Runtime* runtime,
                                                     DType dtype,
                                                     const Heads& heads,
                                                     int64_t num_blocks) {
  std::unique_ptr<KvFixture> fixture(new KvFixture);
  fixture->heads_ = heads;
  auto pool = KvPool::Create(
      {.layout = LayoutOf(heads, dtype), .num_blocks = num_blocks}, runtime);
  if (!pool.ok()) return pool.status();
  fixture->pool_ = std::move(pool).value();
  fixture->blocks_.resize(static_cast<size_t>(num_blocks));
  std::iota(fixture->blocks_.begin(), fixture->blocks_.end(), 0);
  std::shuffle(fixture->blocks_.begin(), fixture->blocks_.end(),
               std::mt19937(1));
  if (Status status = fixture->Fill(runtime); !status.ok()) return status;
  return fixture;
}

Status KvFixture::Fill(Runtime* runtime) {
  auto attention = Attention::Create(runtime);
  if (!attention.ok()) return attention.status();
  const KvView kv = view();
  const int64_t distinct = std::min(kDistinctBlocks, kv.num_blocks);
  const auto elements = static_cast<size_t>(distinct * heads_.block_size *
                                            heads_.kv * heads_.size);
  std::mt19937 rng(2);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> k(elements);
  std::vector<float> v(elements);
  for (float& x : k) x = uniform(rng);
  for (float& x : v) x = uniform(rng);
  std::vector<int64_t> slots(static_cast<size_t>(distinct * heads_.block_size));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  if (Status status = (*attention)
                          ->WriteKv(kv, 0, {k.data(), DType::kF32},
                                    {v.data(), DType::kF32}, slots);
      !status.ok()) {
    return status;
  }
  const int64_t block_bytes = kv.layout.block_bytes();
  return runtime->Launch(Grid{kv.num_blocks}, [&](const Threadgroup& tg) {
    if (tg.index() < distinct) return;
    std::memcpy(kv.base + tg.index() * block_bytes,
                kv.base + tg.index() % distinct * block_bytes,
                static_cast<size_t>(block_bytes));
  });
}

// --- Workload ----------------------------------------------------------------

Result<std::unique_ptr<Workload>> Workload::Create(
    Attention* attention, const KvFixture* fixture, const Shape& shape,
    const WorkloadOptions& options) {
  const int copies = options.copies;
  const int64_t first_block = options.first_block;
  const int64_t distinct = options.distinct_blocks;
  const int block_size = fixture->heads().block_size;
  const int64_t needed =
      distinct > 0 ? distinct : shape.num_blocks(block_size) * copies;
  const auto there = static_cast<int64_t>(fixture->blocks().size());
  if (first_block + needed > there) {
    return Status(StatusCode::kOutOfRange,
                  shape.name + " needs " + std::to_string(needed) +
                      " blocks, there are " + std::to_string(there));
  }
  std::unique_ptr<Workload> work(new Workload);
  work->attention_ = attention;
  work->fixture_ = fixture;
  work->shape_ = shape;
  work->cu_seqlens_q_ = {0};
  for (const Group& g : shape.groups) {
    for (int i = 0; i < g.count; ++i) {
      work->cu_seqlens_q_.push_back(work->cu_seqlens_q_.back() + g.q_len);
      work->seq_lens_.push_back(g.context);
    }
    work->stride_ = std::max(work->stride_, BlocksOf(g.context, block_size));
  }
  int64_t next_block = 0;
  const auto take_block = [&] {
    const int64_t i = distinct > 0 ? next_block % distinct : next_block;
    ++next_block;
    return fixture->blocks()[static_cast<size_t>(first_block + i)];
  };
  AttentionShape attention_shape;
  attention_shape.num_q_heads = fixture->heads().q;
  attention_shape.mask = shape.mask;
  attention_shape.softcap = shape.softcap;
  if (shape.alibi) work->slopes_ = AlibiSlopes(fixture->heads().q);
  work->plans_.resize(static_cast<size_t>(copies));
  for (int copy = 0; copy < copies; ++copy) {
    std::vector<int32_t> table(work->seq_lens_.size() *
                               static_cast<size_t>(work->stride_));
    auto row = table.begin();
    for (const int32_t length : work->seq_lens_) {
      std::generate_n(row, BlocksOf(length, block_size), take_block);
      row += work->stride_;
    }
    work->tables_.push_back(std::move(table));
    const auto at = static_cast<size_t>(copy);
    if (Status status =
            attention->Plan(work->BatchOf(at), attention_shape, fixture->view(),
                            options.plan, &work->plans_[at]);
        !status.ok()) {
      return status;
    }
  }
  const auto elements = static_cast<size_t>(
      shape.total_q() * fixture->heads().q * fixture->heads().size);
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> uniform(-1, 1);
  work->q_.resize(elements);
  for (BF16& x : work->q_) x = ToBF16(uniform(rng));
  work->out_dtype_ = options.out_dtype.value_or(fixture->dtype());
  work->out_.resize(elements * SizeOf(work->out_dtype_));
  return work;
}

Batch Workload::BatchOf(size_t copy) const {
  return {.cu_seqlens_q = cu_seqlens_q_,
          .seq_lens = seq_lens_,
          .block_tables = tables_[copy],
          .block_table_stride = stride_};
}

std::span<const int32_t> Workload::BlockTable(int64_t seq) const {
  return std::span(tables_[0])
      .subspan(static_cast<size_t>(seq * stride_),
               static_cast<size_t>(stride_));
}

size_t Workload::NextCopy() { return next_++ % plans_.size(); }

Result<double> Workload::Run() {
  AttentionTensors tensors;
  tensors.q = {q_.data(), DType::kBF16};
  tensors.out = {out_.data(), out_dtype_};
  if (!slopes_.empty()) tensors.alibi_slopes = slopes_.data();
  AttentionPlan* const plan = &plans_[NextCopy()];
  const auto start = std::chrono::steady_clock::now();
  const Status status =
      attention_->Run(plan, fixture_->view(), 0, tensors, &report_);
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - start;
  if (!status.ok()) return status;
  return elapsed.count();
}

Result<ReadProbe*> Workload::Probe(Runtime* runtime) {
  if (probes_.empty()) {
    for (size_t copy = 0; copy < plans_.size(); ++copy) {
      auto probe =
          ReadProbe::Create(runtime, fixture_->view(), 0, BatchOf(copy));
      if (!probe.ok()) return probe.status();
      probes_.push_back(std::move(probe).value());
    }
  }
  return probes_[0].get();
}

Result<double> Workload::Read(Runtime* runtime, int loop) {
  if (const auto probe = Probe(runtime); !probe.ok()) return probe.status();
  return probes_[NextCopy()]->Run(loop);
}

}  // namespace varlane::bench
