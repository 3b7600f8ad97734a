// SPDX-License-Identifier: Apache-2.0

#include "bench/gemm_peer.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <utility>

#include "bench/peer_softmax.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "varlane/huge_page_allocator.h"
#include "varlane/kv_ops.h"

namespace varlane::bench {
namespace {

constexpr int kChunk = 128;  // query tokens

// One task: query tokens [first, first + rows) of a sequence, some heads.
struct Task {
  int seq = 0;
  int q_head = 0;
  int kv_head = 0;
  int first = 0;
  int rows = 0;
  int64_t keys = 0;  // the last row sees these
};

// The two matmuls of tasks of one size.
struct Pair {
  dnnl::matmul qk;
  dnnl::matmul pv;
  dnnl::memory::desc scratch_qk;
  dnnl::memory::desc scratch_pv;
  dnnl::memory::desc q, k, s, p, v, o;
};

}  // namespace

class GemmPeer::Impl {
 public:
  Impl(Runtime* runtime, const Workload& work, bool whole_groups)
      : runtime_(runtime),
        heads_(work.fixture().heads()),
        bf16_(work.fixture().dtype() == DType::kBF16),
        task_heads_(whole_groups ? heads_.q / heads_.kv : 1),
        engine_(dnnl::engine::kind::cpu, 0) {}

  Status Prepare(const Workload& work);
  Result<double> Run();
  std::span<const float> out() const { return out_; }

 private:
  struct Sequence {
    int64_t first_row = 0;  // of the batch
    int q_len = 0;
    int context = 0;
    HugePageVector<std::byte> k;  // [Hkv, context, D]
    HugePageVector<std::byte> v;
  };
  struct Worker {
    dnnl::stream stream;
    HugePageVector<std::byte> scores;   // f32 [task heads, rows, keys]
    HugePageVector<std::byte> weights;  // bf16; f32's stand where scores do
    HugePageVector<std::byte> scratch;
    std::vector<float> sums;
  };

  size_t element() const { return bf16_ ? sizeof(BF16) : sizeof(float); }
  dnnl::memory::data_type type() const {
    return bf16_ ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  }
  Status TakeSequences(const Workload& work);
  void AddTasks(int seq);
  Pair MakePair(int rows, int64_t keys) const;
  void RunTask(const Task& task, Worker* worker);
  template <typename P>
  void Softmax(const Task& task, const Sequence& seq, const float* scores,
               P* weights, Worker* worker) const;

  Runtime* runtime_;
  Heads heads_;
  bool bf16_;
  int task_heads_;
  dnnl::engine engine_;
  std::vector<Sequence> seqs_;
  std::vector<Task> tasks_;
  std::map<std::pair<int, int64_t>, Pair> pairs_;  // by rows and keys
  std::vector<Worker> workers_;
  HugePageVector<std::byte> q_;  // [total_q, Hq, D]
  HugePageVector<float> out_;
};

Status GemmPeer::Impl::TakeSequences(const Workload& work) {
  int64_t row = 0;
  for (const Group& group : work.shape().groups) {
    for (int i = 0; i < group.count; ++i) {
      const auto bytes = static_cast<size_t>(group.context) *
                         static_cast<size_t>(heads_.kv * heads_.size) *
                         element();
      Sequence seq = {row, group.q_len, group.context,
                      HugePageVector<std::byte>(bytes),
                      HugePageVector<std::byte>(bytes)};
      const DType dtype = work.fixture().dtype();
      const int64_t head_stride = int64_t{group.context} * heads_.size;
      const Status status = GatherKv(
          runtime_, work.fixture().view(),
          {.block_table = work.BlockTable(static_cast<int64_t>(seqs_.size())),
           .layer = 0,
           .begin = 0,
           .end = group.context},
          {seq.k.data(), dtype, heads_.size, head_stride},
          {seq.v.data(), dtype, heads_.size, head_stride});
      if (!status.ok()) return status;
      seqs_.push_back(std::move(seq));
      row += group.q_len;
    }
  }
  return {};
}

Status GemmPeer::Impl::Prepare(const Workload& work) {
  if (Status status = TakeSequences(work); !status.ok()) return status;
  const HugePageVector<BF16>& q = work.q();
  q_.resize(q.size() * element());
  for (size_t i = 0; i < q.size(); ++i) {
    if (bf16_) {
      reinterpret_cast<BF16*>(q_.data())[i] = q[i];
    } else {
      reinterpret_cast<float*>(q_.data())[i] = ToFloat(q[i]);
    }
  }
  out_.resize(q.size());
  // oneDNN plans for as many threads as OpenMP would start here.
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  for (size_t i = 0; i < seqs_.size(); ++i) AddTasks(static_cast<int>(i));
  omp_set_num_threads(threads);
  std::stable_sort(
      tasks_.begin(), tasks_.end(),
      [](const Task& a, const Task& b) { return a.keys > b.keys; });
  size_t scratch = 1;
  size_t scores = 1;
  for (const auto& [size, pair] : pairs_) {
    scratch = std::max(
        {scratch, pair.scratch_qk.get_size(), pair.scratch_pv.get_size()});
    scores = std::max(scores, pair.s.get_size());
  }
  workers_.resize(static_cast<size_t>(runtime_->num_workers()));
  for (Worker& worker : workers_) {
    worker.stream = dnnl::stream(engine_);
    worker.scratch.resize(scratch);
    worker.scores.resize(scores);
    if (bf16_) worker.weights.resize(scores / 2);
    worker.sums.resize(static_cast<size_t>(task_heads_ * kChunk));
  }
  return {};
}

void GemmPeer::Impl::AddTasks(int at) {
  const Sequence& seq = seqs_[static_cast<size_t>(at)];
  for (int first = 0; first < seq.q_len; first += kChunk) {
    const int rows = std::min(kChunk, seq.q_len - first);
    const int64_t keys = seq.context - seq.q_len + first + rows;
    if (pairs_.count({rows, keys}) == 0) {
      pairs_[{rows, keys}] = MakePair(rows, keys);
    }
    for (int head = 0; head < heads_.q; head += task_heads_) {
      tasks_.push_back(
          {at, head, head / (heads_.q / heads_.kv), first, rows, keys});
    }
  }
}

Pair GemmPeer::Impl::MakePair(int rows, int64_t keys) const {
  using Desc = dnnl::memory::desc;
  const auto f32 = dnnl::memory::data_type::f32;
  const int64_t d = heads_.size;
  const int64_t h = task_heads_;
  const int64_t q_row = int64_t{heads_.q} * d;
  Pair pair;
  pair.q = Desc({h, rows, d}, type(), {d, q_row, 1});
  pair.k = Desc({1, d, keys}, type(), {d * keys, 1, d});
  pair.s = Desc({h, rows, keys}, f32, {rows * keys, keys, 1});
  pair.p = Desc({h, rows, keys}, type(), {rows * keys, keys, 1});
  pair.v = Desc({1, keys, d}, type(), {keys * d, d, 1});
  pair.o = Desc({h, rows, d}, f32, {d, q_row, 1});
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const dnnl::matmul::primitive_desc qk({pair.q, pair.k, pair.s}, attr,
                                        engine_);
  const dnnl::matmul::primitive_desc pv({pair.p, pair.v, pair.o}, attr,
                                        engine_);
  pair.qk = dnnl::matmul(qk);
  pair.pv = dnnl::matmul(pv);
  pair.scratch_qk = qk.scratchpad_desc();
  pair.scratch_pv = pv.scratchpad_desc();
  return pair;
}

template <typename P>
void GemmPeer::Impl::Softmax(const Task& task, const Sequence& seq,
                             const float* scores, P* weights,
                             Worker* worker) const {
  const float scale =
      1.4426950408889634f / std::sqrt(static_cast<float>(heads_.size));
  const int64_t first = seq.context - seq.q_len + task.first;
  for (int head = 0; head < task_heads_; ++head) {
    for (int row = 0; row < task.rows; ++row) {
      const int at = head * task.rows + row;
      worker->sums[static_cast<size_t>(at)] =
          SoftmaxRow(scores + at * task.keys, first + row + 1, task.keys, scale,
                     weights + at * task.keys);
    }
  }
}

void GemmPeer::Impl::RunTask(const Task& task, Worker* worker) {
  const Sequence& seq = seqs_[static_cast<size_t>(task.seq)];
  const Pair& pair = pairs_.at({task.rows, task.keys});
  const int64_t d = heads_.size;
  const auto memory = [this](const dnnl::memory::desc& desc, const void* at) {
    return dnnl::memory(desc, engine_, const_cast<void*>(at));
  };
  const auto kv_at =
      static_cast<size_t>(task.kv_head * seq.context * d) * element();
  const auto row_at = static_cast<size_t>(
      (seq.first_row + task.first) * heads_.q * d + task.q_head * d);
  auto* const scores = reinterpret_cast<float*>(worker->scores.data());
  void* const weights =
      bf16_ ? static_cast<void*>(worker->weights.data()) : scores;
  void* const scratch = worker->scratch.data();
  pair.qk.execute(worker->stream,
                  {{DNNL_ARG_SRC, memory(pair.q, &q_[row_at * element()])},
                   {DNNL_ARG_WEIGHTS, memory(pair.k, &seq.k[kv_at])},
                   {DNNL_ARG_DST, memory(pair.s, scores)},
                   {DNNL_ARG_SCRATCHPAD, memory(pair.scratch_qk, scratch)}});
  if (!bf16_) {
    Softmax(task, seq, scores, scores, worker);
  } else {
    Softmax(task, seq, scores, static_cast<BF16*>(weights), worker);
  }
  float* const out = &out_[row_at];
  pair.pv.execute(worker->stream,
                  {{DNNL_ARG_SRC, memory(pair.p, weights)},
                   {DNNL_ARG_WEIGHTS, memory(pair.v, &seq.v[kv_at])},
                   {DNNL_ARG_DST, memory(pair.o, out)},
                   {DNNL_ARG_SCRATCHPAD, memory(pair.scratch_pv, scratch)}});
  for (int row = 0; row < task.rows; ++row) {
    for (int head = 0; head < task_heads_; ++head) {
      float* const to = out + (row * heads_.q + head) * d;
      const float inverse =
          1 / worker->sums[static_cast<size_t>(head * task.rows + row)];
      for (int64_t i = 0; i < d; ++i) to[i] *= inverse;
    }
  }
}

Result<double> GemmPeer::Impl::Run() {
  const auto body = [this](const Threadgroup& tg) {
    omp_set_num_threads(1);  // this worker's only: tasks are the parallelism
    RunTask(tasks_[static_cast<size_t>(tg.index())],
            &workers_[static_cast<size_t>(tg.worker())]);
  };
  const auto start = std::chrono::steady_clock::now();
  const Status status =
      runtime_->Launch(Grid{static_cast<int64_t>(tasks_.size())}, body);
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - start;
  if (!status.ok()) return status;
  return elapsed.count();
}

GemmPeer::GemmPeer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmPeer::~GemmPeer() = default;

Result<std::unique_ptr<GemmPeer>> GemmPeer::Create(Runtime* runtime,
                                                   const Workload& work,
                                                   bool whole_groups) {
  const DType dtype = work.fixture().dtype();
  if (dtype == DType::kF16) {
    return Status(StatusCode::kUnimplemented, "the peer has no f16");
  }
  if (!CanSoftmax(dtype)) {
    return Status(StatusCode::kUnimplemented,
                  dtype == DType::kF32
                      ? "the peer's softmax needs AVX2"
                      : "the peer multiplies bf16 with AVX-512 only");
  }
  try {
    auto impl = std::make_unique<Impl>(runtime, work, whole_groups);
    if (Status status = impl->Prepare(work); !status.ok()) return status;
    return std::unique_ptr<GemmPeer>(new GemmPeer(std::move(impl)));
  } catch (const dnnl::error& error) {
    return Status(StatusCode::kInternal,
                  std::string("oneDNN: ") + error.what());
  }
}

bool GemmPeer::UsesAmx(DType dtype) {
  constexpr auto kAmx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  return dtype == DType::kBF16 && (isa & kAmx) == kAmx;
}

Result<double> GemmPeer::Run() { return impl_->Run(); }
std::span<const float> GemmPeer::out() const { return impl_->out(); }

}  // namespace varlane::bench
