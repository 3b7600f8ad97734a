// `varlane bench numa`: its rows are there and consistent, on one node and on
// described ones. What they show of several is for virtual machines to say
// (tests/numa).
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/bench_numa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "tests/testing/files.h"
#include "tests/testing/testing.h"

namespace varlane::tools {
namespace {

Result<BenchNumaResult> Measure(const std::string& topology,
                                int64_t node_bytes = int64_t{8} << 20) {
  BenchNumaOptions options;
  options.quick = true;
  options.seconds = 1e-6;
  options.node_bytes = node_bytes;
  options.runtime.topology = topology;
  return BenchNuma(options);
}

const BenchRow* FindRow(const BenchNumaResult& result,
                        const std::string& name) {
  const auto row = std::find_if(
      result.rows.begin(), result.rows.end(),
      [&](const BenchRow& candidate) { return candidate.name == name; });
  return row == result.rows.end() ? nullptr : &*row;
}

TEST(BenchNumaTest, RowsHoldNumbersOrAReason) {
  const Result<BenchNumaResult> result = Measure("");
  VARLANE_ASSERT_OK(result.status());
  for (const BenchRow& row : result->rows) {
    EXPECT_TRUE(row.value.has_value() || !row.reason.empty()) << row.name;
  }
  const BenchRow* const local = FindRow(*result, "local bytes");
  ASSERT_NE(local, nullptr);
  EXPECT_EQ(local->must, 0.99);
  if (local->value) {
    EXPECT_GT(*local->limit, 7.9) << "MiB";
    EXPECT_EQ(local->holds, *local->ratio >= 0.99);
  }
  EXPECT_EQ(result->workers.front(), 1);
  EXPECT_EQ(result->workers.size(), result->scaling.size());
  EXPECT_NE(MatrixText(*result).find("workers of node 0"), std::string::npos);
  EXPECT_NE(ScalingText(*result).find("####"), std::string::npos);
  if (result->machine["arenas"] != 1) return;
  const BenchRow* const remote =
      FindRow(*result, "workers of node 0, remote memory");
  ASSERT_NE(remote, nullptr);
  EXPECT_NE(remote->reason.find("one NUMA node"), std::string::npos);
  for (const char* name : {"local bytes, heads sharded",
                           "one long sequence, heads sharded or at home",
                           "all sequences, heads sharded or at home"}) {
    const BenchRow* const row = FindRow(*result, name);
    ASSERT_NE(row, nullptr) << name;
    EXPECT_NE(row->reason.find("one NUMA node"), std::string::npos) << name;
  }
}

// A whole sequence of 2048 tokens is 4 MiB.
TEST(BenchNumaTest, NoMoreMemoryIsUsedThanAskedFor) {
  for (const auto& [asked, used] :
       {std::pair{5 << 20, 4 << 20}, std::pair{1 << 18, 1 << 18}}) {
    const Result<BenchNumaResult> result = Measure("", asked);
    VARLANE_ASSERT_OK(result.status());
    EXPECT_EQ(result->machine["bytes_a_node"], used) << asked;
  }
}

TEST(BenchNumaTest, ShardedHeadsAreMeasuredOrCannotBeCut) {
  for (const int nodes : {2, 3}) {
    const Result<BenchNumaResult> result =
        Measure("numa:" + std::to_string(nodes) + " core:1 pu:1");
    VARLANE_ASSERT_OK(result.status());
    for (const char* name : {"one long sequence, heads sharded or at home",
                             "all sequences, heads sharded or at home"}) {
      const BenchRow* const row = FindRow(*result, name);
      ASSERT_NE(row, nullptr) << name;
      EXPECT_EQ(row->value.has_value(), nodes == 2) << name;
      if (nodes == 2) {
        EXPECT_EQ(row->detail.rfind("K/V read on its node: ", 0), 0u);
      } else {
        EXPECT_EQ(row->reason, "4 KV heads cannot be cut into 3 equal shards");
      }
    }
  }
}

TEST(BenchNumaTest, DescribedNodesHaveEveryPairAndNoPlacement) {
  const Result<BenchNumaResult> result = Measure("numa:2 core:1 pu:1");
  VARLANE_ASSERT_OK(result.status());
  ASSERT_EQ(result->matrix.size(), 2u);
  EXPECT_EQ(result->matrix[0].size(), 3u) << "two nodes, and both in turn";
  for (const char* name : {"workers of node 0, its own memory",
                           "workers of node 1, memory of node 0",
                           "workers of node 1, memory of all in turn"}) {
    EXPECT_NE(FindRow(*result, name), nullptr) << name;
  }
  const BenchRow* const local = FindRow(*result, "local bytes");
  ASSERT_NE(local, nullptr);
  EXPECT_FALSE(local->value.has_value());
  EXPECT_FALSE(local->holds.has_value());
  EXPECT_NE(local->reason.find("unknown"), std::string::npos);
  const BenchRow* const share =
      FindRow(*result, "K/V read on its node, homes followed or not");
  ASSERT_NE(share, nullptr);
  EXPECT_GT(*share->value, 0);
  EXPECT_LE(*share->value, 1);
}

TEST(BenchNumaTest, APlotIsDrawnOrItsScriptKept) {
  BenchNumaResult result;
  result.machine = {{"nodes", {{{"os_index", 0}}, {{"os_index", 3}}}}};
  result.matrix = {{3e9, 1e9, 2e9}, {1e9, 3e9, 2e9}};
  result.workers = {1, 2};
  result.scaling = {3e9, 5e9};
  EXPECT_EQ(PlotNuma(result, "plot.txt").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PlotNuma(result, "it's.svg").code(), StatusCode::kInvalidArgument);
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("plot.svg");
  const Status drawn = PlotNuma(result, path);
  if (drawn.ok()) {
    const std::string plot = testing::ReadWholeFile(path);
    EXPECT_NE(plot.substr(0, plot.find('\n')).find("<?xml"), std::string::npos);
    return;
  }
  EXPECT_EQ(drawn.code(), StatusCode::kUnavailable);
  const std::string script = testing::ReadWholeFile(path + ".gp");
  EXPECT_NE(script.find("2 5.0000\ne\n"), std::string::npos) << script;
  EXPECT_NE(script.find("\"3 from 0\" 1.0000\n"), std::string::npos) << script;
}

}  // namespace
}  // namespace varlane::tools
