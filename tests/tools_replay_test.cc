// `varlane replay`: traces are served to their end and every row is right.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/cli.h"
#include "tests/testing/files.h"

namespace varlane::tools {
namespace {

using testing::Outcome;
using testing::ReadWholeFile;
using Json = nlohmann::json;

using ReplayTest = testing::CliTest;

constexpr const char* kSmallModel =
    " --model Qwen3-0.6B --layers 1 --q-heads 4 --kv-heads 2 --head-size 32";

TEST_F(ReplayTest, TheDemoTraceIsServedAndEveryRowVerified) {
  const Outcome outcome = Varlane(
      std::string("replay --demo --requests 12 --verify 1 --token-budget 128 "
                  "--json ") +
      Path("r.json") + kSmallModel);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");  // no progress bar where there is no terminal
  EXPECT_NE(outcome.out.find("all right"), std::string::npos) << outcome.out;
  const Json json = Json::parse(ReadWholeFile(Path("r.json")));
  EXPECT_EQ(json["steps"]["finished"], 12);
  EXPECT_EQ(json["steps"]["generated_tokens"], json["setup"]["output_tokens"]);
  EXPECT_EQ(json["verification"]["failed_rows"], 0);
  // Every token that was fed, times four heads and one layer.
  EXPECT_EQ(json["verification"]["rows"].get<int64_t>(),
            4 * (json["steps"]["prefill_tokens"].get<int64_t>() +
                 json["steps"]["decode_tokens"].get<int64_t>()));
  EXPECT_GT(json["steps"]["mixed"].get<int64_t>(), 0);
}

TEST_F(ReplayTest, ATraceIsServedOverShardedHeadsAndEveryRowVerified) {
  FindTwoNodes();
  const Outcome outcome = Varlane(
      std::string("replay --demo --requests 12 --verify 1 --token-budget 128 "
                  "--shard-heads --json -") +
      kSmallModel);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_GT(json["verification"]["rows"].get<int64_t>(), 1000);
  EXPECT_EQ(json["verification"]["failed_rows"], 0);
  EXPECT_EQ(json["pool"]["head_shards"], 2);
}

// Eight requests start with two blocks each and would end with eight: a pool of
// twenty must send some back.
TEST_F(ReplayTest, AStarvedPoolPreemptsAndStillServesEverythingRight) {
  std::string trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  for (int i = 0; i < 8; ++i) trace += "2024-01-01 00:00:00,20,100\n";
  trace += "2024-01-01 00:00:00,400,1\n";  // 26 blocks: can never run
  const std::string path = Write("starved.csv", trace);
  const Outcome outcome = Varlane(
      "replay " + path + " --verify 0.2 --kv-blocks 20 --json -" + kSmallModel);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_GT(json["steps"]["preemptions"].get<int64_t>(), 0);
  EXPECT_GT(json["steps"]["recomputed_tokens"].get<int64_t>(), 0);
  EXPECT_EQ(json["steps"]["finished"], 8);
  EXPECT_EQ(json["steps"]["never_fit"], 1);
  EXPECT_EQ(json["steps"]["generated_tokens"], 800);
  EXPECT_EQ(json["verification"]["failed_rows"], 0);
  EXPECT_GT(json["verification"]["rows"].get<int64_t>(), 0);
}

TEST_F(ReplayTest, ReplaySkipsSharedPrefixesUnlessToldNotTo) {
  const std::string path = Path("shared.jsonl");
  ASSERT_EQ(Varlane("trace --format mooncake --requests 24 --input-median 900 "
                    "--shared-share 1 --system-prompts 2 --out " +
                    path)
                .exit_code,
            0);
  int64_t generated[2];
  for (const bool on : {false, true}) {
    const Outcome outcome = Varlane(
        "replay " + path + " --scale-lengths 1/16 --concurrency 4 --verify 1" +
        (on ? "" : " --no-prefix-cache") + kSmallModel + " --json -");
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Json json = Json::parse(outcome.out);
    EXPECT_EQ(json["prefix_cache"]["enabled"], on);
    EXPECT_EQ(json["prefix_cache"]["cached_tokens"].get<int64_t>() > 0, on);
    EXPECT_EQ(json["prefix_cache"]["hit_rate"].get<double>() > 0.1, on);
    EXPECT_EQ(json["verification"]["failed_rows"], 0);
    generated[on] = json["steps"]["generated_tokens"].get<int64_t>();
  }
  EXPECT_EQ(generated[0], generated[1]);
}

TEST_F(ReplayTest, WrittenTracesReplayInBothFormatsAndLoops) {
  for (const std::string format : {"azure", "mooncake"}) {
    const std::string path = Path(format);
    ASSERT_EQ(Varlane("trace --requests 6 --rate 50 --input-median 600 --seed "
                      "3 --format " +
                      format + " --out " + path)
                  .exit_code,
              0);
    for (const std::string loop : {"--rate 2", "--concurrency 2"}) {
      const Outcome outcome =
          Varlane("replay " + path + " --scale-lengths 1/16 --verify 0.3 " +
                  loop + kSmallModel + " --json -");
      ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
      const Json json = Json::parse(outcome.out);
      EXPECT_EQ(json["steps"]["finished"], 6) << format << loop;
      EXPECT_EQ(json["setup"]["loop"], loop == "--rate 2" ? "open" : "closed");
      EXPECT_GT(json["verification"]["rows"].get<int64_t>(), 0);
    }
  }
}

}  // namespace
}  // namespace varlane::tools
