// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/attention_case.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <span>

#include "tests/testing/launch_modes.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "tests/testing/tolerance.h"
#include "varlane/huge_page_allocator.h"
#include "varlane/reference.h"

namespace varlane::testing {
namespace {

uint16_t PoisonBits16(Poison poison, DType dtype, size_t i) {
  const bool bf16 = dtype == DType::kBF16;
  switch (poison) {
    case Poison::kNaN:
      return bf16 ? 0x7fa1 : 0x7d01;  // signalling
    case Poison::kInf:
      return static_cast<uint16_t>((bf16 ? 0x7f80 : 0x7c00) |
                                   (i % 2 != 0 ? 0x8000 : 0));
    case Poison::kStale:
      return bf16 ? 0x447a : 0x63d0;  // 1000
    case Poison::kZero:
      return 0;
  }
  return 0;
}

float PoisonF32(Poison poison, size_t i) {
  switch (poison) {
    case Poison::kNaN:
      return std::numeric_limits<float>::signaling_NaN();
    case Poison::kInf:
      return i % 2 != 0 ? -std::numeric_limits<float>::infinity()
                        : std::numeric_limits<float>::infinity();
    case Poison::kStale:
      return 1000.0f;
    case Poison::kZero:
      return 0.0f;
  }
  return 0;
}

}  // namespace

double Rounded(double value, DType dtype) {
  const auto f = static_cast<float>(value);
  switch (dtype) {
    case DType::kF32:
      return f;
    case DType::kBF16:
      return ToFloat(ToBF16(f));
    case DType::kF16:
      return ToFloat(ToF16(f));
  }
  return f;
}

void StoreElement(void* base, DType dtype, int64_t index, double value) {
  const auto f = static_cast<float>(value);
  auto* bytes = static_cast<std::byte*>(base) + index * int64_t(SizeOf(dtype));
  const uint16_t half = dtype == DType::kBF16 ? ToBF16(f).bits : ToF16(f).bits;
  if (dtype == DType::kF32) {
    std::memcpy(bytes, &f, sizeof(f));
  } else {
    std::memcpy(bytes, &half, sizeof(half));
  }
}

double LoadElement(const void* base, DType dtype, int64_t index) {
  const auto* bytes =
      static_cast<const std::byte*>(base) + index * int64_t(SizeOf(dtype));
  if (dtype == DType::kF32) {
    float f = 0;
    std::memcpy(&f, bytes, sizeof(f));
    return f;
  }
  uint16_t half = 0;
  std::memcpy(&half, bytes, sizeof(half));
  return dtype == DType::kBF16 ? ToFloat(BF16{half}) : ToFloat(F16{half});
}

int64_t CaseSpec::total_q() const {
  int64_t total = 0;
  for (const SeqSpec& seq : seqs) total += seq.q_len;
  return total;
}

void AttentionCase::AlignedFree::operator()(std::byte* p) const {
  std::free(p);
}

// All dims of a (sequence, position, head), as Fill has them one by one or, of
// none, random.
class AttentionCase::RowFill {
 public:
  RowFill(const Fill& fill, uint64_t seed, int first_seq)
      : fill_(fill), seed_(seed), first_seq_(first_seq) {}
  void operator()(int seq, int pos, int head, std::span<double> row) const {
    if (fill_) {
      for (int d = 0; d < int(row.size()); ++d) {
        row[size_t(d)] = fill_(seq, pos, head, d);
      }
      return;
    }
    const RandomRow random(seed_, uint64_t(first_seq_ + seq), uint64_t(pos),
                           uint64_t(head));
    for (size_t d = 0; d < row.size(); ++d) row[d] = random[d];
  }

 private:
  const Fill& fill_;
  uint64_t seed_;
  int first_seq_;
};

AttentionCase::AttentionCase(const CaseSpec& spec, const Fill& q, const Fill& k,
                             const Fill& v, Poison poison)
    : spec_(spec) {
  layout_.dtype = spec.kv_dtype;
  layout_.num_layers = 1;
  layout_.num_kv_heads = spec.kv_heads;
  layout_.head_size = spec.head_size;
  layout_.v_head_size = spec.v_size();
  layout_.block_size = spec.block_size;
  LayOut();
  const DType q_precision = spec.kv_dtype == DType::kBF16 && spec.round_q
                                ? DType::kBF16
                                : spec.q_dtype;
  FillQueries({q, spec.seed * 3, spec.first_seq}, q_precision);
  FillCache({k, spec.seed * 3 + 1, spec.first_seq},
            {v, spec.seed * 3 + 2, spec.first_seq}, poison);
}

void AttentionCase::LayOut() {
  cu_seqlens_q_ = {0};
  int64_t used = 0;
  for (const SeqSpec& seq : spec_.seqs) {
    cu_seqlens_q_.push_back(cu_seqlens_q_.back() + seq.q_len);
    seq_lens_.push_back(seq.kv_len);
    const int64_t blocks =
        (seq.kv_len + spec_.block_size - 1) / spec_.block_size;
    stride_ = std::max(stride_, blocks);
    used += blocks;
  }
  stride_ += 1;  // one entry no sequence uses, poisoned below
  num_blocks_ = used + spec_.extra_blocks;
  std::vector<int32_t> ids(static_cast<size_t>(num_blocks_));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(spec_.layout_seed));
  block_tables_.assign(spec_.seqs.size() * static_cast<size_t>(stride_),
                       std::numeric_limits<int32_t>::max());
  size_t next = 0;
  for (size_t s = 0; s < spec_.seqs.size(); ++s) {
    const int blocks =
        (spec_.seqs[s].kv_len + spec_.block_size - 1) / spec_.block_size;
    for (int b = 0; b < blocks; ++b) {
      block_tables_[s * static_cast<size_t>(stride_) + size_t(b)] = ids[next++];
    }
  }
}

void AttentionCase::FillQueries(const RowFill& q, DType precision) {
  std::vector<double> row(static_cast<size_t>(spec_.head_size));
  const auto size = static_cast<int64_t>(row.size());
  q_.resize(static_cast<size_t>(spec_.total_q() * spec_.q_heads * size) *
            SizeOf(spec_.q_dtype));
  int64_t at = 0;
  for (int s = 0; s < int(spec_.seqs.size()); ++s) {
    const SeqSpec& seq = spec_.seqs[size_t(s)];
    for (int i = 0; i < seq.q_len; ++i) {
      for (int h = 0; h < spec_.q_heads; ++h) {
        q(s, seq.kv_len - seq.q_len + i, h, row);
        for (const double value : row) {
          StoreElement(q_.data(), spec_.q_dtype, at++,
                       Rounded(value, precision));
        }
      }
    }
  }
}

void AttentionCase::FillCache(const RowFill& k, const RowFill& v,
                              Poison poison) {
  const auto bytes = static_cast<size_t>(
      std::max<int64_t>(64, num_blocks_ * layout_.block_bytes()));
  cache_.reset(static_cast<std::byte*>(std::aligned_alloc(64, bytes)));
  for (size_t i = 0; i < bytes / SizeOf(spec_.kv_dtype); ++i) {
    if (spec_.kv_dtype == DType::kF32) {
      const float f = PoisonF32(poison, i);
      std::memcpy(cache_.get() + i * 4, &f, 4);
    } else {
      const uint16_t bits = PoisonBits16(poison, spec_.kv_dtype, i);
      std::memcpy(cache_.get() + i * 2, &bits, 2);
    }
  }
  std::vector<double> key(static_cast<size_t>(spec_.head_size));
  std::vector<double> value(static_cast<size_t>(spec_.v_size()));
  for (int s = 0; s < int(spec_.seqs.size()); ++s) {
    for (int pos = 0; pos < spec_.seqs[size_t(s)].kv_len; ++pos) {
      for (int h = 0; h < spec_.kv_heads; ++h) {
        k(s, pos, h, key);
        v(s, pos, h, value);
        StoreToken(s, pos, h, key, value);
      }
    }
  }
}

void AttentionCase::StoreToken(int seq, int pos, int head,
                               std::span<const double> key,
                               std::span<const double> value) {
  const KvView kv = view();
  const int64_t block = BlockOf(seq, pos);
  const int t = pos % spec_.block_size;
  std::byte* const k = kv.k(block, 0, head);
  for (int d = 0; d < int(key.size()); ++d) {
    StoreElement(k, spec_.kv_dtype, layout_.k_offset(t, d), key[size_t(d)]);
  }
  std::byte* const v = kv.v(block, 0, head);
  for (int d = 0; d < int(value.size()); ++d) {
    StoreElement(v, spec_.kv_dtype, layout_.v_offset(t, d), value[size_t(d)]);
  }
}

KvView AttentionCase::view() const {
  KvView view = {cache_.get(), num_blocks_, layout_};
  if (!node_blocks_.empty()) {
    view.node_blocks = node_blocks_.data();
    view.node_stride = node_stride_;
  }
  view.num_shards = num_shards_;
  view.shard_stride = shard_stride_;
  return view;
}

void AttentionCase::SpreadOverNodes(int num_nodes) {
  node_stride_ = (num_blocks_ + num_nodes - 1) / num_nodes;
  node_blocks_ = std::vector<std::atomic<int64_t>>(size_t(num_nodes));
  for (int node = 0; node < num_nodes; ++node) {
    node_blocks_[size_t(node)] =
        std::clamp<int64_t>(num_blocks_ - node * node_stride_, 0, node_stride_);
  }
}

void AttentionCase::ShardHeads(int num_shards) {
  const KvView from = view();
  num_shards_ = num_shards;
  shard_stride_ = num_blocks_ * layout_.block_bytes() / num_shards + 192;
  const auto bytes = static_cast<size_t>(shard_stride_ * num_shards);
  std::unique_ptr<std::byte, AlignedFree> sharded(
      static_cast<std::byte*>(std::aligned_alloc(64, bytes)));
  std::memset(sharded.get(), 0xff, bytes);
  sharded.swap(cache_);
  const KvView to = view();
  for (int64_t block = 0; block < num_blocks_; ++block) {
    for (int head = 0; head < spec_.kv_heads; ++head) {
      std::memcpy(to.k(block, 0, head), from.k(block, 0, head),
                  static_cast<size_t>(layout_.k_head_bytes()));
      std::memcpy(to.v(block, 0, head), from.v(block, 0, head),
                  static_cast<size_t>(layout_.v_head_bytes()));
    }
  }
}

Batch AttentionCase::batch() const {
  return {cu_seqlens_q_, seq_lens_, block_tables_, stride_, spec_.masks};
}

AttentionShape AttentionCase::shape() const {
  AttentionShape shape;
  shape.num_q_heads = spec_.q_heads;
  shape.mask.causal = spec_.causal;
  shape.scale = spec_.scale;
  shape.softcap = spec_.softcap;
  return shape;
}

ConstTensor AttentionCase::q() const { return {q_.data(), spec_.q_dtype}; }

Output AttentionCase::Run(const Attention& attention,
                          const PlanOptions& options) const {
  Output output;
  AttentionPlan plan;
  const Status planned =
      attention.Plan(batch(), shape(), view(), options, &plan);
  EXPECT_TRUE(IsOk(planned));
  if (!planned.ok()) return output;
  const auto rows = static_cast<size_t>(spec_.total_q() * spec_.q_heads);
  const auto elements = rows * static_cast<size_t>(spec_.v_size());
  // Aligned to lines, so that rows of whole ones may go past the caches.
  std::vector<std::byte, HugePageAllocator<std::byte>> raw(
      elements * SizeOf(spec_.out_dtype) + 1, std::byte{0xff});
  output.lse.assign(rows, std::numeric_limits<float>::quiet_NaN());
  AttentionTensors tensors;
  tensors.q = q();
  tensors.out = {raw.data(), spec_.out_dtype};
  tensors.lse = output.lse.data();
  if (!spec_.alibi_slopes.empty()) {
    tensors.alibi_slopes = spec_.alibi_slopes.data();
  }
  if (!spec_.sinks.empty()) tensors.sinks = spec_.sinks.data();
  EXPECT_TRUE(IsOk(attention.Run(&plan, view(), 0, tensors, &output.report)));
  EXPECT_EQ(raw.back(), std::byte{0xff}) << "wrote past out";
  output.out.resize(elements);
  for (size_t i = 0; i < elements; ++i) {
    output.out[i] = static_cast<float>(
        LoadElement(raw.data(), spec_.out_dtype, int64_t(i)));
  }
  return output;
}

double AttentionCase::Q(int64_t token, int head, int dim) const {
  return LoadElement(q_.data(), spec_.q_dtype,
                     (token * spec_.q_heads + head) * spec_.head_size + dim);
}

void AttentionCase::LoadToken(int seq, int pos, int head, std::span<double> key,
                              std::span<double> value) const {
  const KvView kv = view();
  const int64_t block = BlockOf(seq, pos);
  const int t = pos % spec_.block_size;
  const std::byte* const k = kv.k(block, 0, head);
  for (int d = 0; d < int(key.size()); ++d) {
    key[size_t(d)] = LoadElement(k, spec_.kv_dtype, layout_.k_offset(t, d));
  }
  const std::byte* const v = kv.v(block, 0, head);
  for (int d = 0; d < int(value.size()); ++d) {
    value[size_t(d)] = LoadElement(v, spec_.kv_dtype, layout_.v_offset(t, d));
  }
}

int64_t AttentionCase::BlockOf(int seq, int pos) const {
  return block_tables_[size_t(seq * stride_ + pos / spec_.block_size)];
}

SequenceMask AttentionCase::MaskOf(int seq) const {
  if (!spec_.masks.empty()) return spec_.masks[size_t(seq)];
  SequenceMask mask;
  mask.causal = spec_.causal;
  return mask;
}

// The definition in varlane/attention.h, word by word.
int64_t AttentionCase::Limit(int seq, int i) const {
  const SeqSpec& s = spec_.seqs[size_t(seq)];
  const SequenceMask mask = MaskOf(seq);
  const int64_t p = s.kv_len - s.q_len + i;
  int64_t high = p + 1;
  if (!mask.causal) {
    high = mask.window_right < 0 ? s.kv_len : p + 1 + mask.window_right;
  }
  high = std::max<int64_t>(high, mask.prefix_len);
  return std::clamp<int64_t>(high, 0, s.kv_len);
}

int64_t AttentionCase::Begin(int seq, int i) const {
  const SeqSpec& s = spec_.seqs[size_t(seq)];
  const SequenceMask mask = MaskOf(seq);
  if (mask.window_left < 0) return 0;
  const int64_t p = s.kv_len - s.q_len + i;
  return std::clamp<int64_t>(p - mask.window_left, 0, Limit(seq, i));
}

std::pair<int64_t, int64_t> AttentionCase::InView(int seq) const {
  const SeqSpec& s = spec_.seqs[size_t(seq)];
  int64_t low = s.kv_len;
  int64_t high = 0;
  for (int i = 0; i < s.q_len; ++i) {
    if (Begin(seq, i) == Limit(seq, i)) continue;
    low = std::min(low, Begin(seq, i));
    high = std::max(high, Limit(seq, i));
  }
  return {low, std::max(low, high)};
}

int AttentionCase::HideBlocksOutOfView() {
  constexpr int32_t kGarbage[] = {-1, std::numeric_limits<int32_t>::max(),
                                  std::numeric_limits<int32_t>::min()};
  int hidden = 0;
  for (int s = 0; s < int(spec_.seqs.size()); ++s) {
    const auto [low, high] = InView(s);
    for (int64_t b = 0; b < stride_; ++b) {
      const bool seen = low < high && (b + 1) * spec_.block_size > low &&
                        b * spec_.block_size < high;
      if (seen) continue;
      block_tables_[size_t(s * stride_ + b)] = kGarbage[hidden++ % 3];
    }
  }
  return hidden;
}

int64_t AttentionCase::FirstToken(int seq) const {
  return cu_seqlens_q_[size_t(seq)];
}

void AttentionCase::Poke(int seq, int pos, int kv_head, double value) {
  StoreToken(seq, pos, kv_head,
             std::vector<double>(size_t(spec_.head_size), value),
             std::vector<double>(size_t(spec_.v_size()), value));
}

namespace {

// Contiguous fp64 K and V of one (sequence, kv head).
struct Contiguous {
  std::vector<double> k;
  std::vector<double> v;
};

// Keys that no row sees are NaN here: the oracle must not need them either.
Contiguous Gather(const AttentionCase& c, int seq, int kv_head) {
  const CaseSpec& spec = c.spec();
  const auto keys = static_cast<size_t>(spec.seqs[size_t(seq)].kv_len);
  const auto d_size = static_cast<size_t>(spec.head_size);
  const auto dv_size = static_cast<size_t>(spec.v_size());
  Contiguous kv;
  kv.k.assign(keys * d_size, std::numeric_limits<double>::quiet_NaN());
  kv.v.assign(keys * dv_size, std::numeric_limits<double>::quiet_NaN());
  const auto [low, high] = c.InView(seq);
  for (int pos = int(low); pos < int(high); ++pos) {
    c.LoadToken(seq, pos, kv_head,
                std::span(kv.k).subspan(size_t(pos) * d_size, d_size),
                std::span(kv.v).subspan(size_t(pos) * dv_size, dv_size));
  }
  return kv;
}

double LargestScore(const ReferenceRow& row) {
  double largest = 0;
  for (int64_t t = row.first_key; t < row.num_keys; ++t) {
    double dot = 0;
    for (size_t d = 0; d < row.q.size(); ++d) {
      dot += std::abs(row.q[d] * row.k[size_t(t) * row.q.size() + d]);
    }
    // A score of -inf is exact.
    if (std::isfinite(dot))
      largest = std::max(largest, dot * std::abs(row.scale));
  }
  return largest;
}

}  // namespace

void AttentionCase::ExpectMatchesReference(const Output& output) const {
  const auto dv = static_cast<size_t>(spec_.v_size());
  std::vector<double> q(static_cast<size_t>(spec_.head_size));
  std::vector<double> want(dv);
  std::vector<double> bound(dv);
  for (int s = 0; s < int(spec_.seqs.size()); ++s) {
    const SeqSpec& seq = spec_.seqs[size_t(s)];
    Contiguous kv;
    for (int h = 0; h < spec_.q_heads; ++h) {
      if (h % spec_.group() == 0) kv = Gather(*this, s, h / spec_.group());
      const double sink =
          spec_.sinks.empty() ? 0.0 : double(spec_.sinks[size_t(h)]);
      ReferenceRow row;
      row.q = q;
      row.k = kv.k.data();
      row.v = kv.v.data();
      row.v_head_size = int64_t(dv);
      row.scale =
          spec_.scale != 0 ? spec_.scale : 1.0 / std::sqrt(spec_.head_size);
      row.softcap = spec_.softcap;
      if (!spec_.alibi_slopes.empty()) {
        row.alibi_slope = spec_.alibi_slopes[size_t(h)];
      }
      if (!spec_.sinks.empty()) row.sink = &sink;
      for (int i = 0; i < seq.q_len; ++i) {
        const int64_t token = FirstToken(s) + i;
        for (int d = 0; d < spec_.head_size; ++d) {
          q[size_t(d)] = Q(token, h, d);
        }
        row.first_key = Begin(s, i);
        row.num_keys = Limit(s, i);
        row.position = seq.kv_len - seq.q_len + i;
        const double lse = ReferenceAttention(row, want, bound);
        const auto at = static_cast<size_t>(token * spec_.q_heads + h);
        if (std::isinf(lse)) {
          ASSERT_EQ(output.lse[at], lse) << "seq " << s << " row " << i;
        } else {
          ASSERT_NEAR(output.lse[at], lse, LseBound(lse))
              << "seq " << s << " token " << i << " head " << h;
        }
        const double away =
            double(std::max(std::abs(row.first_key - row.position),
                            row.num_keys - row.position));
        const double c =
            OutputBound(spec_.kv_dtype, spec_.head_size, LargestScore(row)) +
            ModifierBound(spec_.softcap, row.alibi_slope * away, sink);
        for (size_t d = 0; d < dv; ++d) {
          const double allowed =
              c * bound[d] +
              OutputRounding(spec_.out_dtype) * std::abs(want[d]) +
              OutputFloor(spec_.out_dtype);
          ASSERT_NEAR(output.out[at * dv + d], want[d], allowed)
              << "seq " << s << " token " << i << " head " << h << " dim " << d;
        }
      }
    }
  }
}

CaseSpec AloneOf(const CaseSpec& crowd, int seq) {
  CaseSpec alone = crowd;
  alone.seqs = {crowd.seqs[size_t(seq)]};
  if (!crowd.masks.empty()) alone.masks = {crowd.masks[size_t(seq)]};
  alone.first_seq = crowd.first_seq + seq;
  return alone;
}

Output RowsOf(const AttentionCase& c, const Output& output, int seq, int begin,
              int end) {
  const auto heads = size_t(c.spec().q_heads);
  const size_t width = heads * size_t(c.spec().v_size());
  const size_t first = size_t(c.FirstToken(seq)) + size_t(begin);
  const size_t last = size_t(c.FirstToken(seq)) + size_t(end);
  Output part;
  part.lse.assign(output.lse.begin() + std::ptrdiff_t(first * heads),
                  output.lse.begin() + std::ptrdiff_t(last * heads));
  part.out.assign(output.out.begin() + std::ptrdiff_t(first * width),
                  output.out.begin() + std::ptrdiff_t(last * width));
  return part;
}

void ExpectSameBits(const Output& a, const Output& b, const std::string& what) {
  ASSERT_EQ(a.out.size(), b.out.size()) << what;
  ASSERT_EQ(a.lse.size(), b.lse.size()) << what;
  for (size_t i = 0; i < a.out.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a.out[i]),
              std::bit_cast<uint32_t>(b.out[i]))
        << what << ": out[" << i << "] = " << a.out[i] << " against "
        << b.out[i];
  }
  for (size_t i = 0; i < a.lse.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a.lse[i]),
              std::bit_cast<uint32_t>(b.lse[i]))
        << what << ": lse[" << i << "]";
  }
}

void ExpectSameBitsOnNodes(const Output& expected, const AttentionCase& c,
                           const Attention& attention,
                           const std::string& what) {
  for (const OwnerPattern owner : kOwnerPatterns) {
    for (const PartitionMode partitions : kPartitionModes) {
      for (const bool follow : {true, false}) {
        const Output output = c.Run(attention, {owner, partitions, follow});
        const std::string how = what + ", " + OwnerPatternName(owner) + ", " +
                                PartitionModeName(partitions);
        ExpectSameBits(expected, output, how);
        const LaunchReport& report = output.report;
        EXPECT_EQ(report.home_threadgroups + report.stolen_threadgroups,
                  report.threadgroups - report.surplus_threadgroups)
            << how;
        EXPECT_GT(report.local_bytes + report.remote_bytes, 0) << how;
      }
    }
  }
}

}  // namespace varlane::testing
