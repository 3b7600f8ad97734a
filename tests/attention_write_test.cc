// WriteKv: rounding, packing, slots; nothing else is touched.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
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

Memory MakeMemory(const KvLayout& layout, int64_t blocks) {
  Memory memory;
  memory.bytes.assign(size_t(blocks * layout.block_bytes()) + 64,
                      std::byte{0xa5});
  auto address = reinterpret_cast<uintptr_t>(memory.bytes.data());
  memory.view = {memory.bytes.data() + (64 - address % 64) % 64, blocks,
                 layout};
  return memory;
}

constexpr KvLayout kLayout = {.num_layers = 2,
                              .num_kv_heads = 3,
                              .head_size = 40,
                              .v_head_size = 72,
                              .block_size = 32};
constexpr int kBlocks = 4;

// Writes random numbers of layer 1 to `slots`, and expects each element rounded
// to its place and nothing else touched.
void ExpectWritten(const Engine& engine, DType cache, DType input,
                   const std::vector<int64_t>& slots) {
  KvLayout layout = kLayout;
  layout.dtype = cache;
  Memory got = MakeMemory(layout, kBlocks);
  Memory want = MakeMemory(layout, kBlocks);
  const int tokens = int(slots.size());
  std::vector<std::byte> k(size_t(tokens * 3 * 40) * SizeOf(input));
  std::vector<std::byte> v(size_t(tokens * 3 * 72) * SizeOf(input));
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < 3; ++h) {
      const auto fill = [&](std::vector<std::byte>& to, int size, uint64_t salt,
                            bool is_k) {
        for (int d = 0; d < size; ++d) {
          double value = Rounded(
              RandomValue(salt, uint64_t(t), uint64_t(h), uint64_t(d), 0),
              input);
          if (t == 7 && d == 3) value = 1e9;  // beyond f16
          if (t == 8 && d == 4) value = -INFINITY;
          StoreElement(to.data(), input, (t * 3 + h) * size + d, value);
          value = LoadElement(to.data(), input, (t * 3 + h) * size + d);
          const int64_t slot = slots[size_t(t)];
          if (slot < 0) continue;
          const int offset = int(slot % 32);
          std::byte* base = is_k ? want.view.k(slot / 32, 1, h)
                                 : want.view.v(slot / 32, 1, h);
          StoreElement(
              base, cache,
              is_k ? layout.k_offset(offset, d) : layout.v_offset(offset, d),
              value);
        }
      };
      fill(k, 40, 1, true);
      fill(v, 72, 2, false);
    }
  }
  VARLANE_ASSERT_OK(engine.attention->WriteKv(got.view, 1, {k.data(), input},
                                              {v.data(), input}, slots));
  ASSERT_EQ(std::memcmp(got.view.base, want.view.base,
                        size_t(kBlocks * layout.block_bytes())),
            0)
      << engine.attention->simd_target() << " " << DTypeName(input) << " to "
      << DTypeName(cache);
}

void ExpectWrittenFromAndToAll(const std::vector<int64_t>& slots) {
  for (const Engine& engine : EnginesOfAllTargets()) {
    for (const DType cache : kDTypes) {
      for (const DType input : kDTypes) {
        ExpectWritten(engine, cache, input, slots);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(WriteKvTest, EveryElementIsRoundedToItsPlaceAndNothingElseIsTouched) {
  std::vector<int64_t> slots(kBlocks * 32);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(3));
  slots.resize(37);
  slots[5] = -1;  // skipped
  ExpectWrittenFromAndToAll(slots);
}

// Tokens that follow each other in a block are written several at a time: from
// any offset on, as many as there are, and no further than their block.
TEST(WriteKvTest, TokensThatFollowEachOtherAreWrittenToTheirPlacesAlike) {
  for (const int64_t first : {0, 13, 18}) {
    std::vector<int64_t> slots(90);
    std::iota(slots.begin(), slots.end(), first);
    ExpectWrittenFromAndToAll(slots);
    if (HasFailure()) return;
    slots[21] = -1;  // skipped
    slots[22] = -1;
    std::swap(slots[40], slots[41]);
    ExpectWrittenFromAndToAll(slots);
    if (HasFailure()) return;
  }
}

TEST(WriteKvTest, RunsOfEveryLengthAreWrittenToTheirPlaces) {
  for (const int64_t first : {0, 1}) {
    std::vector<int64_t> slots;
    int64_t slot = first;
    for (int length = 1; slot + length < kBlocks * 32; ++length) {
      for (int i = 0; i < length; ++i) slots.push_back(slot++);
      ++slot;  // nobody's
    }
    ExpectWrittenFromAndToAll(slots);
    if (HasFailure()) return;
  }
}

TEST(WriteKvTest, StridedInputsAreRead) {
  const Engine engine = MakeEngine(1);
  KvLayout layout = {.dtype = DType::kF32,
                     .num_layers = 1,
                     .num_kv_heads = 2,
                     .head_size = 32,
                     .v_head_size = 32,
                     .block_size = 16};
  Memory got = MakeMemory(layout, 1);
  std::vector<float> packed(2 * 200, -1.0f);  // one qkv row: 200 floats a token
  for (int i = 0; i < 400; ++i) packed[size_t(i)] = float(i);
  const ConstTensor k = {packed.data() + 10, DType::kF32, 200, 40};
  const ConstTensor v = {packed.data() + 100, DType::kF32, 200, 32};
  const std::vector<int64_t> slots = {3, 0};
  VARLANE_ASSERT_OK(engine.attention->WriteKv(got.view, 0, k, v, slots));
  EXPECT_EQ(
      LoadElement(got.view.k(0, 0, 1), DType::kF32, layout.k_offset(0, 5)),
      10 + 200 + 40 + 5);
  EXPECT_EQ(
      LoadElement(got.view.v(0, 0, 1), DType::kF32, layout.v_offset(3, 9)),
      100 + 32 + 9);
}

TEST(WriteKvTest, ABadSlotIsNamedAndNothingIsWritten) {
  const Engine engine = MakeEngine(1);
  KvLayout layout = {.dtype = DType::kF32,
                     .num_layers = 1,
                     .num_kv_heads = 1,
                     .head_size = 32,
                     .v_head_size = 32,
                     .block_size = 16};
  Memory memory = MakeMemory(layout, 2);
  const std::vector<std::byte> before = memory.bytes;
  std::vector<float> rows(2 * 32, 1.0f);
  const std::vector<int64_t> slots = {0, 32};
  const Status status =
      engine.attention->WriteKv(memory.view, 0, {rows.data(), DType::kF32},
                                {rows.data(), DType::kF32}, slots);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "slot_mapping[1] = 32, but the pool has 2 blocks x 16 = 32 slots");
  EXPECT_EQ(memory.bytes, before);
  EXPECT_EQ(engine.attention
                ->WriteKv(memory.view, 1, {rows.data(), DType::kF32},
                          {rows.data(), DType::kF32}, slots)
                .message(),
            "layer = 1, but the layout has 1 layers");
}

}  // namespace
}  // namespace varlane::testing
