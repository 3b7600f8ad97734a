// Prefixes in traces: what `trace --prefix-hits` counts, and that a replay
// skips what it finds and is right all the same.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/prefix_lru.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "tools/prefix_hits.h"
#include "tools/replay.h"

namespace varlane::tools {
namespace {

using testing::HashIds;
using testing::kOracleCapacities;
using testing::NaivePrefixLru;
using testing::PrefixOracle;

Runtime* SharedRuntime() {
  static const std::unique_ptr<Runtime> runtime = [] {
    RuntimeOptions options;
    options.num_threads = 2;
    options.pin = false;
    return testing::MakeRuntime(options);
  }();
  return runtime.get();
}

Trace MakeTrace(const std::vector<HashIds>& prompts, int64_t output_tokens) {
  Trace trace;
  trace.source = "made here";
  trace.format = TraceFormat::kMooncakeJsonl;
  for (const HashIds& ids : prompts) {
    TraceRequest& request = trace.requests.emplace_back();
    request.input_tokens = std::ssize(ids) * kHashBlockTokens;
    request.output_tokens = output_tokens;
    request.hash_ids = ids;
  }
  return trace;
}

// --- hit rates ---------------------------------------------------------------

// Request by request, not only in the end.
Result<PrefixHits> ExpectNaiveHits(const Trace& trace, int64_t capacity) {
  NaivePrefixLru lru(capacity);
  int64_t expected = 0;
  size_t next = 0;
  return MeasurePrefixHits(
      trace, capacity, SharedRuntime(), [&](const PrefixHits& hits) {
        expected += lru.Request(trace.requests[next++].hash_ids);
        EXPECT_EQ(hits.hit_blocks, expected) << "request " << next - 1;
      });
}

TEST(PrefixHitsTest, EqualTheSimplestLruOnConversations) {
  const Trace trace = MakeTrace(testing::MakeConversations(3000, 17), 1);
  int64_t last = -1;
  for (const int64_t capacity :
       {int64_t{90}, int64_t{200}, int64_t{600}, DistinctHashIds(trace)}) {
    const Result<PrefixHits> hits = ExpectNaiveHits(trace, capacity);
    VARLANE_ASSERT_OK(hits);
    EXPECT_GT(hits->hit_blocks, last);
    EXPECT_EQ(hits->evicted_blocks == 0, capacity > 600);
    EXPECT_EQ(hits->too_large_requests, 0);
    last = hits->hit_blocks;
  }
}

TEST(PrefixHitsTest, SmallTracesByHand) {
  const Trace trace = MakeTrace({{1, 2, 3}, {1, 2, 4}, {1, 2, 3}, {9}}, 1);
  const Result<PrefixHits> all = MeasurePrefixHits(trace, 5, SharedRuntime());
  VARLANE_ASSERT_OK(all);
  EXPECT_EQ(all->blocks, 10);
  EXPECT_EQ(all->hit_blocks, 0 + 2 + 3 + 0);
  EXPECT_EQ(all->evicted_blocks, 0);
  // 3 goes for 4, 4 for 3.
  const Result<PrefixHits> three = MeasurePrefixHits(trace, 3, SharedRuntime());
  VARLANE_ASSERT_OK(three);
  EXPECT_EQ(three->hit_blocks, 0 + 2 + 2 + 0);
  EXPECT_EQ(three->evicted_blocks, 3);
  const Result<PrefixHits> two = MeasurePrefixHits(trace, 2, SharedRuntime());
  VARLANE_ASSERT_OK(two);
  EXPECT_EQ(two->too_large_requests, 3);
  EXPECT_EQ(two->hit_blocks, 0);
}

TEST(PrefixHitsTest, ATraceWithoutHashIdsIsRefused) {
  const Trace trace = MakeTrace({{}, {}}, 1);
  EXPECT_EQ(MeasurePrefixHits(trace, 5, SharedRuntime()).status().ToString(),
            "INVALID_ARGUMENT: made here has no hash_ids: only Mooncake's "
            "format has");
}

class PrefixHitsOracleTest : public ::testing::TestWithParam<PrefixOracle> {};

TEST_P(PrefixHitsOracleTest, HitRateOfAPublicTrace) {
  const std::string path =
      std::string(VARLANE_SOURCE_DIR) + "/../shared/traces/" + GetParam().file;
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there (docs/prefix_cache.md)";
  }
  const Result<Trace> trace = ReadTrace(path, 0);
  VARLANE_ASSERT_OK(trace);
  for (size_t i = 0; i < kOracleCapacities.size(); ++i) {
    const Result<PrefixHits> hits =
        MeasurePrefixHits(*trace, kOracleCapacities[i], SharedRuntime());
    VARLANE_ASSERT_OK(hits);
    EXPECT_EQ(testing::Percent(hits->hit_blocks, hits->blocks),
              GetParam().percent[i])
        << kOracleCapacities[i] << " blocks";
  }
}

INSTANTIATE_TEST_SUITE_P(Mooncake, PrefixHitsOracleTest,
                         ::testing::ValuesIn(testing::kPrefixOracles),
                         [](const auto& oracle) {
                           return std::string(oracle.index == 0 ? "conversation"
                                                                : "synthetic");
                         });

// --- replay ------------------------------------------------------------------

TEST(WorkloadTest, TokenIdsAreEqualWhereTokensAre) {
  const Trace trace = MakeTrace({{7, 8, 9}, {7, 8, 5}, {}, {}}, 20);
  Trace with_plain = trace;
  with_plain.requests[2].input_tokens = 40;
  with_plain.requests[3].input_tokens = 40;
  const Result<Workload> workload = Workload::Create(with_plain, 1.0 / 32);
  VARLANE_ASSERT_OK(workload);
  int64_t equal = 0;
  for (int64_t a = 0; a < workload->size(); ++a) {
    for (int64_t b = 0; b < workload->size(); ++b) {
      for (int64_t position = 0; position < 60; ++position) {
        const bool same = workload->TokenAt(a, position).stream ==
                          workload->TokenAt(b, position).stream;
        ASSERT_EQ(workload->TokenIdAt(a, position) ==
                      workload->TokenIdAt(b, position),
                  same)
            << a << " " << b << " " << position;
        equal += same && a != b;
      }
    }
  }
  EXPECT_EQ(equal, 2 * 32);  // two hash_ids of 16 tokens, both ways
  const std::vector<int32_t> prompt = workload->Prompt(1);
  ASSERT_EQ(std::ssize(prompt), 48);
  EXPECT_EQ(prompt[47], workload->TokenIdAt(1, 47));
}

ReplayOptions SmallReplay(int64_t kv_blocks) {
  ReplayOptions options;
  options.model = {.name = "small",
                   .num_layers = 2,
                   .num_q_heads = 4,
                   .num_kv_heads = 2,
                   .head_size = 32};
  options.kv_blocks = kv_blocks;
  options.concurrency = 4;
  options.scheduler.token_budget = 64;
  options.verify_share = 1;
  return options;
}

void Replay(const ReplayOptions& options, const Workload& workload,
            ReplayResult* to) {
  Result<ReplayResult> result = RunReplay(options, workload, SharedRuntime());
  VARLANE_ASSERT_OK(result);
  *to = *std::move(result);
}

// hash_ids of 16 tokens: one block each.
Result<Workload> Conversations(int num_prompts) {
  std::vector<HashIds> prompts = testing::MakeConversations(num_prompts, 23);
  for (HashIds& ids : prompts) ids.resize(std::min<size_t>(ids.size(), 12));
  return Workload::Create(MakeTrace(prompts, 160), 1.0 / 32);
}

TEST(ReplayPrefixTest, WhatIsFoundIsNotComputedAndAllIsRight) {
  const Result<Workload> workload = Conversations(40);
  VARLANE_ASSERT_OK(workload);
  ReplayOptions options = SmallReplay(400);
  ReplayResult with;
  ReplayResult without;
  Replay(options, *workload, &with);
  options.prefix_cache = false;
  Replay(options, *workload, &without);
  for (const ReplayResult* result : {&with, &without}) {
    EXPECT_EQ(result->ended, 40);
    EXPECT_EQ(result->generated_tokens, 40 * 5);
    EXPECT_TRUE(result->verify.ok()) << result->verify.first_failure;
    // Every computed token, times heads and layers.
    EXPECT_EQ(result->verify.rows, 8 * (result->scheduler.prefill_tokens +
                                        result->scheduler.decode_tokens));
  }
  EXPECT_EQ(without.scheduler.cached_tokens, 0);
  EXPECT_EQ(without.prefixes.lookups, 0);
  EXPECT_EQ(with.scheduler.started_tokens, workload->input_tokens());
  EXPECT_GT(with.scheduler.cached_tokens, workload->input_tokens() / 4);
  EXPECT_EQ(with.scheduler.cached_tokens + with.scheduler.prefill_tokens +
                with.scheduler.decode_tokens,
            without.scheduler.prefill_tokens + without.scheduler.decode_tokens);
}

TEST(ReplayPrefixTest, APoolThatEvictsAndPreemptsIsRight) {
  const Result<Workload> workload = Conversations(40);
  VARLANE_ASSERT_OK(workload);
  ReplayOptions options = SmallReplay(18);
  options.scheduler.watermark = 0;
  ReplayResult result;
  Replay(options, *workload, &result);
  EXPECT_EQ(result.ended, 40);
  EXPECT_TRUE(result.verify.ok()) << result.verify.first_failure;
  EXPECT_GT(result.scheduler.cached_tokens, 0);
  EXPECT_GT(result.prefixes.evicted_blocks, 0);
  EXPECT_GT(result.scheduler.preemptions, 0);
}

TEST(ReplayPrefixTest, TheReportTellsHits) {
  const Result<Workload> workload = Conversations(10);
  VARLANE_ASSERT_OK(workload);
  ReplayOptions options = SmallReplay(400);
  ReplayResult result;
  Replay(options, *workload, &result);
  const Json json = ReplayJson(options, *workload, result);
  EXPECT_EQ(json["prefix_cache"]["enabled"], true);
  EXPECT_EQ(json["prefix_cache"]["cached_tokens"],
            result.scheduler.cached_tokens);
  EXPECT_GT(json["prefix_cache"]["hit_rate"].get<double>(), 0);
  EXPECT_NE(ReplayText(options, *workload, result).find("tokens to compute"),
            std::string::npos);
  options.prefix_cache = false;
  EXPECT_EQ(ReplayJson(options, *workload, result)["prefix_cache"]["enabled"],
            false);
}

}  // namespace
}  // namespace varlane::tools
