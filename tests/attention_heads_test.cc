// Several KV heads a threadgroup: the same bits, fewer threadgroups, and when a
// plan takes them.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/plan.h"
#include "kernels/kernel_table.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

// --- the same bits -----------------------------------------------------------

constexpr int kHeads = 6;

// Decode, verification, more rows of a head than go together, a long prefill,
// several partitions, ragged tails, an empty sequence, rows that see nothing;
// all that a head has of its own.
CaseSpec Mixed(DType kv_dtype) {
  CaseSpec spec;
  spec.kv_dtype = kv_dtype;
  spec.kv_heads = kHeads;
  spec.q_heads = 3 * kHeads;
  spec.head_size = 40;
  spec.v_head_size = 48;
  spec.seqs = {{1, 77}, {5, 1030}, {11, 90}, {100, 130}, {1, 2100},
               {0, 3},  {4, 2},    {1, 1},   {1, 512},   {12, 1100}};
  for (int h = 0; h < spec.q_heads; ++h) {
    spec.alibi_slopes.push_back(std::exp2(-0.5f * float(h + 2)));
    spec.sinks.push_back(float(h % 5) - 1.5f);
  }
  return spec;
}

PlanOptions Together(int heads, OwnerPattern owner = OwnerPattern::kSearch,
                     PartitionMode partitions = PartitionMode::kAuto) {
  return {.owner = owner,
          .partitions = partitions,
          .kv_heads_per_threadgroup = heads};
}

class HeadsTest : public ::testing::TestWithParam<DType> {};

TEST_P(HeadsTest, TogetherOrOneByOneAreTheSameBits) {
  const AttentionCase c(Mixed(GetParam()));
  for (const Engine& engine : EnginesOfAllTargets()) {
    SCOPED_TRACE(engine.attention->simd_target());
    const Output single = c.Run(*engine.attention, Together(1));
    c.ExpectMatchesReference(single);
    for (const int heads : {2, 3, 6, 0}) {
      ExpectSameBits(single, c.Run(*engine.attention, Together(heads)),
                     std::to_string(heads) + " KV heads");
      if (HasFailure()) return;
    }
  }
}

// What exceeds the caches, all KV heads together, on all targets.
void ExpectSameFromMemory(const CaseSpec& spec) {
  const AttentionCase c(spec);
  for (const Engine& engine : EnginesOfAllTargets()) {
    SCOPED_TRACE(engine.attention->simd_target());
    const Engine small = MakeSmallCaches(engine.attention->simd_target());
    const Output out = c.Run(*small.attention, Together(spec.kv_heads));
    c.ExpectMatchesReference(out);
    ExpectSameBits(c.Run(*engine.attention), out, "a small cache");
    if (::testing::Test::HasFailure()) return;
  }
}

// More K/V than the caches hold: contexts of one run, too, are passed as what
// comes from memory is. With heads past those that go together there.
TEST_P(HeadsTest, ContextsThatNoCacheHoldsAreTheSameBits) {
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.kv_heads = 9;
  spec.q_heads = 2 * spec.kv_heads;
  spec.head_size = 128;
  spec.seqs = {{1, 77}, {1, 128}, {2, 200}, {1, 512}, {3, 64}, {1, 1}};
  ExpectSameFromMemory(spec);
}

// Values that take a head's dims in several passes, over 16 tokens or all of a
// tile: from where windows begin, within such 16, to where contexts end.
TEST_P(HeadsTest, ValuesOfSeveralPassesAreTheSameBits) {
  struct Heads {
    int group;
    int head_size;
    int v_head_size;
  };
  for (const auto [group, head_size, v_head_size] :
       {Heads{1, 256, 256}, Heads{4, 64, 192}, Heads{6, 128, 128},
        Heads{3, 192, 256}, Heads{8, 72, 256}}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.kv_heads = 2;
    spec.q_heads = group * spec.kv_heads;
    spec.head_size = head_size;
    spec.v_head_size = v_head_size;
    spec.seqs = {{1, 77}, {1, 128}, {1, 200}, {1, 661}, {1, 64}, {1, 15}};
    spec.masks.resize(spec.seqs.size());
    spec.masks[2].window_left = 150;
    spec.masks[3].window_left = 331;
    ExpectSameFromMemory(spec);
    if (HasFailure()) return;
  }
}

// Read as from memory and, now and then, as from a cache, all or half of which
// K/V fill: often enough to meet both ways of each. Of more than 12 rows, also
// as more register groups from memory than from a cache.
void CheckWhereKvComesFrom(const AttentionCase& c, const PlanOptions& plan,
                           const Output& expected, const std::string& what) {
  for (const int times : {1, 2}) {
    const Engine engine = MakeCaches(times * expected.report.kv_bytes);
    for (int launch = 0; launch < Operations(40, 16); ++launch) {
      ExpectSameBits(c.Run(*engine.attention, plan), expected,
                     what + ", a cache " + std::to_string(times) +
                         " times as large, launch " + std::to_string(launch));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(HeadsTest, WhereKvComesFromChangesNoBit) {
  for (const int group : {1, 2, 3, 4, 6, 8, 13, 18}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.kv_heads = 3;
    spec.q_heads = group * spec.kv_heads;
    spec.head_size = group == 3 ? 72 : 128;
    spec.block_size = group == 1 ? 32 : group == 4 ? 64 : 16;
    spec.seqs = {{1, 77}, {1, 128}, {1, 1},  {1, 512},
                 {1, 45}, {1, 640}, {1, 64}, {1, 1339}};
    const AttentionCase c(spec);
    const PlanOptions plan = Together(spec.kv_heads);
    const Output expected = c.Run(*MakeSmallCaches("").attention, plan);
    c.ExpectMatchesReference(expected);
    CheckWhereKvComesFrom(c, plan, expected, "group " + std::to_string(group));
    if (HasFailure()) return;
  }
}

// Scores of -inf, to which these overflow, for one of a head's two rows: the
// other one's weights are computed at once, while the head before waits.
TEST_P(HeadsTest, WeightsThatWaitAreLeftAlone) {
  const Fill q = [](int, int, int head, int d) {
    return d == 0 ? (head % 4 == 3 ? 1e38 : 0.0) : 0.125 * ((head + d) % 7);
  };
  const Fill k = [](int, int pos, int, int d) {
    return d == 0 ? (pos < 64 ? -6e4 : 1.0) : 0.25 * ((pos + d) % 5);
  };
  CaseSpec spec;
  spec.kv_dtype = GetParam();
  spec.kv_heads = 10;  // more than go together
  spec.q_heads = 2 * spec.kv_heads;
  spec.head_size = 64;
  spec.seqs = {{1, 63}, {1, 64}, {1, 40}, {1, 127}, {1, 128}, {1, 511}};
  const AttentionCase c(spec, q, k);
  const PlanOptions plan = Together(spec.kv_heads);
  const Output expected = c.Run(*MakeSmallCaches("").attention, plan);
  CheckWhereKvComesFrom(c, plan, expected, "every other head");
}

// Blocks of several tiles, two of which a head passes before the next one does:
// with windows and drafts that see a part of either, before which infinities
// stand, and with keys that grow, so that the second one's scores move what the
// first one's weights refer to.
TEST_P(HeadsTest, TilesOfLargeBlocksAreTheSameBits) {
  const Fill q = [](int, int, int head, int d) {
    return d == 0 ? 1.0 : 0.125 * ((head + d) % 5);
  };
  const Fill k = [](int, int pos, int head, int d) {
    return d == 0 ? (head % 2 == 0 ? pos / 16 : 0.0) : 0.25 * ((pos + d) % 5);
  };
  const Fill v = [](int seq, int pos, int head, int d) {
    const bool outside = (seq == 3 && pos < 42) || (seq == 9 && pos < 938);
    return outside ? INFINITY : 0.25 * ((pos + 3 * head + d) % 9) - 1;
  };
  for (const int block_size : {128, 256}) {
    CaseSpec spec;
    spec.kv_dtype = GetParam();
    spec.kv_heads = 5;  // more than go together
    spec.q_heads = 2 * spec.kv_heads;
    spec.head_size = 72;
    spec.seqs = {{1, 77},  {1, 128}, {1, 200}, {3, 130},  {3, 65},
                 {2, 129}, {1, 512}, {2, 97},  {1, 1339}, {3, 1026}};
    spec.masks.assign(spec.seqs.size(), {});
    for (const size_t windowed : {2, 3, 8, 9}) {
      spec.masks[windowed].window_left = 85;
    }
    const AttentionCase small_blocks(spec, q, k, v);
    const PlanOptions plan = Together(spec.kv_heads);
    const Output expected =
        small_blocks.Run(*MakeSmallCaches("").attention, plan);
    small_blocks.ExpectMatchesReference(expected);
    spec.block_size = block_size;
    const AttentionCase c(spec, q, k, v);
    ExpectSameBits(c.Run(*MakeSmallCaches("").attention, plan), expected,
                   "blocks of " + std::to_string(block_size));
    CheckWhereKvComesFrom(c, plan, expected, std::to_string(block_size));
    if (HasFailure()) return;
  }
}

// A threadgroup of three takes a third of them; each pattern finds the same.
TEST_P(HeadsTest, EveryPatternAndPartitionModeAgreesAndIsCounted) {
  const AttentionCase c(Mixed(GetParam()));
  const Engine engine = MakeEngine(2);
  for (const OwnerPattern owner : kOwnerPatterns) {
    for (const PartitionMode mode : kPartitionModes) {
      const std::string what =
          std::string(OwnerPatternName(owner)) + " " + PartitionModeName(mode);
      const Output single = c.Run(*engine.attention, Together(1, owner, mode));
      const Output three = c.Run(*engine.attention, Together(3, owner, mode));
      ExpectSameBits(single, three, what);
      const LaunchReport& one = single.report;
      const LaunchReport& report = three.report;
      EXPECT_EQ(report.threadgroups * 3, one.threadgroups) << what;
      EXPECT_EQ(report.surplus_threadgroups * 3, one.surplus_threadgroups)
          << what;
      EXPECT_EQ(report.spread_partitions * 3, one.spread_partitions) << what;
      EXPECT_EQ(report.merges * 3, one.merges) << what;
      EXPECT_EQ(report.kv_bytes, one.kv_bytes) << what;
      EXPECT_EQ(report.flops, one.flops) << what;
      if (mode == PartitionMode::kSpread) {
        EXPECT_GT(report.merges, 0) << what;
      }
      if (HasFailure()) return;
    }
  }
}

// Sums of small integers are exact: a token, a head's or a sequence's that is
// dropped, doubled or another's shows in fp32.
TEST_P(HeadsTest, EveryHeadSeesItsOwnKeysOnce) {
  CaseSpec spec = Mixed(GetParam());
  spec.alibi_slopes.clear();
  spec.sinks.clear();
  spec.head_size = spec.v_head_size = 32;
  const auto zero = [](int, int, int, int) { return 0.0; };
  const auto value = [](int seq, int pos, int head, int dim) {
    return double((pos * 7 + head * 3 + seq + dim) % 16);
  };
  const AttentionCase c(spec, {}, zero, value);
  for (const Engine& engine : EnginesOfAllTargets()) {
    const Output output = c.Run(*engine.attention, Together(kHeads));
    for (int s = 0; s < int(spec.seqs.size()); ++s) {
      for (int i = 0; i < spec.seqs[size_t(s)].q_len; ++i) {
        const int64_t count = c.Limit(s, i) - c.Begin(s, i);
        if (count == 0) continue;
        for (int h = 0; h < spec.q_heads; ++h) {
          double sum = 0;
          for (int64_t pos = c.Begin(s, i); pos < c.Limit(s, i); ++pos) {
            sum += value(s, int(pos), h / 3, 5);
          }
          const int64_t row = (c.FirstToken(s) + i) * spec.q_heads + h;
          ASSERT_EQ(output.out[size_t(row * 32 + 5)], float(sum) / float(count))
              << engine.attention->simd_target() << " sequence " << s
              << " token " << i << " head " << h;
        }
      }
    }
  }
}

// Shards stand apart, so threadgroups do not reach over them.
TEST_P(HeadsTest, ShardsAreNotCrossed) {
  const AttentionCase plain(Mixed(GetParam()));
  const Engine one = MakeEngine(2);
  const Engine two = MakeNodes(2);
  const Output expected = plain.Run(*one.attention, Together(1));
  AttentionCase sharded(Mixed(GetParam()));
  sharded.ShardHeads(2);
  for (const Engine* engine : {&one, &two}) {
    for (const OwnerPattern owner : kOwnerPatterns) {
      for (const PartitionMode mode : kPartitionModes) {
        const Output output =
            sharded.Run(*engine->attention, Together(kHeads, owner, mode));
        ExpectSameBits(expected, output, OwnerPatternName(owner));
        if (HasFailure()) return;
      }
    }
  }
  // Bytes are those of all heads, whoever reads them.
  const Output single = sharded.Run(*two.attention, Together(1));
  const Output three = sharded.Run(*two.attention, Together(3));
  EXPECT_EQ(three.report.local_bytes + three.report.remote_bytes,
            single.report.local_bytes + single.report.remote_bytes);
  EXPECT_EQ(three.report.threadgroups * 3, single.report.threadgroups);
}

TEST_P(HeadsTest, HomesAreCountedForAllHeads) {
  AttentionCase c(Mixed(GetParam()));
  c.SpreadOverNodes(2);
  const Engine two = MakeNodes(2);
  const Output single = c.Run(*two.attention, Together(1));
  for (const OwnerPattern owner : kOwnerPatterns) {
    const Output all = c.Run(*two.attention, Together(kHeads, owner));
    ExpectSameBits(single, all, OwnerPatternName(owner));
    EXPECT_EQ(all.report.local_bytes + all.report.remote_bytes,
              single.report.local_bytes + single.report.remote_bytes);
    EXPECT_EQ(all.report.home_threadgroups + all.report.stolen_threadgroups,
              all.report.threadgroups - all.report.surplus_threadgroups);
  }
}

INSTANTIATE_TEST_SUITE_P(KvTypes, HeadsTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         DTypeParam);

// --- when a plan takes several -----------------------------------------------

struct Seq {
  int32_t q_len;
  int32_t kv_len;
};

// What MakePlan decides for kernels that gain from `together` heads.
std::unique_ptr<AttentionPlan::Impl> Planned(const std::vector<Seq>& seqs,
                                             int kv_heads, int workers,
                                             const PlanOptions& options = {}) {
  std::vector<int32_t> cu_seqlens_q = {0};
  std::vector<int32_t> seq_lens;
  for (const Seq& seq : seqs) {
    cu_seqlens_q.push_back(cu_seqlens_q.back() + seq.q_len);
    seq_lens.push_back(seq.kv_len);
  }
  constexpr int64_t kStride = 40000 / 16;
  const std::vector<int32_t> tables(seqs.size() * kStride, 0);
  KvView view;
  view.num_blocks = 1;
  view.layout = {
      .dtype = DType::kBF16, .num_layers = 1, .num_kv_heads = kv_heads};
  AttentionShape shape;
  shape.num_q_heads = 4 * kv_heads;
  auto plan = std::make_unique<AttentionPlan::Impl>();
  EXPECT_TRUE(IsOk(MakePlan({cu_seqlens_q, seq_lens, tables, kStride}, shape,
                            view, options, workers, plan.get())));
  return plan;
}

int HeadsOf(const std::vector<Seq>& seqs, int kv_heads, int workers,
            const PlanOptions& options = {}) {
  return Planned(seqs, kv_heads, workers, options)->heads_together;
}

TEST(HeadsPlanTest, DecodeTakesUpToEight) {
  const std::vector<Seq> decode(64, {1, 2048});
  EXPECT_EQ(HeadsOf(decode, 8, 2), 8);
  EXPECT_EQ(HeadsOf(decode, 4, 2), 4);
  EXPECT_EQ(HeadsOf(decode, 1, 2), 1);
  EXPECT_EQ(HeadsOf(decode, 32, 2), 8);
  EXPECT_EQ(HeadsOf(decode, 12, 2), 6) << "a divisor";
  EXPECT_EQ(HeadsOf(decode, 7, 2), 7);
  EXPECT_EQ(HeadsOf(decode, 11, 2), 1) << "none but 11 divides";
  EXPECT_EQ(HeadsOf(std::vector<Seq>(64, {5, 2048}), 8, 2), 8) << "drafts";
}

TEST(HeadsPlanTest, EveryWorkerKeepsEnoughThreadgroups) {
  std::vector<Seq> ragged;
  for (int i = 0; i < 64; ++i) ragged.push_back({1, 1000 + 13 * i});
  EXPECT_EQ(HeadsOf(ragged, 8, 2), 8);
  EXPECT_EQ(
      HeadsOf(ragged, 8, 32, {OwnerPattern::kSearch, PartitionMode::kWalk}), 1);
  ragged.resize(20);
  EXPECT_EQ(HeadsOf(ragged, 8, 2), 8);
  EXPECT_EQ(HeadsOf(ragged, 8, 4), 4);
  // Equal ones that deal out evenly need no reserve.
  EXPECT_EQ(HeadsOf(std::vector<Seq>(8, {1, 700}), 4, 2), 4);
  EXPECT_EQ(HeadsOf(std::vector<Seq>(8, {1, 700}), 4, 8), 4);
  EXPECT_EQ(HeadsOf(std::vector<Seq>(9, {1, 700}), 4, 2), 2);
  // One worker waits for nobody.
  EXPECT_EQ(HeadsOf({{1, 700}}, 4, 1), 4);
}

// Spread, a threadgroup is one partition of its heads.
TEST(HeadsPlanTest, SpreadPartitionsGoTogetherToo) {
  const auto plan = Planned({{1, 32768}}, 4, 2);
  EXPECT_TRUE(plan->spread_blocks > 0);
  EXPECT_EQ(plan->heads_together, 4);
  EXPECT_EQ(plan->num_partitions, 32);
}

// Where walking would have to tear the heads of a block apart.
TEST(HeadsPlanTest, PartitionsAreSpreadForTheSakeOfHeads) {
  const auto spreads = [](const std::vector<Seq>& seqs, int kv_heads,
                          const PlanOptions& options = {}) {
    const auto plan = Planned(seqs, kv_heads, 2, options);
    return plan->spread_blocks == plan->num_query_blocks;
  };
  // Two threadgroups of four heads would deal out evenly.
  EXPECT_TRUE(spreads({{1, 32768}}, 8));
  EXPECT_EQ(HeadsOf({{1, 32768}}, 8, 2), 8);
  EXPECT_TRUE(spreads(std::vector<Seq>(9, {1, 8192}), 4));
  EXPECT_TRUE(spreads(std::vector<Seq>(9, {5, 8192}), 4)) << "drafts";
  EXPECT_TRUE(
      spreads({{1, 9000}, {1, 9000}, {1, 7000}, {1, 4000}, {1, 8000}}, 4));
  // All heads at once deal out evenly, or each threadgroup is small.
  EXPECT_FALSE(spreads(std::vector<Seq>(8, {1, 8192}), 4));
  EXPECT_FALSE(spreads(std::vector<Seq>(65, {1, 2048}), 4));
  // Two partitions a sequence are no finer than two heads.
  EXPECT_FALSE(spreads(std::vector<Seq>(5, {1, 2048}), 4));
  // Somebody wants it so, or the rows of a chunk would be many states.
  EXPECT_FALSE(spreads(std::vector<Seq>(9, {1, 8192}), 4, Together(4)));
  EXPECT_FALSE(spreads(std::vector<Seq>(9, {1, 8192}), 4,
                       {OwnerPattern::kSearch, PartitionMode::kWalk}));
  std::vector<Seq> mixed(9, {1, 8192});
  mixed.push_back({512, 1024});
  EXPECT_FALSE(spreads(mixed, 4));
}

TEST(HeadsPlanTest, ManyRowsTakeOne) {
  EXPECT_EQ(HeadsOf(std::vector<Seq>(8, {512, 512}), 4, 2), 1);
  // What reads most K/V decides.
  std::vector<Seq> mixed(32, {1, 512});
  for (int i = 0; i < 4; ++i) mixed.push_back({512, 512});
  EXPECT_EQ(HeadsOf(mixed, 4, 2), 4);
  mixed.resize(2);
  mixed.push_back({2048, 8192});
  EXPECT_EQ(HeadsOf(mixed, 4, 2), 1);
}

TEST(HeadsPlanTest, WhatIsAskedForIsTaken) {
  const std::vector<Seq> prefill = {{512, 512}};
  EXPECT_EQ(HeadsOf(prefill, 8, 2, Together(8)), 8);
  EXPECT_EQ(HeadsOf(prefill, 8, 2, Together(7)), 4);
  EXPECT_EQ(HeadsOf(prefill, 8, 2, Together(100)), 8);
  const std::vector<Seq> decode(64, {1, 2048});
  EXPECT_EQ(HeadsOf(decode, 8, 2, Together(1)), 1);
}

TEST(HeadsPlanTest, ANegativeNumberIsRefused) {
  const std::vector<int32_t> cu_seqlens_q = {0, 1};
  const std::vector<int32_t> seq_lens = {1};
  const std::vector<int32_t> table = {0};
  KvView view;
  view.num_blocks = 1;
  view.layout = {.dtype = DType::kBF16, .num_layers = 1, .num_kv_heads = 1};
  AttentionShape shape;
  shape.num_q_heads = 1;
  AttentionPlan::Impl plan;
  const Status status = MakePlan({cu_seqlens_q, seq_lens, table, 1}, shape,
                                 view, Together(-1), 2, &plan);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "kv_heads_per_threadgroup = -1, must not be negative");
}

TEST(HeadsPlanTest, ThePlanSaysSo) {
  const Engine engine = MakeEngine(2);
  CaseSpec spec;
  spec.kv_heads = 4;
  spec.q_heads = 8;
  spec.seqs = {{1, 40}, {1, 50}};
  const AttentionCase c(spec);
  AttentionPlan plan;
  VARLANE_ASSERT_OK(engine.attention->Plan(c.batch(), c.shape(), c.view(),
                                           Together(2), &plan));
  EXPECT_NE(plan.ToString().find("grid: 2 groups of 2 KV heads x 2 query "),
            std::string::npos)
      << plan.ToString();
  EXPECT_EQ(plan.num_threadgroups(), 4);
  EXPECT_EQ(plan.kv_heads_per_threadgroup(), 2);
}

}  // namespace
}  // namespace varlane::testing
