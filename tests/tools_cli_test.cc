// The `varlane` command: its help, its refusals, and what info, plan and trace
// say.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/cli.h"
#include "tests/testing/files.h"

namespace varlane::tools {
namespace {

using testing::CliTest;
using testing::Outcome;
using testing::ReadWholeFile;
using Json = nlohmann::json;

// --- help and usage ----------------------------------------------------------

struct Help {
  const char* command;
  std::vector<std::string> options;
};

TEST_F(CliTest, HelpOfEachCommandListsItsOptionsWithExamples) {
  const Help helps[] = {
      {"info", {"--json", "--threads"}},
      {"plan",
       {"--json", "--model", "--kv-dtype", "--weights", "--policy",
        "--fraction", "--layers", "--kv-heads", "--head-size"}},
      {"attend",
       {"--json", "--out", "--kv-dtype", "--block-size", "--owner",
        "--partitions", "--threads", "--seed", "--repeat", "--random",
        "--trace", "--shard-heads"}},
      {"replay",
       {"--json", "--requests", "--scale-lengths", "--model", "--layers",
        "--token-budget", "--max-seqs", "--rate", "--concurrency", "--verify",
        "--demo", "--trace", "--no-prefix-cache", "--shard-heads"}},
      {"stress",
       {"--json", "--mode", "--limit", "--min-shrinks", "--swap",
        "--shard-heads"}},
      {"trace",
       {"--json", "--out", "--seed", "--requests", "--prefix-hits",
        "--capacity"}}};
  for (const Help& help : helps) {
    const Outcome outcome = Varlane(std::string(help.command) + " --help");
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_NE(outcome.out.find("Examples:\n  varlane "), std::string::npos);
    for (const std::string& option : help.options) {
      EXPECT_NE(outcome.out.find("  " + option), std::string::npos)
          << help.command << " " << option;
    }
  }
  EXPECT_NE(Varlane("--help").out.find("replay"), std::string::npos);
  EXPECT_EQ(Varlane("--version").exit_code, 0);
}

TEST_F(CliTest, AWrongCommandLineIsOneLineAndExitCodeTwo) {
  ExpectRefusal("", 2, "subcommand is required");
  ExpectRefusal("bake", 2, "\"bake\" is not a command: info, plan, attend");
  ExpectRefusal("info --bake", 2, "--bake");
  ExpectRefusal("plan --weights 3XB", 2, "\"3XB\" is not a size");
  ExpectRefusal("plan --policy greedy", 2, "\"greedy\" is not claim");
  ExpectRefusal("plan --kv-dtype f64", 2, "\"f64\" is not f32, bf16 or f16");
  ExpectRefusal("plan --fraction 0", 2, "--fraction");
  ExpectRefusal("attend", 2, "either CASE or --random");
  ExpectRefusal("attend case.st", 2, "--out FILE");
  ExpectRefusal("attend --random 32x1@", 2, "is not COUNTxQ@CONTEXT");
  ExpectRefusal("attend --random 1x1 --verify 2", 2, "\"2\" is not a share");
  ExpectRefusal("attend --random 1x1 --owner x", 2,
                "\"x\" is not search, map, planned or padded");
  ExpectRefusal("replay", 2, "either TRACE or --demo");
  ExpectRefusal("replay --demo --rate 1 --concurrency 2", 2, "excludes");
  ExpectRefusal("trace --prefix-hits x --capacity 3q", 2,
                "\"3q\" is not a number of blocks");
  ExpectRefusal("trace --prefix-hits x --capacity 3,", 2,
                "\"\" is not a number of blocks");
  ExpectRefusal("trace --prefix-hits x --capacity 0", 2, "\"0\" is not");
  ExpectRefusal("trace --capacity 3", 2, "--prefix-hits");
}

// --- refusals ----------------------------------------------------------------

TEST_F(CliTest, ABlockSizeOfSevenIsRefusedByEveryCommand) {
  const std::string message = "block_size = 7";
  ExpectRefusal("plan --model Qwen3-0.6B --block-size 7", 1, message);
  ExpectRefusal("attend --random 1x1@9 --block-size 7", 1, message);
  ExpectRefusal("replay --demo --block-size 7", 1, message);
}

// Fixture of a machine whose cgroup has room for less than one block.
TEST_F(CliTest, ACgroupSmallerThanOneBlockIsRefusedByName) {
  Write("root/proc/meminfo",
        "MemTotal: 67108864 kB\nMemFree: 33554432 kB\n"
        "MemAvailable: 50331648 kB\n");
  Write("root/proc/self/cgroup", "0::/small\n");
  Write("root/proc/self/mountinfo",
        "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n");
  Write("root/sys/fs/cgroup/small/memory.max", "1048576\n");
  Write("root/sys/fs/cgroup/small/memory.current", "0\n");
  Write("root/sys/fs/cgroup/small/memory.stat", "inactive_file 0\n");
  const std::string root = " --memory-root " + Path("root");
  ExpectRefusal("plan --model Qwen3-0.6B" + root, 1,
                "less than one block of 1.75 MiB");
  ExpectRefusal("replay --demo" + root, 1, "memory.max /small");
  const Json json = Json::parse(ReadWholeFile([&] {
    Varlane("plan --json " + Path("plan.json") + root);
    return Path("plan.json");
  }()));
  EXPECT_FALSE(json["budget"]["granted"].get<bool>());
  EXPECT_EQ(json["budget"]["blocks"], 0);
}

TEST_F(CliTest, AnUnreadableTraceIsNamedWithLineAndValue) {
  ExpectRefusal("replay /no/such.csv", 1,
                "/no/such.csv cannot be read: No such file or directory");
  const std::string bad = Write("bad.csv",
                                "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
                                "2023-11-16 18:15:46.6805900,many,44\r\n");
  ExpectRefusal("replay " + bad, 1,
                bad + ":2: column \"ContextTokens\" = \"many\"");
  const std::string binary = Write("noise", std::string("\1\2\0\3", 4));
  ExpectRefusal("replay " + binary, 1, "starts no known trace");
}

TEST_F(CliTest, UnknownNamesAreRefusedWithTheKnownOnes) {
  ExpectRefusal("plan --model GPT-5", 1, "is not one of Qwen3-0.6B, ");
  ExpectRefusal("attend --random 1x1@9 --simd SSE9", 1, "SSE9");
  ExpectRefusal("attend --random 1x1@9 --q-heads 5", 1,
                "5 heads, not a multiple of k's 4");
  ExpectRefusal("info --json /no/such/dir/x", 1, "cannot be written");
}

// --- info and plan -----------------------------------------------------------

TEST_F(CliTest, InfoTellsWhatTheRuntimeUses) {
  const Outcome outcome = Varlane("info --threads 2 --json " + Path("i.json"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const char* part : {"Topology", "page size", "kernel tables",
                           "Memory limits", "VARLANE_THREADS"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part;
  }
  const Json json = Json::parse(ReadWholeFile(Path("i.json")));
  EXPECT_EQ(json["workers"].size(), 2u);
  EXPECT_EQ(json["environment"].size(), 11u);
  EXPECT_GT(json["memory"]["total_bytes"].get<int64_t>(), 0);
}

TEST_F(CliTest, PlanComparesAllPolicies) {
  const Outcome outcome = Varlane(
      "plan --layers 2 --kv-heads 2 --head-size 64 --policy fixed --kv-tokens "
      "1000 --block-size 32 --json -");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["shape"]["token_bytes"], 2 * 2 * 2 * 64 * 2);
  EXPECT_EQ(json["budget"]["policy"], "fixed");
  EXPECT_GE(json["budget"]["tokens"].get<int64_t>(), 992);
  EXPECT_EQ(json["policies"].size(), 4u);
}

// --- trace -------------------------------------------------------------------

TEST_F(CliTest, PrefixHitsOfATrace) {
  const auto line = [](int count, const char* ids) {
    return "{\"timestamp\": 0, \"input_length\": " +
           std::to_string(512 * count) +
           ", \"output_length\": 1, \"hash_ids\": [" + ids + "]}\n";
  };
  const std::string path =
      Write("t.jsonl", line(3, "1, 2, 3") + line(3, "1, 2, 4") +
                           line(3, "1, 2, 3") + line(1, "9"));
  const Outcome outcome =
      Varlane("trace --prefix-hits " + path + " --capacity 3,1k,all --json -");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["blocks"], 10);
  EXPECT_EQ(json["distinct_blocks"], 5);
  ASSERT_EQ(json["rows"].size(), 3u);
  EXPECT_EQ(json["rows"][0]["hit_blocks"], 4);
  EXPECT_EQ(json["rows"][0]["evicted_blocks"], 3);
  EXPECT_EQ(json["rows"][1]["capacity_blocks"], 1000);
  EXPECT_EQ(json["rows"][2]["capacity_blocks"], 5);
  EXPECT_EQ(json["rows"][2]["hit_blocks"], 5);
  EXPECT_EQ(json["rows"][2]["hit_rate"], 0.5);
  const Outcome text = Varlane("trace --prefix-hits " + path);
  EXPECT_NE(text.out.find("50.00%"), std::string::npos) << text.out;
  ExpectRefusal(
      "trace --prefix-hits " + Write("a.csv",
                                     "TIMESTAMP,ContextTokens,GeneratedTokens\n"
                                     "2024-01-01 00:00:00,20,100\n"),
      1, "has no hash_ids");
}

}  // namespace
}  // namespace varlane::tools
