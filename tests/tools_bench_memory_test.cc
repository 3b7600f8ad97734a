// `varlane bench memory`: its rows are all there, and what they say is
// consistent. How fast anything is is not a test's business.
//
// SPDX-License-Identifier: Apache-2.0

#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/cli.h"

namespace varlane::tools {
namespace {

using TestJson = nlohmann::json;

class BenchMemoryTest : public testing::CliTest {
 protected:
  // With little time and memory.
  TestJson BenchMemory(const std::string& filter) const {
    const std::string json = JsonOf(
        "bench memory --quick --seconds 0.000001 --memory 128M --filter '" +
        filter + "'");
    return TestJson::parse(json, nullptr, false);
  }
};

struct Wanted {
  const char* name;
  const char* unit;
  bool has_limit;
};
constexpr Wanted kRows[] = {
    {"take and give back 1 block, 1 thread", "ns/block", false},
    {"take and give back 1 block, 2 threads", "ns/block", true},
    {"take and give back 1 block, 4 threads", "ns/block", true},
    {"take and give back 1 block, 8 threads", "ns/block", true},
    {"take and give back 64 blocks at once, 1 thread", "ns/block", false},
    {"take and give back 64 blocks at once, 8 threads", "ns/block", true},
    {"fork of 4096 blocks", "us", true},
    {"fork of 4096 blocks, a block", "ns/block", true},
    {"prefix lookup", "ns/block", true},
    {"prefix match and free", "ns/block", true},
    {"commit of computed tokens", "ns/block", false},
    {"pool returns memory", "GiB/s", true},
    {"pool regains memory", "GiB/s", true},
    {"shrink by a free slab", "us", false},
    {"shrink that moves half of the pool", "ms", true},
    {"longest append while the pool shrinks and grows", "us", true},
    {"wakeups of the idle monitor", "1/s", false},
    {"one measurement of all limits", "us", false}};

TEST_F(BenchMemoryTest, EveryFigureIsARow) {
  const TestJson json = BenchMemory("");
  ASSERT_TRUE(json.contains("machine") && json.contains("rows"));
  for (const Wanted& wanted : kRows) {
    SCOPED_TRACE(wanted.name);
    const TestJson* found = nullptr;
    for (const TestJson& row : json["rows"]) {
      if (row["name"] == wanted.name) found = &row;
    }
    ASSERT_NE(found, nullptr);
    ASSERT_TRUE((*found)["value"].is_number())
        << (*found).value("reason", "no reason");
    EXPECT_GE((*found)["value"].get<double>(), 0);
    EXPECT_EQ((*found)["unit"], wanted.unit);
    EXPECT_EQ((*found)["limit"].is_number(), wanted.has_limit);
    EXPECT_EQ((*found)["must"].is_number(), (*found)["holds"].is_boolean());
  }
}

TEST_F(BenchMemoryTest, ThreadsMustNotConvoy) {
  const TestJson json = BenchMemory("^take.*8 threads");
  ASSERT_EQ(json["rows"].size(), 2u);
  for (const TestJson& row : json["rows"]) {
    EXPECT_EQ(row["must"], 1.0);
    EXPECT_EQ(row["sense"], "ratio >= must");
    EXPECT_TRUE(row["ratio"].is_number());
  }
}

}  // namespace
}  // namespace varlane::tools
