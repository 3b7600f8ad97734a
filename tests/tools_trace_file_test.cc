// Proves that `--trace` writes what Chrome and Perfetto read, and the truth:
// the slices are the launch's threadgroups, on tracks where nothing overlaps.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/trace_file.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/cli.h"
#include "tests/testing/files.h"
#include "tests/testing/testing.h"

namespace varlane::tools {
namespace {

using Json = nlohmann::json;

class TraceFileTest : public testing::CliTest {
 protected:
  Json ReadJson(const std::string& name) const {
    return Json::parse(testing::ReadWholeFile(Path(name)), nullptr, false);
  }
};

// What the trace format asks of every event, and tracks that make sense.
void ExpectValid(const Json& trace) {
  ASSERT_TRUE(trace.is_object());
  ASSERT_TRUE(trace["traceEvents"].is_array());
  struct Span {
    int64_t begin_ns;
    int64_t end_ns;
  };
  std::map<int, std::vector<Span>> tracks;
  std::set<int> named;
  for (const Json& event : trace["traceEvents"]) {
    const std::string phase = event.at("ph");
    EXPECT_TRUE(event.at("name").is_string());
    EXPECT_EQ(event.at("pid"), 1);
    if (phase == "M") {
      if (event["name"] == "thread_name")
        named.insert(event.at("tid").get<int>());
      continue;
    }
    EXPECT_GE(event.at("ts").get<double>(), 0);
    if (phase == "C") {
      EXPECT_TRUE(event.at("args").at("value").is_number());
      continue;
    }
    ASSERT_EQ(phase, "X");
    EXPECT_GE(event.at("dur").get<double>(), 0);
    const auto begin = std::llround(event["ts"].get<double>() * 1000);
    tracks[event.at("tid")].push_back(
        {begin, begin + std::llround(event["dur"].get<double>() * 1000)});
  }
  for (auto& [track, spans] : tracks) {
    EXPECT_TRUE(named.contains(track)) << track;
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
      return std::pair(a.begin_ns, -a.end_ns) <
             std::pair(b.begin_ns, -b.end_ns);
    });
    std::vector<int64_t> open;  // ends of the slices around
    for (const Span& span : spans) {
      while (!open.empty() && open.back() <= span.begin_ns) open.pop_back();
      if (!open.empty()) {
        EXPECT_LE(span.end_ns, open.back()) << "slices cross on " << track;
      }
      open.push_back(span.end_ns);
    }
  }
}

std::vector<Json> EventsOf(const Json& trace, const char* category,
                           const char* name) {
  std::vector<Json> events;
  for (const Json& event : trace["traceEvents"]) {
    if (event.value("cat", "") == category && event["name"] == name) {
      events.push_back(event);
    }
  }
  return events;
}

TEST_F(TraceFileTest, AttendsSlicesAreTheLaunchsThreadgroups) {
  ASSERT_EQ(Varlane("attend --random 3x1@700,1x20@90,1x5@2 --threads 2 "
                    "--partitions walk --trace " +
                    Path("t.json") + " --json " + Path("r.json"))
                .exit_code,
            0);
  const Json trace = ReadJson("t.json");
  ExpectValid(trace);
  const Json report = ReadJson("r.json")["launch"];
  const std::vector<Json> launches = EventsOf(trace, "launch", "attention");
  ASSERT_EQ(launches.size(), 1u);
  const Json& args = launches[0]["args"];
  EXPECT_EQ(args["threadgroups"], report["threadgroups"]);
  EXPECT_EQ(args["surplus"], report["surplus_threadgroups"]);
  const std::vector<Json> slices = EventsOf(trace, "threadgroup", "attention");
  EXPECT_EQ(slices.size(), report["threadgroups"].get<size_t>() -
                               report["surplus_threadgroups"].get<size_t>());
  std::set<int> sequences;
  std::set<int> heads;
  std::set<int64_t> indices;
  int64_t bytes = 0;
  for (const Json& slice : slices) {
    const Json& says = slice["args"];
    sequences.insert(says["sequence"].get<int>());
    heads.insert(says["head"].get<int>());
    indices.insert(says["threadgroup"].get<int64_t>());
    EXPECT_EQ(says["partition_begin"], 0);
    bytes += says["bytes"].get<int64_t>();
  }
  EXPECT_EQ(sequences, (std::set<int>{0, 1, 2, 3, 4}));
  EXPECT_EQ(heads, (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(indices.size(), slices.size()) << "each once";
  EXPECT_EQ(args["bytes"], bytes);
  // A sequence of several query blocks is read by each of them.
  EXPECT_GE(bytes, report["kv_bytes"].get<int64_t>());
  EXPECT_FALSE(EventsOf(trace, "threadgroup", "write_kv").empty());
}

TEST_F(TraceFileTest, ReplayCountsThePoolsUse) {
  ASSERT_EQ(Varlane("replay --demo --requests 3 --layers 1 --verify 0 "
                    "--scale-lengths 1/16 --threads 2 --trace " +
                    Path("t.json"))
                .exit_code,
            0);
  const Json trace = ReadJson("t.json");
  ExpectValid(trace);
  EXPECT_FALSE(EventsOf(trace, "threadgroup", "attention").empty());
  EXPECT_FALSE(EventsOf(trace, "counter", "read GB/s").empty());
  double most = 0;
  for (const Json& event : EventsOf(trace, "counter", "KV pool use, %")) {
    most = std::max(most, event["args"]["value"].get<double>());
    EXPECT_LE(event["args"]["value"].get<double>(), 100);
  }
  EXPECT_GT(most, 0);
}

TEST_F(TraceFileTest, AFileThatCannotBeWrittenIsSaidFirst) {
  EXPECT_NE(
      Varlane("attend --random 1x1@8 --trace /no/such/dir/t.json").exit_code,
      0);
  Result<std::unique_ptr<Runtime>> runtime = Runtime::Create({});
  VARLANE_ASSERT_OK(runtime);
  EXPECT_EQ(
      TraceFile::Start("/no/such/dir/t", runtime->get()).status().message(),
      "/no/such/dir/t cannot be written");
  const auto none = TraceFile::Start("", runtime->get());
  VARLANE_ASSERT_OK(none);
  EXPECT_EQ((*none)->tracer(), nullptr);
  VARLANE_EXPECT_OK((*none)->Finish());
}

}  // namespace
}  // namespace varlane::tools
