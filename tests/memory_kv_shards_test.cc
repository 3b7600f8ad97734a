// A pool whose KV heads are sharded over NUMA nodes: where its parts are, that
// all of them go wherever a block goes, and that files do not know of it.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/os_calls.h"
#include "memory/block_parts.h"
#include "memory/block_poison.h"
#include "runtime/numa_memory.h"
#include "tests/testing/files.h"
#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "tests/testing/tokens.h"
#include "varlane/kv_pool.h"
#include "varlane/metrics.h"
#include "varlane/session.h"
#include "varlane/swap.h"

namespace varlane {
namespace {

using testing::ExpectSequence;
using testing::MakeSequence;

constexpr int64_t kMiB = int64_t{1} << 20;

// 128 KiB a block: 32 blocks a slab on two nodes (4 MiB), 64 on four (8 MiB).
constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 8,
                              .num_kv_heads = 4,
                              .head_size = 32,
                              .v_head_size = 32,
                              .block_size = 16};
constexpr uint64_t kSeed = 7;

std::unique_ptr<Runtime> MakeNodes(int num_nodes) {
  auto runtime = testing::MakeRuntime(0, testing::NodesTopology(num_nodes));
  if (runtime != nullptr) {
    EXPECT_EQ(runtime->num_nodes(), num_nodes);
  }
  return runtime;
}

// A runtime with a pool on it.
struct Sharded {
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<KvPool> pool;
};

Sharded MakeSharded(int num_nodes, KvPoolOptions options) {
  Sharded made = {MakeNodes(num_nodes), nullptr};
  options.shard_heads = true;
  made.pool = testing::MakePool(options, made.runtime.get());
  return made;
}

class KvShardsTest : public ::testing::TestWithParam<int> {
 protected:
  static int num_nodes() { return GetParam(); }
  static int64_t slab_bytes() { return num_nodes() * 2 * kMiB; }
  static int64_t slab_blocks() { return slab_bytes() / kLayout.block_bytes(); }
};
INSTANTIATE_TEST_SUITE_P(Nodes, KvShardsTest, ::testing::Values(2, 4));

// --- where parts are ---------------------------------------------------------

TEST_P(KvShardsTest, EveryNodeHasItsHeadsOfEveryBlock) {
  const Sharded s = MakeSharded(
      num_nodes(), {.layout = kLayout, .num_blocks = 100, .max_blocks = 300});
  ASSERT_NE(s.pool, nullptr);
  EXPECT_EQ(s.pool->num_nodes(), num_nodes());
  EXPECT_EQ(s.pool->num_shards(), num_nodes());
  const KvView view = s.pool->view();
  EXPECT_EQ(view.num_blocks, 100) << "one range of ids, without holes";
  EXPECT_EQ(view.node_blocks, nullptr);
  EXPECT_EQ(view.num_shards, num_nodes());
  EXPECT_GE(view.shard_stride, 300 * view.part_bytes());
  EXPECT_EQ(view.shard_stride % (2 * kMiB), 0) << "huge pages of one node";
  for (int head = 0; head < kLayout.num_kv_heads; ++head) {
    const int node = head * num_nodes() / kLayout.num_kv_heads;
    for (const int64_t block : {0, 1, 99}) {
      const int64_t at = view.k(block, 0, head) - view.base;
      EXPECT_EQ(at / view.shard_stride, node) << "head " << head;
    }
  }
  const KvPoolStats stats = s.pool->stats();
  EXPECT_EQ(stats.slab_bytes, slab_bytes());
  EXPECT_EQ(stats.committed_bytes % slab_bytes(), 0);
  EXPECT_EQ(stats.num_slabs * slab_bytes(), stats.committed_bytes);
  EXPECT_EQ(stats.reserved_bytes, num_nodes() * view.shard_stride);
  for (int node = 0; node < num_nodes(); ++node) {
    const KvNodeStats part = s.pool->node_stats(node);
    EXPECT_EQ(part.committed_bytes * num_nodes(), stats.committed_bytes);
    EXPECT_EQ(part.capacity_blocks, 100) << "a part of each";
  }
  EXPECT_EQ(s.pool->node_stats(num_nodes()).capacity_blocks, 0);
  EXPECT_EQ(s.pool->MeasurePlacement().unknown_bytes, stats.committed_bytes);
  EXPECT_EQ(s.pool->MeasurePlacement(1).unknown_bytes,
            stats.committed_bytes / num_nodes());
  EXPECT_EQ(s.pool->NodeOfBlock(99), 0);
  const Result<Metrics> metrics =
      TakeMetrics({.pool = s.pool.get(), .placement = true});
  VARLANE_ASSERT_OK(metrics);
  ASSERT_TRUE(metrics->pool.has_value());
  EXPECT_EQ(std::ssize(metrics->pool->nodes), num_nodes());
  EXPECT_EQ(std::ssize(metrics->pool->placement), num_nodes());
}

TEST_P(KvShardsTest, AllIsWritableAndKeptWhileThePoolGrows) {
  for (const MemoryBacking backing :
       {MemoryBacking::kAnonymous, MemoryBacking::kMemfd}) {
    const Sharded s = MakeSharded(num_nodes(), {.layout = kLayout,
                                                .num_blocks = 3,
                                                .max_blocks = 200,
                                                .backing = backing});
    ASSERT_NE(s.pool, nullptr);
    const SeqId first = MakeSequence(s.pool.get(), 3 * 16, kSeed);
    VARLANE_ASSERT_OK(s.pool->Grow(197));
    const SeqId rest = MakeSequence(s.pool.get(), 197 * 16, kSeed + 1);
    ExpectSequence(*s.pool, first, 3 * 16, kSeed);
    ExpectSequence(*s.pool, rest, 197 * 16, kSeed + 1);
    VARLANE_EXPECT_OK(s.pool->CheckInvariants());
    if (s.pool->memory_fd() < 0) continue;
    // The file has every part where the view has it.
    const KvView view = s.pool->view();
    std::vector<std::byte> part(static_cast<size_t>(view.part_bytes()));
    for (int shard = 0; shard < num_nodes(); ++shard) {
      ASSERT_EQ(pread(s.pool->memory_fd(), part.data(), part.size(),
                      view.part(117, shard) - view.base),
                view.part_bytes());
      EXPECT_EQ(std::memcmp(part.data(), view.part(117, shard), part.size()),
                0);
    }
  }
}

TEST_P(KvShardsTest, LockedBytesAreThoseOfAllShards) {
  const Sharded s = MakeSharded(
      num_nodes(),
      {.layout = kLayout, .num_blocks = 40, .lock = MemoryLock::kTry});
  ASSERT_NE(s.pool, nullptr);
  const KvPoolStats stats = s.pool->stats();
  if (stats.lock_error == 0) {
    EXPECT_EQ(stats.locked_bytes, stats.committed_bytes);
  } else {
    EXPECT_LT(stats.locked_bytes, stats.committed_bytes);
  }
}

TEST(KvShardsOfOneNodeTest, NothingIsSharded) {
  const Sharded s = MakeSharded(1, {.layout = kLayout, .num_blocks = 10});
  ASSERT_NE(s.pool, nullptr);
  EXPECT_EQ(s.pool->num_shards(), 1);
  EXPECT_EQ(s.pool->view().num_shards, 1);
  EXPECT_EQ(s.pool->view().shard_stride, 0);
  EXPECT_EQ(s.pool->stats().slab_bytes, 2 * kMiB);
}

TEST(KvShardsRefusalTest, HeadsThatCannotBeCutAreRefusedByName) {
  const auto runtime = MakeNodes(3);
  const auto pool = KvPool::Create(
      {.layout = kLayout, .num_blocks = 4, .shard_heads = true}, runtime.get());
  EXPECT_EQ(pool.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool.status().message(),
            "num_kv_heads = 4, but with shard_heads it must be a multiple of "
            "the runtime's 3 NUMA nodes");
  VARLANE_EXPECT_OK(
      KvPool::Create({.layout = kLayout, .num_blocks = 4}, runtime.get()));
}

TEST_P(KvShardsTest, HomesMeanNothingButMustBeNodes) {
  const Sharded s = MakeSharded(
      num_nodes(), {.layout = kLayout, .num_blocks = 20, .prefix_cache = true});
  ASSERT_NE(s.pool, nullptr);
  EXPECT_EQ(s.pool->CreateSequence({.home_node = num_nodes()}), -1);
  EXPECT_EQ(s.pool->CreateSequence({.home_node = -2}), -1);
  const SeqId seq = s.pool->CreateSequence({.home_node = num_nodes() - 1});
  ASSERT_GE(seq, 0);
  VARLANE_ASSERT_OK(s.pool->Append(seq, 20 * 16));
  EXPECT_EQ(s.pool->stats().spilled_blocks, 0);
  EXPECT_EQ(s.pool->free_blocks(), 0);
  const std::vector<int32_t> prompt(20, 1);
  VARLANE_EXPECT_OK(
      s.pool->MatchPrefix({.home_node = num_nodes() - 1}, prompt));
  EXPECT_EQ(
      s.pool->MatchPrefix({.home_node = num_nodes()}, prompt).status().code(),
      StatusCode::kInvalidArgument);
}

// --- wherever a block goes ---------------------------------------------------

TEST_P(KvShardsTest, TheFirstWriteToASharedTailCopiesEveryShard) {
  const Sharded s =
      MakeSharded(num_nodes(), {.layout = kLayout, .num_blocks = 10});
  ASSERT_NE(s.pool, nullptr);
  const SeqId seq = MakeSequence(s.pool.get(), 40, kSeed);
  const Result<SeqId> fork = s.pool->Fork(seq);
  VARLANE_ASSERT_OK(fork);
  VARLANE_ASSERT_OK(s.pool->Append(*fork, 20));
  testing::FillSequence(s.pool.get(), *fork, 40, 60, kSeed);
  VARLANE_ASSERT_OK(s.pool->Append(seq, 3));
  testing::FillSequence(s.pool.get(), seq, 40, 43, kSeed + 1);
  EXPECT_EQ(s.pool->stats().cow_copies, 1);
  ExpectSequence(*s.pool, *fork, 60, kSeed);
  VARLANE_ASSERT_OK(s.pool->Truncate(seq, 40));
  ExpectSequence(*s.pool, seq, 40, kSeed);
  VARLANE_EXPECT_OK(s.pool->CheckInvariants());
}

TEST_P(KvShardsTest, AKnownBeginningOfABlockIsCopiedInEveryShard) {
  const Sharded s = MakeSharded(
      num_nodes(), {.layout = kLayout, .num_blocks = 10, .prefix_cache = true});
  ASSERT_NE(s.pool, nullptr);
  std::vector<int32_t> tokens = testing::From(100, 48);
  const SeqId seq = MakeSequence(s.pool.get(), 48, kSeed);
  VARLANE_ASSERT_OK(s.pool->CommitTokens(seq, 0, tokens));
  tokens[40] = 1;  // in the third block
  const Result<PrefixMatch> match = s.pool->MatchPrefix({}, tokens);
  VARLANE_ASSERT_OK(match);
  EXPECT_EQ(match->shared_blocks, 2);
  EXPECT_EQ(match->copied_tokens, 8);
  ExpectSequence(*s.pool, match->seq, 40, kSeed);
}

// Blocks before are freed, so that those at the end have to move.
TEST_P(KvShardsTest, BlocksMoveWithEveryShard) {
  const Sharded s = MakeSharded(
      num_nodes(), {.layout = kLayout, .num_blocks = 4 * slab_blocks()});
  ASSERT_NE(s.pool, nullptr);
  const int64_t half = 2 * slab_blocks();
  const SeqId low = MakeSequence(s.pool.get(), half * 16, kSeed);
  const SeqId high = MakeSequence(s.pool.get(), half * 16 - 5, kSeed + 1);
  VARLANE_ASSERT_OK(s.pool->Free(low));
  const Result<KvResize> some = s.pool->Compact(slab_blocks() / 2);
  VARLANE_ASSERT_OK(some);
  EXPECT_EQ(some->moved_blocks, slab_blocks() / 2);
  ExpectSequence(*s.pool, high, half * 16 - 5, kSeed + 1);
  const Result<KvResize> shrunk = s.pool->SetLimit(2 * slab_bytes());
  VARLANE_ASSERT_OK(shrunk);
  EXPECT_EQ(shrunk->moved_blocks, half - slab_blocks() / 2);
  EXPECT_EQ(shrunk->released_bytes, 2 * slab_bytes());
  EXPECT_EQ(s.pool->capacity_blocks(), half);
  for (int node = 0; node < num_nodes(); ++node) {
    EXPECT_EQ(s.pool->node_stats(node).committed_bytes, 4 * kMiB);
    // The pages are gone, where the kernel tells.
    const KvView view = s.pool->view();
    const int64_t bytes = half * view.part_bytes();
    const PagePlacement pages =
        QueryPlacement(view.part(half, node), bytes, -1);
    EXPECT_EQ(pages.absent + pages.unknown, bytes) << "node " << node;
  }
  ExpectSequence(*s.pool, high, half * 16 - 5, kSeed + 1);
  EXPECT_EQ(s.pool->MinLimitBytes(), 2 * slab_bytes());
  EXPECT_EQ(s.pool->SetLimit(slab_bytes()).status().code(),
            StatusCode::kResourceExhausted);
  VARLANE_ASSERT_OK(s.pool->SetLimit(4 * slab_bytes()));
  EXPECT_EQ(s.pool->capacity_blocks(), 4 * slab_blocks());
  const SeqId more = MakeSequence(s.pool.get(), half * 16, kSeed + 2);
  ExpectSequence(*s.pool, more, half * 16, kSeed + 2);
  ExpectSequence(*s.pool, high, half * 16 - 5, kSeed + 1);
  VARLANE_EXPECT_OK(s.pool->CheckInvariants());
}

// One call after the other fails once while memory is given back: what some
// nodes gave before another could not is there again, or was never gone.
TEST_P(KvShardsTest, MemoryThatOneNodeKeepsIsTakenAgainOnTheOthers) {
  const int64_t blocks = 3 * slab_blocks();
  int refused = 0;
  for (int64_t call = 0;; ++call) {
    ASSERT_LT(call, 1000);
    const Sharded s = MakeSharded(
        num_nodes(),
        {.layout = kLayout, .num_blocks = blocks, .check_limits = false});
    ASSERT_NE(s.pool, nullptr);
    const SeqId seq = MakeSequence(s.pool.get(), 100, kSeed);
    OsFaults::FailAfter(call, ENOMEM);
    const Result<KvResize> shrunk = s.pool->SetLimit(slab_bytes());
    const int64_t failed = OsFaults::failed();
    OsFaults::Disarm();
    if (!shrunk.ok()) {
      ++refused;
      EXPECT_EQ(s.pool->capacity_blocks(), blocks);
    }
    const int64_t free_tokens = s.pool->free_blocks() * 16;
    const SeqId rest = MakeSequence(s.pool.get(), free_tokens, kSeed + 1);
    ExpectSequence(*s.pool, rest, free_tokens, kSeed + 1);
    ExpectSequence(*s.pool, seq, 100, kSeed);
    VARLANE_EXPECT_OK(s.pool->CheckInvariants());
    if (failed == 0) break;
  }
  EXPECT_GE(refused, num_nodes()) << "each node's memory was refused once";
}

TEST_P(KvShardsTest, LentMemoryIsOfAllNodesAndComesBack) {
  const Sharded s = MakeSharded(
      num_nodes(), {.layout = kLayout, .num_blocks = 3 * slab_blocks()});
  ASSERT_NE(s.pool, nullptr);
  const SeqId seq = MakeSequence(s.pool.get(), 30 * 16, kSeed);
  const Result<KvResize> given = s.pool->GiveBack({.bytes = 3 * kMiB});
  VARLANE_ASSERT_OK(given);
  EXPECT_EQ(given->released_bytes, slab_bytes());
  EXPECT_EQ(s.pool->lent_blocks(), slab_blocks());
  const Result<KvResize> all =
      s.pool->GiveBack({.bytes = 100 * slab_bytes(), .move_blocks = true});
  VARLANE_ASSERT_OK(all);
  EXPECT_EQ(s.pool->stats().committed_bytes, slab_bytes());
  ExpectSequence(*s.pool, seq, 30 * 16, kSeed);
  VARLANE_ASSERT_OK(s.pool->TakeBack(2 * slab_bytes()));
  EXPECT_EQ(s.pool->lent_blocks(), 0);
  EXPECT_EQ(s.pool->capacity_blocks(), 3 * slab_blocks());
  EXPECT_EQ(s.pool->stats().slabs_regained, 2);
  const SeqId more =
      MakeSequence(s.pool.get(), (3 * slab_blocks() - 30) * 16, kSeed + 1);
  ExpectSequence(*s.pool, more, (3 * slab_blocks() - 30) * 16, kSeed + 1);
  ExpectSequence(*s.pool, seq, 30 * 16, kSeed);
  VARLANE_EXPECT_OK(s.pool->CheckInvariants());
}

TEST_P(KvShardsTest, AFreedBlockIsPoisonInEveryShard) {
#ifdef VARLANE_ASAN
  GTEST_SKIP() << "a freed block cannot be read";
#else
  const Sharded s = MakeSharded(
      num_nodes(), {.layout = kLayout, .num_blocks = 4, .poison_freed = true});
  ASSERT_NE(s.pool, nullptr);
  const SeqId kept = MakeSequence(s.pool.get(), 16, kSeed);
  const SeqId freed = MakeSequence(s.pool.get(), 16, kSeed + 1);
  int32_t block = -1;
  VARLANE_ASSERT_OK(s.pool->CopyBlockTable(freed, {&block, 1}));
  VARLANE_ASSERT_OK(s.pool->Free(freed));
  const KvView view = s.pool->view();
  for (int shard = 0; shard < num_nodes(); ++shard) {
    const std::byte* const part = view.part(block, shard);
    EXPECT_TRUE(std::all_of(part, part + view.part_bytes(),
                            [](std::byte b) { return b == std::byte{0xff}; }))
        << "shard " << shard;
  }
  ExpectSequence(*s.pool, kept, 16, kSeed);
#endif
}

// --- out of the pool and back ------------------------------------------------

TEST_P(KvShardsTest, APackedBlockIsThatOfACacheWithoutShards) {
  const Sharded s =
      MakeSharded(num_nodes(), {.layout = kLayout, .num_blocks = 3});
  ASSERT_NE(s.pool, nullptr);
  const auto plain = testing::SmallPool(kLayout, 3);
  ASSERT_NE(plain, nullptr);
  const auto bytes = static_cast<size_t>(kLayout.block_bytes());
  std::vector<std::byte> packed(bytes);
  const auto pack = [&](KvPool* pool) {
    const SeqId seq = MakeSequence(pool, 16, kSeed);
    int32_t block = -1;
    VARLANE_EXPECT_OK(pool->CopyBlockTable(seq, {&block, 1}));
    PackBlock(pool->view(), block, packed.data());
    return packed;
  };
  const std::vector<std::byte> wanted = pack(plain.get());
  EXPECT_EQ(pack(s.pool.get()), wanted);
  // Back into another block, and it is the same again.
  VARLANE_ASSERT_OK(s.pool->Append(s.pool->CreateSequence(), 32));
  UnpackBlock(wanted.data(), s.pool->view(), 2);
  PackBlock(s.pool->view(), 2, packed.data());
  EXPECT_EQ(packed, wanted);
}

TEST_P(KvShardsTest, ASessionsFileHasTheSameBytesWithAndWithoutShards) {
  const testing::TemporaryFolder folder;
  const Sharded s =
      MakeSharded(num_nodes(), {.layout = kLayout, .num_blocks = 30});
  ASSERT_NE(s.pool, nullptr);
  const auto plain = testing::SmallPool(kLayout, 30);
  for (const int64_t length : {1, 16, 37, 160}) {
    const SeqId of_shards = MakeSequence(s.pool.get(), length, kSeed);
    const SeqId of_plain = MakeSequence(plain.get(), length, kSeed);
    VARLANE_ASSERT_OK(
        SaveSession(s.pool.get(), of_shards, {}, folder.file("sharded")));
    VARLANE_ASSERT_OK(
        SaveSession(plain.get(), of_plain, {}, folder.file("plain")));
    EXPECT_EQ(testing::ReadWholeFile(folder.file("sharded")),
              testing::ReadWholeFile(folder.file("plain")))
        << "length " << length;
    const auto to_plain = LoadSession(plain.get(), folder.file("sharded"));
    VARLANE_ASSERT_OK(to_plain);
    ExpectSequence(*plain, to_plain->sequence, length, kSeed);
    const auto to_shards = LoadSession(s.pool.get(), folder.file("plain"));
    VARLANE_ASSERT_OK(to_shards);
    ExpectSequence(*s.pool, to_shards->sequence, length, kSeed);
    for (const SeqId seq : {of_plain, to_plain->sequence}) {
      VARLANE_EXPECT_OK(plain->Free(seq));
    }
    for (const SeqId seq : {of_shards, to_shards->sequence}) {
      VARLANE_EXPECT_OK(s.pool->Free(seq));
    }
  }
}

TEST_P(KvShardsTest, ADamagedSessionIsRefusedAndNothingIsHeld) {
  const testing::TemporaryFolder folder;
  const Sharded s =
      MakeSharded(num_nodes(), {.layout = kLayout, .num_blocks = 10});
  ASSERT_NE(s.pool, nullptr);
  const SeqId seq = MakeSequence(s.pool.get(), 50, kSeed);
  VARLANE_ASSERT_OK(SaveSession(s.pool.get(), seq, {}, folder.file("s")));
  std::string file = testing::ReadWholeFile(folder.file("s"));
  file[file.size() - size_t{3} * 128 * 1024] ^= 1;
  testing::WriteWholeFile(folder.file("s"), file);
  const auto loaded = LoadSession(s.pool.get(), folder.file("s"));
  EXPECT_EQ(loaded.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(s.pool->free_blocks(), 6);
}

TEST_P(KvShardsTest, SwappedSequencesComeBackInEveryShard) {
  const testing::TemporaryFolder folder;
  const Sharded s =
      MakeSharded(num_nodes(), {.layout = kLayout, .num_blocks = 30});
  ASSERT_NE(s.pool, nullptr);
  SwapOptions options;
  options.folder = folder.path();
  options.max_bytes = 40 * kLayout.block_bytes();
  options.direct_io = false;
  const auto swapper = SequenceSwapper::Create(options, s.pool.get());
  VARLANE_ASSERT_OK(swapper);
  const Result<SwapId> swap =
      (*swapper)->SwapOut(MakeSequence(s.pool.get(), 300, kSeed));
  VARLANE_ASSERT_OK(swap);
  ASSERT_EQ((*swapper)->Wait(*swap), SwapState::kStored);
  // Its blocks are others' meanwhile.
  const SeqId other = MakeSequence(s.pool.get(), 160, kSeed + 1);
  const SeqId back = s.pool->CreateSequence();
  VARLANE_ASSERT_OK(s.pool->Append(back, 300));
  VARLANE_ASSERT_OK((*swapper)->SwapIn(*swap, back));
  ASSERT_EQ((*swapper)->Wait(*swap), SwapState::kLoaded);
  ExpectSequence(*s.pool, back, 300, kSeed);
  ExpectSequence(*s.pool, other, 160, kSeed + 1);
}

}  // namespace
}  // namespace varlane
