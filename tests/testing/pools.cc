// SPDX-License-Identifier: Apache-2.0

#include "tests/testing/pools.h"

#include <cstring>
#include <utility>

#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

// A finite bit pattern of any type.
uint32_t Pattern(uint64_t seed, int64_t position, int layer, int head, int d) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + uint64_t(position) * 0x100000001B3u;
  x ^= uint64_t(layer) << 40 ^ uint64_t(head) << 32 ^ uint64_t(d) << 8;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return uint32_t(x >> 32) & 0x3fff3fffu;
}

// Calls body(address, pattern) for each element of the position.
template <typename Body>
void ForPosition(const KvPool& pool, SeqId seq, int64_t position, uint64_t seed,
                 const Body& body) {
  const KvLayout& layout = pool.layout();
  int64_t slot = 0;
  VARLANE_ASSERT_OK(pool.CopySlotMapping(seq, position, {&slot, 1}));
  const KvView view = pool.view();
  const int64_t block = slot / layout.block_size;
  const int t = int(slot % layout.block_size);
  const auto size = int64_t(SizeOf(layout.dtype));
  for (int layer = 0; layer < layout.num_layers; ++layer) {
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      for (int d = 0; d < layout.head_size; ++d) {
        body(view.k(block, layer, head) + layout.k_offset(t, d) * size,
             Pattern(seed, position, layer, head, d));
      }
      for (int d = 0; d < layout.v_head_size; ++d) {
        body(view.v(block, layer, head) + layout.v_offset(t, d) * size,
             Pattern(seed, position, layer, head, d + 1000));
      }
    }
  }
}

}  // namespace

std::unique_ptr<KvPool> MakePool(const KvPoolOptions& options,
                                 Runtime* runtime) {
  Result<std::unique_ptr<KvPool>> pool = KvPool::Create(options, runtime);
  EXPECT_TRUE(IsOk(pool));
  return pool.ok() ? *std::move(pool) : nullptr;
}

KvLayout SmallLayout(DType dtype) {
  return {.dtype = dtype,
          .num_layers = 2,
          .num_kv_heads = 2,
          .head_size = 16,
          .v_head_size = 24,
          .block_size = 16};
}

std::unique_ptr<KvPool> SmallPool(const KvLayout& layout, int64_t num_blocks) {
  KvPoolOptions options;
  options.layout = layout;
  options.num_blocks = num_blocks;
  options.huge_pages = HugePages::kOff;
  options.shuffle = true;
  options.seed = 5;
  std::unique_ptr<KvPool> pool = MakePool(options, OneWorker());
  if (pool == nullptr) return nullptr;
  std::memset(pool->view().base, 0xff,
              size_t(num_blocks * layout.block_bytes()));
  return pool;
}

SeqId MakeSequence(KvPool* pool, int64_t length, uint64_t seed) {
  const SeqId seq = pool->CreateSequence();
  const Result<Admission> admission = pool->Append(seq, length);
  VARLANE_EXPECT_OK(admission);
  if (!admission.ok() || !admission->admitted()) {
    (void)pool->Free(seq);
    return -1;
  }
  FillSequence(pool, seq, 0, length, seed);
  return seq;
}

void FillSequence(KvPool* pool, SeqId seq, int64_t begin, int64_t end,
                  uint64_t seed) {
  const size_t size = SizeOf(pool->layout().dtype);
  for (int64_t position = begin; position < end; ++position) {
    ForPosition(*pool, seq, position, seed,
                [size](std::byte* at, uint32_t pattern) {
                  std::memcpy(at, &pattern, size);
                });
  }
}

void ExpectSequence(const KvPool& pool, SeqId seq, int64_t length,
                    uint64_t seed) {
  const Result<int64_t> actual = pool.Length(seq);
  VARLANE_ASSERT_OK(actual);
  ASSERT_EQ(*actual, length);
  const size_t size = SizeOf(pool.layout().dtype);
  int64_t different = 0;
  for (int64_t position = 0; position < length; ++position) {
    ForPosition(pool, seq, position, seed,
                [&](const std::byte* at, uint32_t pattern) {
                  if (std::memcmp(at, &pattern, size) != 0) ++different;
                });
    ASSERT_EQ(different, 0) << "seq " << seq << ", position " << position;
  }
}

}  // namespace varlane::testing
