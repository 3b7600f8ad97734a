// A session that was saved and loaded goes on with the same bits.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/files.h"
#include "tests/testing/pools.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/kv_pool.h"
#include "varlane/session.h"

namespace varlane {
namespace {

using testing::RandomValue;

constexpr int kQHeads = 6;
constexpr int kNewTokens = 5;

KvLayout LayoutOf(DType dtype) {
  return {.dtype = dtype,
          .num_layers = 2,
          .num_kv_heads = 2,
          .head_size = 64,
          .v_head_size = 48,
          .block_size = 32};
}

// Rows [begin, begin + count) of what a model would give to every layer.
std::vector<float> Rows(uint64_t seed, int layer, int64_t begin, int64_t count,
                        int width) {
  std::vector<float> rows;
  for (int64_t t = begin; t < begin + count; ++t) {
    for (int d = 0; d < width; ++d) {
      rows.push_back(float(
          RandomValue(seed, uint64_t(layer), uint64_t(t), uint64_t(d), 0)));
    }
  }
  return rows;
}

// Feeds `count` tokens at the sequence's end; returns out and lse of them.
testing::Output Step(const Attention& attention, KvPool* pool, SeqId seq,
                     int count) {
  const KvLayout& layout = pool->layout();
  const int64_t begin = *pool->Length(seq);
  EXPECT_TRUE((*pool->Append(seq, count)).admitted());
  std::vector<int64_t> slots(static_cast<size_t>(count));
  VARLANE_EXPECT_OK(pool->CopySlotMapping(seq, begin, slots));
  std::vector<int32_t> table(16);
  const Result<int64_t> blocks = pool->CopyBlockTable(seq, table);
  VARLANE_EXPECT_OK(blocks);
  const std::vector<int32_t> cu_seqlens_q = {0, count};
  const std::vector<int32_t> seq_lens = {int32_t(begin + count)};
  AttentionShape shape;
  shape.num_q_heads = kQHeads;
  AttentionPlan plan;
  VARLANE_EXPECT_OK(attention.Plan({cu_seqlens_q, seq_lens, table, 16}, shape,
                                   pool->view(), {}, &plan));
  testing::Output all;
  for (int layer = 0; layer < layout.num_layers; ++layer) {
    const auto q = Rows(1, layer, begin, count, kQHeads * layout.head_size);
    const auto k =
        Rows(2, layer, begin, count, layout.num_kv_heads * layout.head_size);
    const auto v =
        Rows(3, layer, begin, count, layout.num_kv_heads * layout.v_head_size);
    VARLANE_EXPECT_OK(attention.WriteKv(pool->view(), layer,
                                        {k.data(), DType::kF32},
                                        {v.data(), DType::kF32}, slots));
    std::vector<float> out(size_t(count * kQHeads * layout.v_head_size));
    std::vector<float> lse(size_t(count * kQHeads));
    AttentionTensors tensors;
    tensors.q = {q.data(), DType::kF32};
    tensors.out = {out.data(), DType::kF32};
    tensors.lse = lse.data();
    VARLANE_EXPECT_OK(attention.Run(&plan, pool->view(), layer, tensors));
    all.out.insert(all.out.end(), out.begin(), out.end());
    all.lse.insert(all.lse.end(), lse.begin(), lse.end());
  }
  return all;
}

class SessionAttentionTest : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, SessionAttentionTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         testing::DTypeParam);

TEST_P(SessionAttentionTest, OutputsAfterALoadHaveTheSameBits) {
  const testing::TemporaryFolder folder;
  const testing::Engine engine = testing::MakeEngine(2);
  const auto from = testing::SmallPool(LayoutOf(GetParam()), 16);
  // A load into blocks full of something else than NaN, at other places.
  const auto to = testing::SmallPool(LayoutOf(GetParam()), 24);
  const SeqId other = to->CreateSequence();
  (void)Step(*engine.attention, to.get(), other, 70);
  for (const int length : {1, 31, 32, 77, 161}) {
    const SeqId seq = from->CreateSequence();
    (void)Step(*engine.attention, from.get(), seq, length);
    VARLANE_ASSERT_OK(SaveSession(from.get(), seq, {}, folder.file("s")));
    const Result<LoadedSession> loaded =
        LoadSession(to.get(), folder.file("s"));
    VARLANE_ASSERT_OK(loaded);
    testing::ExpectSameBits(
        Step(*engine.attention, from.get(), seq, kNewTokens),
        Step(*engine.attention, to.get(), loaded->sequence, kNewTokens),
        "length " + std::to_string(length));
    VARLANE_EXPECT_OK(from->Free(seq));
    VARLANE_EXPECT_OK(to->Free(loaded->sequence));
  }
}

}  // namespace
}  // namespace varlane
