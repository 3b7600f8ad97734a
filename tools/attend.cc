// Attend: one case through a real pool and one launch, and its check.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/attend.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <span>

#include "tools/kv_synth.h"
#include "tools/status_util.h"
#include "varlane/kv_pool.h"

namespace varlane::tools {
namespace {

struct Tables {
  std::vector<int32_t> seq_lens;      // [N]
  std::vector<int32_t> block_tables;  // [N, stride]
  int64_t stride = 0;
  std::vector<int64_t> slots;  // [total_kv], in the order of the case
};

KvLayout MakeLayout(const AttentionCase& c, const AttendOptions& options) {
  KvLayout layout;
  layout.dtype = options.kv_dtype;
  layout.num_layers = 1;
  layout.num_kv_heads = c.k.heads;
  layout.head_size = c.k.head_size;
  layout.v_head_size = c.v.head_size;
  layout.block_size = options.block_size;
  return layout;
}

Result<std::unique_ptr<KvPool>> MakePool(const AttentionCase& c,
                                         const AttendOptions& options,
                                         Runtime* runtime) {
  KvPoolOptions pool;
  pool.layout = MakeLayout(c, options);
  VARLANE_TOOLS_TRY(pool.layout.Validate());
  for (int64_t i = 0; i < c.num_seqs(); ++i) {
    pool.num_blocks +=
        (c.kv_len(i) + options.block_size - 1) / options.block_size;
  }
  pool.num_blocks = std::max<int64_t>(pool.num_blocks, 1);
  pool.huge_pages = runtime->options().huge_pages;
  pool.shard_heads = options.shard_heads;
  pool.shuffle = true;
  pool.seed = options.seed;
  return KvPool::Create(pool, runtime);
}

// Makes a sequence of each of the case's and reads its tables back.
Result<Tables> FillTables(const AttentionCase& c, KvPool* pool) {
  Tables tables;
  const int64_t block_size = pool->layout().block_size;
  for (int64_t i = 0; i < c.num_seqs(); ++i) {
    tables.seq_lens.push_back(c.kv_len(i));
    tables.stride = std::max<int64_t>(
        tables.stride, (c.kv_len(i) + block_size - 1) / block_size);
  }
  tables.stride = std::max<int64_t>(tables.stride, 1);
  tables.block_tables.resize(static_cast<size_t>(c.num_seqs() * tables.stride));
  tables.slots.resize(static_cast<size_t>(c.cu_seqlens_k.back()));
  for (int64_t i = 0; i < c.num_seqs(); ++i) {
    const SeqId seq = pool->CreateSequence();
    VARLANE_TOOLS_ASSIGN(const Admission admission,
                         pool->Append(seq, c.kv_len(i)));
    if (!admission.admitted()) {
      return Fail(StatusCode::kInternal,
                  "sequence {} needs {} blocks, but {} of the pool's {} are "
                  "free",
                  i, admission.needed_blocks, admission.free_blocks,
                  admission.capacity_blocks);
    }
    const std::span<int32_t> row =
        std::span(tables.block_tables)
            .subspan(static_cast<size_t>(i * tables.stride),
                     static_cast<size_t>(tables.stride));
    VARLANE_TOOLS_TRY(pool->CopyBlockTable(seq, row).status());
    const std::span<int64_t> slots =
        std::span(tables.slots)
            .subspan(
                static_cast<size_t>(c.cu_seqlens_k[static_cast<size_t>(i)]),
                static_cast<size_t>(c.kv_len(i)));
    VARLANE_TOOLS_TRY(pool->CopySlotMapping(seq, 0, slots));
  }
  return tables;
}

// The best of every read loop over the same pages, and of the multiplies.
Result<MachineRates> MeasureRates(const AttendOptions& options,
                                  const KvPool& pool, const Batch& batch,
                                  Runtime* runtime) {
  constexpr int kRounds = 5;
  MachineRates rates;
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<ReadProbe> probe,
                       ReadProbe::Create(runtime, pool.view(), 0, batch));
  for (int round = 0; round < kRounds; ++round) {
    for (int loop = 0; loop < probe->num_loops(); ++loop) {
      VARLANE_TOOLS_ASSIGN(const double seconds, probe->Run(loop));
      if (seconds <= 0) continue;
      rates.bytes_per_second =
          std::max(rates.bytes_per_second,
                   static_cast<double>(probe->bytes()) / seconds);
    }
    VARLANE_TOOLS_ASSIGN(const double flops,
                         MeasureMultiplyPeak(runtime, options.kv_dtype, 0.02));
    rates.flops_per_second = std::max(rates.flops_per_second, flops);
  }
  return rates;
}

// Launches `repeat` times; the last one's report and everybody's time stay.
Status Launch(const AttentionCase& c, const AttendOptions& options,
              const Attention& attention, const KvPool& pool,
              const Tables& tables, Runtime* runtime, AttendResult* result) {
  const Batch batch{c.cu_seqlens_q, tables.seq_lens, tables.block_tables,
                    tables.stride};
  AttentionShape shape;
  shape.num_q_heads = c.q.heads;
  shape.scale = c.scale;
  shape.softcap = c.softcap;
  shape.mask.causal = c.causal;
  if (c.window > 0) shape.mask.window_left = c.window - 1;
  AttentionPlan plan;
  VARLANE_TOOLS_TRY(
      attention.Plan(batch, shape, pool.view(), options.plan, &plan));
  AttentionTensors tensors;
  tensors.q = {c.q.bytes.data(), c.q.dtype};
  tensors.out = {result->out.data(), DType::kF32};
  tensors.lse = result->lse.data();
  if (!c.alibi_slopes.empty()) tensors.alibi_slopes = c.alibi_slopes.data();
  if (!c.sinks.empty()) tensors.sinks = c.sinks.data();
  for (int i = 0; i < options.repeat; ++i) {
    VARLANE_TOOLS_TRY(
        attention.Run(&plan, pool.view(), 0, tensors, &result->report));
    result->seconds.push_back(result->report.seconds);
  }
  result->plan = plan.ToString();
  result->spread = plan.spreads_partitions();
  result->kv_heads_per_threadgroup = plan.kv_heads_per_threadgroup();
  if (!options.measures_limit) return {};
  VARLANE_TOOLS_ASSIGN(result->rates,
                       MeasureRates(options, pool, batch, runtime));
  return {};
}

}  // namespace

Result<AttendResult> RunAttend(const AttentionCase& c,
                               const AttendOptions& options, Runtime* runtime) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<Attention> attention,
                       Attention::Create(runtime));
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<KvPool> pool,
                       MakePool(c, options, runtime));
  AttendResult result;
  result.simd_target = attention->simd_target();
  result.num_blocks = pool->capacity_blocks();
  result.num_shards = pool->num_shards();
  try {
    result.out.resize(
        static_cast<size_t>(c.q.tokens * c.q.heads * c.v.head_size));
    result.lse.resize(static_cast<size_t>(c.q.tokens * c.q.heads));
    VARLANE_TOOLS_ASSIGN(const Tables tables, FillTables(c, pool.get()));
    VARLANE_TOOLS_TRY(
        attention->WriteKv(pool->view(), 0, {c.k.bytes.data(), c.k.dtype},
                           {c.v.bytes.data(), c.v.dtype}, tables.slots));
    VARLANE_TOOLS_TRY(
        Launch(c, options, *attention, *pool, tables, runtime, &result));
  } catch (const std::bad_alloc&) {
    return Fail(StatusCode::kResourceExhausted,
                "no memory for the output of {} query tokens", c.q.tokens);
  }
  return result;
}

// --- check -------------------------------------------------------------------

namespace {

// Checks the sampled rows of one (sequence, KV head); K and V are read once.
class CaseChecker {
 public:
  CaseChecker(const AttentionCase& c, DType kv_dtype,
              const AttendResult& result, double share)
      : case_(c), kv_dtype_(kv_dtype), result_(result), share_(share) {}

  void Check(int64_t seq, int kv_head, RowVerifier* verifier) const {
    const int group = case_.q.heads / case_.k.heads;
    Keys keys;
    for (int32_t i = 0; i < case_.q_len(seq); ++i) {
      for (int g = 0; g < group; ++g) {
        const int head = kv_head * group + g;
        const auto stream = RequestStream(seq);
        if (SynthUniform({stream, i}, 0, head) >= share_) continue;
        if (keys.norm < 0) LoadKeys(seq, kv_head, &keys);
        CheckRow(seq, i, head, keys, verifier);
      }
    }
  }

 private:
  struct Keys {
    std::vector<double> k;  // [kv_len, D]
    std::vector<double> v;  // [kv_len, Dv]
    double norm = -1;       // the largest |k|; -1 = not loaded
  };

  void LoadKeys(int64_t seq, int head, Keys* keys) const {
    const int64_t begin = case_.cu_seqlens_k[static_cast<size_t>(seq)];
    keys->norm = 0;
    for (int64_t t = begin; t < begin + case_.kv_len(seq); ++t) {
      Append(case_.k, t, head, &keys->k);
      Append(case_.v, t, head, &keys->v);
      const auto d = static_cast<size_t>(case_.k.head_size);
      keys->norm =
          std::max(keys->norm, Norm(std::span<const double>(keys->k).last(d)));
    }
  }

  void Append(const CaseTensor& tensor, int64_t token, int head,
              std::vector<double>* to) const {
    const int64_t begin = tensor.Offset(token, head);
    for (int64_t d = begin; d < begin + tensor.head_size; ++d) {
      to->push_back(RoundTo(kv_dtype_, tensor.Get(d)));
    }
  }

  void CheckRow(int64_t seq, int32_t i, int head, const Keys& keys,
                RowVerifier* verifier) const {
    const int64_t token = case_.cu_seqlens_q[static_cast<size_t>(seq)] + i;
    const bool rounds_q = kv_dtype_ == DType::kBF16;
    std::vector<double> q;
    const int64_t begin = case_.q.Offset(token, head);
    for (int64_t d = begin; d < begin + case_.q.head_size; ++d) {
      const float value = case_.q.Get(d);
      q.push_back(rounds_q ? RoundTo(DType::kBF16, value) : value);
    }
    ReferenceRow row;
    row.q = q;
    row.k = keys.k.data();
    row.v = keys.v.data();
    const int64_t position = case_.kv_len(seq) - case_.q_len(seq) + i;
    row.num_keys =
        case_.causal ? std::max<int64_t>(position + 1, 0) : case_.kv_len(seq);
    row.v_head_size = case_.v.head_size;
    row.scale = case_.scale;
    row.softcap = case_.softcap;
    row.position = position;
    if (case_.window > 0) {
      row.first_key = std::max<int64_t>(position + 1 - case_.window, 0);
    }
    RowPrecision precision{kv_dtype_,
                           std::abs(case_.scale) * Norm(q) * keys.norm};
    precision.softcap = case_.softcap;
    const auto at = static_cast<size_t>(head);
    if (!case_.alibi_slopes.empty()) {
      row.alibi_slope = case_.alibi_slopes[at];
      const int64_t last = case_.kv_len(seq) - 1;
      const int64_t far = std::max(position - row.first_key, last - position);
      precision.max_abs_bias = std::abs(row.alibi_slope * double(far));
    }
    double sink = 0;
    if (!case_.sinks.empty()) {
      sink = case_.sinks[at];
      row.sink = &sink;
      if (std::isfinite(sink)) {
        precision.max_abs_bias =
            std::max(precision.max_abs_bias, std::abs(sink));
      }
    }
    const int64_t index = token * case_.q.heads + head;
    const std::span<const float> out =
        std::span<const float>(result_.out)
            .subspan(static_cast<size_t>(index * case_.v.head_size),
                     static_cast<size_t>(case_.v.head_size));
    verifier->Check(
        row, precision, out, &result_.lse[static_cast<size_t>(index)],
        fmt::format("sequence {}, query {}, head {}", seq, i, head));
  }

  const AttentionCase& case_;
  DType kv_dtype_;
  const AttendResult& result_;
  double share_;
};

}  // namespace

Result<VerifyResult> VerifyAttend(const AttentionCase& c, DType kv_dtype,
                                  const AttendResult& result, double share,
                                  Runtime* runtime) {
  const CaseChecker checker(c, kv_dtype, result, share);
  std::vector<RowVerifier> verifiers(
      static_cast<size_t>(runtime->num_workers()));
  const Grid grid{c.num_seqs() * c.k.heads};
  VARLANE_TOOLS_TRY(runtime->Launch(grid, [&](const Threadgroup& group) {
    checker.Check(group.index() / c.k.heads,
                  static_cast<int>(group.index() % c.k.heads),
                  &verifiers[static_cast<size_t>(group.worker())]);
  }));
  VerifyResult total;
  for (const RowVerifier& verifier : verifiers) total.Merge(verifier.result());
  return total;
}

}  // namespace varlane::tools
