// `varlane bench kernels` and `bench runtime`: their rows are all there, and
// what they say is consistent. How fast anything is is not a test's business.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/testing/cli.h"
#include "tests/testing/testing.h"
#include "tools/bench_rows.h"

namespace varlane::tools {
namespace {

using TestJson = nlohmann::json;

class BenchTest : public testing::CliTest {
 protected:
  TestJson Bench(const std::string& arguments) const {
    return TestJson::parse(JsonOf("bench " + arguments), nullptr, false);
  }
};

const TestJson* FindRow(const TestJson& json, const std::string& name) {
  for (const TestJson& row : json["rows"]) {
    if (row["name"] == name) return &row;
  }
  return nullptr;
}

// Two rows that are measured, and nothing demanded.
void ExpectTwoShownRows(const TestJson& rows) {
  ASSERT_EQ(rows.size(), 2u);
  for (const TestJson& row : rows) {
    EXPECT_TRUE(row["must"].is_null()) << row["name"];
    EXPECT_GT(row["ratio"].get<double>(), 0) << row["name"];
  }
}

constexpr const char* kSmallRows =
    "kernels --quick --seconds 0.000001 --filter "
    "'^(decode 64x1@128|launch|surplus|AVX2 bits|mixed)'";

TEST_F(BenchTest, EveryRowHasItsFieldsAndAReasonWhereNumbersAreMissing) {
  const TestJson json = Bench(kSmallRows);
  ASSERT_TRUE(json.contains("machine") && json.contains("rows"));
  EXPECT_GT(json["machine"]["bf16_peak_gflop_per_s"].get<double>(), 0);
  ASSERT_GE(json["rows"].size(), 4u);
  std::set<std::string> names;
  for (const TestJson& row : json["rows"]) {
    const auto name = row.at("name").get<std::string>();
    EXPECT_TRUE(names.insert(name).second) << name << " is there twice";
    for (const char* field :
         {"value", "unit", "limit", "ratio", "spread", "must", "holds"}) {
      EXPECT_TRUE(row.contains(field)) << name << " " << field;
    }
    EXPECT_TRUE(row["value"].is_number() || row.contains("reason")) << name;
    if (row["value"].is_number() && row["must"].is_number()) {
      EXPECT_TRUE(row["holds"].is_boolean()) << name;
    }
  }
}

TEST_F(BenchTest, WhatMultipliesIsHeldAgainstMultipliesFedFromL1Too) {
  const TestJson json = Bench(kSmallRows);
  const TestJson* row = FindRow(json, "decode 64x1@128 bf16 16/4/128");
  ASSERT_NE(row, nullptr);
  EXPECT_NE((*row)["detail"].get<std::string>().find("fed from L1"),
            std::string::npos);
}

TEST_F(BenchTest, WhatIsHeldAgainstALimitAndMissesItSaysWhatHoldsItBack) {
  const TestJson json = Bench(kSmallRows);
  const TestJson* row = FindRow(json, "decode 64x1@128 bf16 16/4/128");
  ASSERT_NE(row, nullptr);
  EXPECT_NE((*row)["holds"].get<bool>(), row->contains("reason"));
}

TEST_F(BenchTest, DemandsAreThoseOfTheTable) {
  const TestJson json = Bench(kSmallRows);
  struct {
    const char* name;
    double must;
  } const demands[] = {{"decode 64x1@128 bf16 16/4/128", 0.75},
                       {"launch of one empty threadgroup", 3},
                       {"surplus threadgroup of 100000, bare", 15},
                       {"surplus threadgroup of 100000, search", 15},
                       {"mixed 32x1@512 + 4x512@512 bf16 16/4/128", 1.05}};
  for (const auto& demand : demands) {
    const TestJson* row = FindRow(json, demand.name);
    ASSERT_NE(row, nullptr) << demand.name;
    EXPECT_EQ((*row)["must"], demand.must) << demand.name;
  }
}

TEST_F(BenchTest, OtherBlockSizesAreShownAndNothingIsDemandedOfThem) {
  const TestJson json =
      Bench("kernels --quick --memory 1MiB --filter 'blocks of'");
  ASSERT_EQ(json["rows"].size(), 4u);
  for (const char* size : {"32", "64", "128", "256"}) {
    const TestJson* row = FindRow(
        json, std::string("decode 64x1@2048 bf16 16/4/128, blocks of ") + size);
    ASSERT_NE(row, nullptr) << size;
    EXPECT_TRUE((*row)["must"].is_null());
    EXPECT_NE((*row)["reason"].get<std::string>().find("--memory"),
              std::string::npos);
  }
}

TEST_F(BenchTest, ModifiedScoresAreHeldAgainstPlainOnesAndNothingIsDemanded) {
  const TestJson json = Bench("kernels --quick --filter '^(softcap|ALiBi)'");
  ExpectTwoShownRows(json["rows"]);
  for (const TestJson& row : json["rows"]) {
    EXPECT_EQ(row["detail"], "limit: the same without") << row["name"];
  }
}

TEST_F(BenchTest, WritesAreHeldAgainstCopiesAndNothingIsDemanded) {
  const TestJson json = Bench("kernels --quick --filter '^write of'");
  ExpectTwoShownRows(json["rows"]);
  for (const TestJson& row : json["rows"]) {
    EXPECT_NE(row["detail"].get<std::string>().find("copies"),
              std::string::npos);
  }
}

TEST_F(BenchTest, AQuickRunSaysWhichRowsItLeavesToTheFullOne) {
  const TestJson json =
      Bench("kernels --quick --filter '^(decode 1024x1@2048|prefill 30000)'");
  ASSERT_EQ(json["rows"].size(), 2u);
  for (const TestJson& row : json["rows"]) {
    EXPECT_TRUE(row["value"].is_null()) << row["name"];
    EXPECT_TRUE(row["holds"].is_null()) << row["name"];
    EXPECT_TRUE(row["must"].is_number()) << row["name"];
    EXPECT_NE(row["reason"].get<std::string>().find("--quick"),
              std::string::npos)
        << row["name"];
  }
}

TEST_F(BenchTest, TheRuntimesDemandsAreThoseOfTheTable) {
  const TestJson json = Bench(
      "runtime --quick --seconds 0.000001 --filter "
      "'^(launch|graph of 64|28.*8/1/128|tracing|idle|decode)'");
  struct {
    const char* name;
    double must;
  } const demands[] = {
      {"launch of one empty threadgroup", 3},
      {"graph of 64 empty nodes, 1 chains", 40},
      {"28 layers, 2 branches of decode 1x1@128, 8/1/128 heads", 1.15},
      {"tracing on, decode 64x1@128", 1.03},
      {"idle runtime", 0.1},
      {"decode 32x1@512 beside a busy process on one core", 0.45}};
  for (const auto& demand : demands) {
    const TestJson* row = FindRow(json, demand.name);
    ASSERT_NE(row, nullptr) << demand.name;
    EXPECT_EQ((*row)["must"], demand.must) << demand.name;
    EXPECT_TRUE((*row)["value"].is_number() || row->contains("reason"))
        << demand.name;
  }
}

TEST_F(BenchTest, AFilterThatMatchesNothingMeasuresNothing) {
  const TestJson json = Bench("kernels --quick --filter nothing_has_this_name");
  EXPECT_EQ(json["rows"].size(), 0u);
}

TEST(BenchRowsTest, JudgesByItsSense) {
  BenchRow row;
  row.must = 0.9;
  Judge(&row);
  EXPECT_FALSE(row.holds.has_value()) << "nothing was measured";
  row.ratio = 0.91;
  Judge(&row);
  EXPECT_EQ(row.holds, true);
  row.sense = Sense::kRatioAtMost;
  Judge(&row);
  EXPECT_EQ(row.holds, false);
  row.sense = Sense::kValueAtMost;
  row.value = 0.5;
  Judge(&row);
  EXPECT_EQ(row.holds, true);
}

TEST(BenchRowsTest, WhatHoldsBackIsMultipliesReadsOrLoops) {
  const BoundTimes multiplies = {.run = 20,
                                 .near = 19,
                                 .read = 8,
                                 .multiply = 12,
                                 .fed = 15,
                                 .weighed = 16};
  EXPECT_EQ(WhatHoldsBack(multiplies, 0.8),
            "multiply-adds fed from L1 reach 0.80 of the limit, with softmax "
            "and nothing else 0.75");
  BoundTimes reads = {.run = 20, .near = 15, .read = 12, .multiply = 8};
  EXPECT_EQ(WhatHoldsBack(reads, 0.8),
            "held back by reading: with K/V in the nearest cache 0.80 of the "
            "limit");
  reads.near = 16;
  EXPECT_EQ(WhatHoldsBack(reads, 0.8),
            "held back by its loops, not by reading: with K/V in the nearest "
            "cache 0.75 of the limit");
}

TEST(BenchRowsTest, ANoteIsReasonThenDetailThenDisturbance) {
  BenchRow row;
  row.reason = "why not";
  row.detail = "beside what";
  row.disturbed = 3;
  EXPECT_NE(RowsText(std::vector<BenchRow>{row})
                .find("why not; beside what; 3 rounds disturbed"),
            std::string::npos);
}

TEST(BenchRowsTest, MedianAndSpreadAreNearestRank) {
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({7}), 7);
  EXPECT_DOUBLE_EQ(RelativeSpread({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}),
                   (10.0 - 2.0) / 6.0);
}

TEST(BenchRowsTest, SamplersTakeTurns) {
  std::string order;
  const std::vector<Sampler> samplers = {
      {[&order]() -> Result<double> { return (order += 'a', 1.0); }, false},
      {[&order]() -> Result<double> { return (order += 'b', 2.0); }, false}};
  const Result<Samples> samples =
      Interleave(samplers, {.seconds = 1e-9, .min_rounds = 3, .max_rounds = 3});
  VARLANE_ASSERT_OK(samples.status());
  EXPECT_EQ(order.substr(0, 8), "abababab") << "one warm-up, three rounds";
  ASSERT_EQ(samples->of.size(), 2u);
  EXPECT_EQ(samples->of[0], std::vector<double>(samples->of[0].size(), 1.0));
  EXPECT_EQ(samples->of[1], std::vector<double>(samples->of[1].size(), 2.0));
  EXPECT_GE(samples->of[0].size(), 3u);
}

TEST(BenchRowsTest, GoesThatWarmDoNotCount) {
  char last = ' ';
  int in_a_row = 0;
  int longest = 0;
  const auto go = [&](char name) -> Result<double> {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    in_a_row = std::exchange(last, name) == name ? in_a_row + 1 : 1;
    if (name == 'a') longest = std::max(longest, in_a_row);
    return in_a_row;
  };
  const std::vector<Sampler> samplers = {
      {.go = [&go] { return go('a'); }, .warms = true},
      {.go = [&go] { return go('b'); }, .repeats = false}};
  const Result<Samples> samples =
      Interleave(samplers, {.seconds = 0.2, .min_rounds = 3, .max_rounds = 3});
  VARLANE_ASSERT_OK(samples.status());
  const double first = samples->low[0];  // of those that count
  const double warm = first - 1;
  const double counted = longest - warm;
  // 10 ms as the budget allows, and then 2; in whole goes, however long one is.
  EXPECT_GT(warm, 5 * (counted - 1));
  EXPECT_LE(warm, 5 * counted);
  EXPECT_EQ(samples->of[0],
            std::vector<double>(samples->of[0].size(), (first + longest) / 2));
  EXPECT_EQ(samples->of[1], std::vector<double>(samples->of[1].size(), 1.0));
}

TEST(BenchRowsTest, ASamplersErrorEndsTheMeasurement) {
  const std::vector<Sampler> samplers = {
      {[]() -> Result<double> { return Status(StatusCode::kAborted, "no"); }}};
  EXPECT_EQ(Interleave(samplers, {}).status().code(), StatusCode::kAborted);
}

}  // namespace
}  // namespace varlane::tools
