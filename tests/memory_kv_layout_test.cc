// KvLayout: what is refused, and where every element stands.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/testing.h"
#include "varlane/kv_layout.h"

namespace varlane {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int kBlockSizes[] = {16, 32, 64, 128, 256};

std::string Refusal(const KvLayout& layout) {
  const Status status = layout.Validate();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  return std::string(status.message());
}

// Marks each offset once; what stays unmarked in [0, size) is returned.
template <typename Offset>
std::set<int64_t> Unmarked(int tokens, int dims, int64_t size, Offset offset) {
  std::vector<int> marks(static_cast<size_t>(size));
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < dims; ++d) {
      const int64_t at = offset(t, d);
      if (at < 0 || at >= size) {
        ADD_FAILURE() << "t = " << t << ", d = " << d << ": " << at << " of "
                      << size;
        return {};
      }
      EXPECT_EQ(++marks[static_cast<size_t>(at)], 1)
          << "t = " << t << ", d = " << d;
    }
  }
  std::set<int64_t> unmarked;
  for (int64_t at = 0; at < size; ++at) {
    if (marks[static_cast<size_t>(at)] == 0) unmarked.insert(at);
  }
  return unmarked;
}

TEST(KvLayoutTest, EverySupportedShapeIsValid) {
  for (const DType dtype : kDTypes) {
    for (const int block_size : kBlockSizes) {
      for (int d = 8; d <= 576; d += 8) {
        VARLANE_EXPECT_OK(
            (KvLayout{dtype, 28, 8, d, 584 - d, block_size}.Validate()));
      }
    }
  }
  VARLANE_EXPECT_OK((KvLayout{DType::kF16, 4096, 1, 32, 32, 16}.Validate()));
  VARLANE_EXPECT_OK((KvLayout{DType::kF16, 1, 65536, 32, 32, 16}.Validate()));
}

TEST(KvLayoutTest, RefusalsNameFieldValueAndLimit) {
  KvLayout layout;
  layout.block_size = 7;
  EXPECT_EQ(Refusal(layout),
            "block_size = 7, must be a power of two in [16, 256]");
  for (const int bad : {-16, 0, 8, 24, 48, 512}) {
    layout.block_size = bad;
    EXPECT_NE(Refusal(layout).find("block_size"), std::string::npos) << bad;
  }
  layout = {};
  layout.num_layers = 0;
  EXPECT_EQ(Refusal(layout), "num_layers = 0, must be in [1, 4096]");
  layout.num_layers = 4097;
  EXPECT_EQ(Refusal(layout), "num_layers = 4097, must be in [1, 4096]");
  layout = {};
  layout.num_kv_heads = -1;
  EXPECT_EQ(Refusal(layout), "num_kv_heads = -1, must be in [1, 65536]");
  layout.num_kv_heads = 65537;
  EXPECT_EQ(Refusal(layout), "num_kv_heads = 65537, must be in [1, 65536]");
  for (const int bad : {-32, 0, 4, 13, 33, 260, 580, 584}) {
    layout = {};
    layout.head_size = bad;
    EXPECT_EQ(Refusal(layout), "head_size = " + std::to_string(bad) +
                                   ", must be a multiple of 8 in [8, 576]");
    layout = {};
    layout.v_head_size = bad;
    EXPECT_EQ(Refusal(layout), "v_head_size = " + std::to_string(bad) +
                                   ", must be a multiple of 8 in [8, 576]");
  }
  layout = {};
  layout.dtype = static_cast<DType>(9);
  EXPECT_EQ(Refusal(layout), "dtype = 9, must be f32, bf16 or f16");
}

TEST(KvLayoutTest, ABlockOfATebibyteIsRefusedAndJustBelowIsNot) {
  // 2^10 layers x 2^16 heads x (2^5 + 2^5) dims x 2^6 tokens x 2^2 B.
  KvLayout layout{DType::kF32, 1024, 65536, 32, 32, 64};
  ASSERT_EQ(layout.block_bytes(), int64_t{1} << 40);
  EXPECT_EQ(Refusal(layout),
            "block_bytes = 1099511627776 (num_layers = 1024, num_kv_heads = "
            "65536, block_size = 64), must be below 1099511627776");
  layout.num_layers = 1023;
  VARLANE_EXPECT_OK(layout.Validate());
  // The largest fields at once: refused, not overflowed.
  layout = {DType::kF32, 4096, 65536, 256, 256, 256};
  EXPECT_EQ(layout.block_bytes(), int64_t{1} << 47);
  EXPECT_NE(Refusal(layout).find("140737488355328"), std::string::npos);
}

TEST(KvLayoutTest, OffsetsOfKAreABijection) {
  for (const DType dtype : kDTypes) {
    for (const int block_size : kBlockSizes) {
      for (const int d : {8, 24, 40, 64, 120, 256, 576}) {
        const KvLayout layout{dtype, 1, 1, d, d, block_size};
        const int64_t elements =
            layout.k_head_bytes() / static_cast<int64_t>(SizeOf(dtype));
        ASSERT_EQ(elements, int64_t{d} * block_size);
        EXPECT_TRUE(Unmarked(block_size, d, elements, [&](int t, int i) {
                      return layout.k_offset(t, i);
                    }).empty());
      }
    }
  }
}

TEST(KvLayoutTest, OffsetsOfVAreABijectionButForThePaddedDims) {
  for (const DType dtype : kDTypes) {
    for (const int block_size : kBlockSizes) {
      for (const int d : {8, 24, 40, 72, 120, 256, 576}) {
        const KvLayout layout{dtype, 1, 1, 64, d, block_size};
        const int64_t elements =
            layout.v_head_bytes() / static_cast<int64_t>(SizeOf(dtype));
        const auto unmarked =
            Unmarked(block_size, d, elements,
                     [&](int t, int i) { return layout.v_offset(t, i); });
        std::set<int64_t> padding;
        for (int t = 0; t < block_size; ++t) {
          for (int i = d; i < layout.v_head_size_padded(); ++i) {
            padding.insert(layout.v_offset(t, i));
          }
        }
        EXPECT_EQ(unmarked, padding);
      }
    }
  }
}

TEST(KvLayoutTest, EveryHeadOfEveryShapeIsAlignedTo64Bytes) {
  for (const DType dtype : kDTypes) {
    for (const int block_size : kBlockSizes) {
      for (int d = 8; d <= 576; d += 8) {
        const KvLayout layout{dtype, 3, 5, d, 288 - d, block_size};
        EXPECT_EQ(layout.k_head_bytes() % 64, 0) << d;
        EXPECT_EQ(layout.v_head_bytes() % 64, 0) << d;
        EXPECT_EQ(layout.layer_bytes() % 64, 0) << d;
        EXPECT_EQ(layout.block_bytes() % block_size, 0) << d;
      }
    }
  }
}

TEST(KvLayoutTest, HeadsOfABlockFollowEachOtherWithoutGapOrOverlap) {
  const KvLayout layout{DType::kBF16, 3, 2, 40, 72, 16};
  std::vector<std::byte> memory(static_cast<size_t>(2 * layout.block_bytes()));
  const KvView view{memory.data(), 2, layout};
  const auto at = [&](const std::byte* p) { return p - memory.data(); };
  int64_t expected = 0;
  for (int64_t block = 0; block < 2; ++block) {
    for (int layer = 0; layer < layout.num_layers; ++layer) {
      for (int head = 0; head < layout.num_kv_heads; ++head) {
        EXPECT_EQ(at(view.k(block, layer, head)), expected);
        expected += layout.k_head_bytes();
      }
      for (int head = 0; head < layout.num_kv_heads; ++head) {
        EXPECT_EQ(at(view.v(block, layer, head)), expected);
        expected += layout.v_head_bytes();
      }
    }
    EXPECT_EQ(expected, (block + 1) * layout.block_bytes());
  }
}

// A shard is laid out as the blocks of a cache with its heads alone.
TEST(KvLayoutTest, AShardOfHeadsIsACacheOfItsOwn) {
  const KvLayout layout{DType::kBF16, 3, 6, 40, 72, 16};
  for (const int shards : {1, 2, 3, 6}) {
    KvLayout part = layout;
    part.num_kv_heads /= shards;
    const int64_t stride = 4 * part.block_bytes() + 64;
    std::vector<std::byte> memory(static_cast<size_t>(shards * stride));
    KvView view{memory.data(), 4, layout};
    view.num_shards = shards;
    view.shard_stride = stride;
    EXPECT_EQ(view.part_bytes(), part.block_bytes());
    EXPECT_EQ(view.shard_heads(), part.num_kv_heads);
    for (int shard = 0; shard < shards; ++shard) {
      const KvView alone{memory.data() + shard * stride, 4, part};
      for (int64_t block = 0; block < 4; ++block) {
        EXPECT_EQ(view.part(block, shard), alone.k(block, 0, 0));
        for (int layer = 0; layer < layout.num_layers; ++layer) {
          for (int head = 0; head < part.num_kv_heads; ++head) {
            const int whole = shard * part.num_kv_heads + head;
            EXPECT_EQ(view.k(block, layer, whole), alone.k(block, layer, head));
            EXPECT_EQ(view.v(block, layer, whole), alone.v(block, layer, head));
          }
        }
      }
    }
  }
}

// The picture in kv_layout.h with numbers, by hand.
TEST(KvLayoutTest, TheDocumentedLayoutHolds) {
  const KvLayout bf16{DType::kBF16, 1, 1, 64, 72, 16};
  EXPECT_EQ(bf16.pack(), 2);
  EXPECT_EQ(bf16.v_head_size_padded(), 80);
  // K [D/2][16][2]: pairs of dims, tokens in lanes.
  EXPECT_EQ(bf16.k_offset(0, 0), 0);
  EXPECT_EQ(bf16.k_offset(0, 1), 1);
  EXPECT_EQ(bf16.k_offset(1, 0), 2);
  EXPECT_EQ(bf16.k_offset(5, 7), (3 * 16 + 5) * 2 + 1);
  // V [16/2][80][2]: pairs of tokens, dims in lanes.
  EXPECT_EQ(bf16.v_offset(0, 0), 0);
  EXPECT_EQ(bf16.v_offset(1, 0), 1);
  EXPECT_EQ(bf16.v_offset(0, 1), 2);
  EXPECT_EQ(bf16.v_offset(5, 7), (2 * 80 + 7) * 2 + 1);

  const KvLayout f32{DType::kF32, 1, 1, 64, 64, 32};
  EXPECT_EQ(f32.pack(), 1);
  EXPECT_EQ(f32.k_offset(5, 7), 7 * 32 + 5);
  EXPECT_EQ(f32.v_offset(5, 7), 5 * 64 + 7);

  // Qwen3-0.6B: 28 layers x 8 heads x (128 + 128) x 2 B = 112 KiB a token.
  const KvLayout qwen{DType::kBF16, 28, 8, 128, 128, 16};
  EXPECT_EQ(qwen.token_bytes(), 112 * 1024);
  EXPECT_EQ(qwen.block_bytes(), 16 * 112 * 1024);
}

}  // namespace
}  // namespace varlane
