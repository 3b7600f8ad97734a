// CopyBlocks and GatherKv: every byte, nothing else, and what is refused.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/kv_ops.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

struct Memory {
  std::vector<std::byte> bytes;
  KvView view;
};

// Every byte tells where it stands.
Memory MakeMemory(const KvLayout& layout, int64_t blocks) {
  Memory memory;
  const auto size = size_t(blocks * layout.block_bytes());
  memory.bytes.resize(size + 64);
  const auto address = reinterpret_cast<uintptr_t>(memory.bytes.data());
  memory.view = {memory.bytes.data() + (64 - address % 64) % 64, blocks,
                 layout};
  for (size_t i = 0; i < size; ++i) {
    memory.view.base[i] = std::byte(i * 2654435761u >> 13);
  }
  return memory;
}

TEST(CopyBlocksTest, CopiesWholeBlocksOfAllLayersAndNothingElse) {
  const Engine engine = MakeEngine(3);
  // Blocks of 448 KiB: two pieces, the second one shorter.
  const KvLayout layout = {.dtype = DType::kBF16,
                           .num_layers = 7,
                           .num_kv_heads = 8,
                           .head_size = 128,
                           .v_head_size = 128,
                           .block_size = 16};
  constexpr int64_t kBlocks = 9;
  const Memory memory = MakeMemory(layout, kBlocks);
  std::vector<std::byte> want(
      memory.view.base, memory.view.base + kBlocks * layout.block_bytes());
  const std::vector<BlockCopy> copies = {{2, 7}, {0, 8}, {2, 3}, {5, 1}};
  for (const BlockCopy& copy : copies) {
    std::memcpy(want.data() + copy.to * layout.block_bytes(),
                memory.view.base + copy.from * layout.block_bytes(),
                size_t(layout.block_bytes()));
  }
  VARLANE_ASSERT_OK(CopyBlocks(engine.runtime.get(), memory.view, copies));
  EXPECT_EQ(std::memcmp(want.data(), memory.view.base, want.size()), 0);
  VARLANE_EXPECT_OK(CopyBlocks(engine.runtime.get(), memory.view, {}));
}

TEST(CopyBlocksTest, RefusalsNameThePairAndNothingIsCopied) {
  const Engine engine = MakeEngine(1);
  const Memory memory = MakeMemory({.num_kv_heads = 2}, 4);
  const std::vector<std::byte> before = memory.bytes;
  const auto refusal = [&](const std::vector<BlockCopy>& copies) {
    const Status status = CopyBlocks(engine.runtime.get(), memory.view, copies);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(memory.bytes, before);
    return std::string(status.message());
  };
  EXPECT_EQ(refusal({{0, 1}, {4, 2}}),
            "copies[1].from = 4, but the view has 4 blocks");
  EXPECT_EQ(refusal({{0, 1}, {0, -1}}),
            "copies[1].to = -1, but the view has 4 blocks");
  EXPECT_EQ(refusal({{0, 3}, {1, 2}, {2, 3}}),
            "copies[2].to = 3 is also copies[0].to");
  EXPECT_EQ(refusal({{0, 3}, {3, 2}}),
            "copies[1].from = 3 is also copies[0].to");
  EXPECT_EQ(refusal({{2, 2}}), "copies[0].from = 2 is also copies[0].to");
  EXPECT_EQ(CopyBlocks(nullptr, memory.view, {}).message(), "runtime is null");
  EXPECT_EQ(CopyBlocks(engine.runtime.get(), {nullptr, 4, memory.view.layout},
                       std::vector<BlockCopy>{{0, 1}})
                .message(),
            "the KV view's base is null");
}

// Attention over a copy is attention over the original.
TEST(CopyBlocksTest, ACopiedSequenceAttendsAsTheOriginal) {
  const Engine engine = MakeEngine(2);
  CaseSpec spec;
  spec.seqs = {{3, 70}};
  spec.extra_blocks = 5;
  AttentionCase c(spec);
  const Output original = c.Run(*engine.attention);
  std::vector<bool> used(10, false);
  for (int b = 0; b < 5; ++b) used[size_t(c.block_tables()[size_t(b)])] = true;
  std::vector<BlockCopy> copies;
  int32_t next = 0;
  for (int b = 0; b < 5; ++b) {
    while (used[size_t(next)]) ++next;
    copies.push_back({c.block_tables()[size_t(b)], next});
    c.block_tables()[size_t(b)] = next++;
  }
  VARLANE_ASSERT_OK(CopyBlocks(engine.runtime.get(), c.view(), copies));
  ExpectSameBits(original, c.Run(*engine.attention), "copied");
}

// --- gather ------------------------------------------------------------------

class GatherTest : public ::testing::TestWithParam<DType> {};

// Ranges within a block, across blocks and to the end; both output types;
// strides with untouched gaps.
TEST_P(GatherTest, EveryElementOfTheRangeAndNothingElse) {
  const Engine engine = MakeEngine(2);
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.kv_heads = 3;
  spec.q_heads = 3;
  spec.head_size = 40;
  spec.v_head_size = 72;
  spec.block_size = 32;
  spec.seqs = {{1, 5}, {1, 133}};
  AttentionCase c(spec);
  const auto stride = size_t(c.batch().block_table_stride);
  const std::span<const int32_t> table =
      std::span(c.block_tables()).subspan(stride);
  for (const DType to : {DType::kF32, GetParam()}) {
    for (const auto& [begin, end] : std::vector<std::pair<int, int>>{
             {0, 133}, {7, 9}, {31, 33}, {64, 96}, {101, 133}, {50, 50}}) {
      for (const int gap : {0, 3}) {
        const auto tokens = size_t(end - begin);
        const int64_t k_head = 40 + gap;
        const int64_t v_head = 72 + gap;
        const int64_t k_token = 3 * k_head + gap;
        const int64_t v_token = 3 * v_head + gap;
        std::vector<std::byte> k((tokens + 1) * size_t(k_token) * SizeOf(to),
                                 std::byte{0x5a});
        std::vector<std::byte> v((tokens + 1) * size_t(v_token) * SizeOf(to),
                                 std::byte{0x5a});
        std::vector<std::byte> want_k = k;
        std::vector<std::byte> want_v = v;
        for (int i = begin; i < end; ++i) {
          for (int h = 0; h < 3; ++h) {
            std::array<double, 40> key;
            std::array<double, 72> value;
            c.LoadToken(1, i, h, key, value);
            for (int d = 0; d < 40; ++d) {
              StoreElement(want_k.data(), to,
                           (i - begin) * k_token + h * k_head + d,
                           key[size_t(d)]);
            }
            for (int d = 0; d < 72; ++d) {
              StoreElement(want_v.data(), to,
                           (i - begin) * v_token + h * v_head + d,
                           value[size_t(d)]);
            }
          }
        }
        const bool packed = gap == 0;  // strides by default
        VARLANE_ASSERT_OK(GatherKv(
            engine.runtime.get(), c.view(), {table, 0, begin, end},
            {k.data(), to, packed ? 0 : k_token, packed ? 0 : k_head},
            {v.data(), to, packed ? 0 : v_token, packed ? 0 : v_head}));
        ASSERT_EQ(k, want_k) << begin << ".." << end << " gap " << gap;
        ASSERT_EQ(v, want_v) << begin << ".." << end << " gap " << gap;
      }
    }
  }
}

// What was written comes back, also of another layer, and one tensor alone.
TEST_P(GatherTest, ReturnsWhatWriteKvWasGiven) {
  const Engine engine = MakeEngine(2);
  const KvLayout layout = {.dtype = GetParam(),
                           .num_layers = 3,
                           .num_kv_heads = 2,
                           .head_size = 64,
                           .v_head_size = 64,
                           .block_size = 16};
  const Memory memory = MakeMemory(layout, 6);
  const std::vector<int32_t> table = {4, 0, 5};
  constexpr int kTokens = 41;
  std::vector<float> k(kTokens * 2 * 64);
  std::vector<float> v(k.size());
  std::vector<int64_t> slots;
  for (size_t i = 0; i < k.size(); ++i) {
    k[i] = float(Rounded(RandomValue(1, i, 0, 0, 0), GetParam()));
    v[i] = float(Rounded(RandomValue(2, i, 0, 0, 0), GetParam()));
  }
  for (int t = 0; t < kTokens; ++t) {
    slots.push_back(table[size_t(t / 16)] * 16 + t % 16);
  }
  VARLANE_ASSERT_OK(engine.attention->WriteKv(
      memory.view, 2, {k.data(), DType::kF32}, {v.data(), DType::kF32}, slots));
  std::vector<float> got(k.size());
  VARLANE_ASSERT_OK(GatherKv(engine.runtime.get(), memory.view,
                             {table, 2, 0, kTokens}, {got.data(), DType::kF32},
                             {}));
  EXPECT_EQ(got, k);
  VARLANE_ASSERT_OK(GatherKv(engine.runtime.get(), memory.view,
                             {table, 2, 0, kTokens}, {},
                             {got.data(), DType::kF32}));
  EXPECT_EQ(got, v);
}

INSTANTIATE_TEST_SUITE_P(KvTypes, GatherTest, ::testing::ValuesIn(kDTypes),
                         DTypeParam);

TEST(GatherKvTest, RefusalsNamePlaceValueAndLimit) {
  const Engine engine = MakeEngine(1);
  const Memory memory = MakeMemory({.num_layers = 2}, 4);
  std::vector<int32_t> table = {0, 90210, -1};
  std::vector<float> to(100 * 128);
  const MutableTensor out = {to.data(), DType::kF32};
  const auto refusal = [&](const KvRange& range, const MutableTensor& k) {
    const Status status =
        GatherKv(engine.runtime.get(), memory.view, range, k, out);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(refusal({table, 2, 0, 1}, out),
            "layer = 2, but the layout has 2 layers");
  EXPECT_EQ(refusal({table, 0, -1, 1}, out),
            "begin = -1, must not be negative");
  EXPECT_EQ(refusal({table, 0, 5, 3}, out), "end = 3 is below begin = 5");
  EXPECT_EQ(refusal({table, 0, 0, 49}, out),
            "end = 49 needs 4 blocks of 16, but block_table has 3 entries");
  EXPECT_EQ(refusal({table, 0, 0, 17}, out),
            "block_table[1] = 90210, but the view has 4 blocks");
  EXPECT_EQ(refusal({table, 0, 0, 1}, {to.data(), DType::kF16}),
            "k.dtype = f16, must be f32 or the cache's bf16");
  EXPECT_EQ(GatherKv(nullptr, memory.view, {}, out, out).message(),
            "runtime is null");
  // Blocks outside the range are not looked at.
  VARLANE_EXPECT_OK(
      GatherKv(engine.runtime.get(), memory.view, {table, 0, 0, 16}, out, {}));
  table = {-7, 3};
  VARLANE_EXPECT_OK(
      GatherKv(engine.runtime.get(), memory.view, {table, 1, 16, 20}, out, {}));
}

}  // namespace
}  // namespace varlane::testing
