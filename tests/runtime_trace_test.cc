// Proves what a trace says: each threadgroup once, on its worker's track, in
// its time, and a ring that keeps the newest while others read it.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/tracing.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/graph.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

using testing::MakeRuntime;

Slice Numbered(int64_t number) {
  Slice slice;
  slice.begin = slice.end = slice.index = number;
  slice.note.sequence = slice.note.bytes = number;
  slice.worker = slice.note.head = static_cast<int32_t>(number % 1000);
  slice.note.partition_begin = slice.note.partition_end = slice.worker;
  slice.kind = SliceKind::kHost;
  slice.name = 9;
  return slice;
}

void ExpectNumbered(const Slice& slice, int64_t number) {
  const auto small = static_cast<int32_t>(number % 1000);
  ASSERT_EQ(slice.begin, number);
  ASSERT_EQ(slice.end, number);
  ASSERT_EQ(slice.index, number);
  ASSERT_EQ(slice.note.sequence, number);
  ASSERT_EQ(slice.note.bytes, number);
  ASSERT_EQ(slice.worker, small);
  ASSERT_EQ(slice.note.head, small);
  ASSERT_EQ(slice.note.partition_begin, small);
  ASSERT_EQ(slice.note.partition_end, small);
  ASSERT_EQ(slice.kind, SliceKind::kHost);
  ASSERT_EQ(slice.name, 9);
}

TEST(TraceRingTest, KeepsTheNewestInOrder) {
  TraceRing ring(10);
  for (int64_t pushed = 0; pushed <= 35; ++pushed) {
    std::vector<Slice> slices;
    ring.Read(&slices);
    const int64_t kept = std::min<int64_t>(pushed, 10);
    ASSERT_EQ(static_cast<int64_t>(slices.size()), kept);
    for (int64_t i = 0; i < kept; ++i) {
      ExpectNumbered(slices[static_cast<size_t>(i)], pushed - kept + i);
    }
    EXPECT_EQ(ring.num_pushed(), pushed);
    EXPECT_EQ(ring.num_lost(), pushed - kept);
    ring.Push(Numbered(pushed));
  }
}

TEST(TraceRingTest, AReaderNeverSeesHalfASlice) {
  constexpr int64_t kSlices = 512;
  TraceRing ring(kSlices);
  std::atomic<bool> done = false;
  int64_t written = 0;
  std::thread writer([&] {
    while (!done) ring.Push(Numbered(written++));
  });
  // Until the writer has often come by while the reader was at it.
  const auto give_up =
      std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (int overtaken = 0; overtaken < 200 && !HasFailure();) {
    if (std::chrono::steady_clock::now() > give_up) break;
    std::vector<Slice> slices;
    const int64_t before = ring.num_pushed();
    ring.Read(&slices);
    if (ring.num_pushed() - before >= kSlices / 2) ++overtaken;
    for (const Slice& slice : slices) {
      ExpectNumbered(slice, slice.index);
      EXPECT_EQ(slice.index - slices.front().index, &slice - slices.data());
      if (HasFailure()) break;
    }
  }
  done = true;
  writer.join();
  std::vector<Slice> slices;
  ring.Read(&slices);
  ASSERT_EQ(std::ssize(slices), std::min(written, kSlices));
  EXPECT_EQ(slices.back().index, written - 1);
}

std::unique_ptr<Tracer> MakeTracer(size_t slices = 1 << 12) {
  Result<std::unique_ptr<Tracer>> tracer = Tracer::Create({slices});
  EXPECT_TRUE(testing::IsOk(tracer));
  return *std::move(tracer);
}

int64_t CountOf(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

TEST(TracerTest, EveryThreadgroupIsASliceAndSurplusIsCounted) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  const std::unique_ptr<Tracer> tracer = MakeTracer();
  const auto body = [](const Threadgroup&) { ADD_FAILURE() << "not traced"; };
  const auto traced = [](const Threadgroup& group) {
    if (group.index() % 4 == 1) return group.MarkSurplus();
    group.Annotate({.sequence = group.index() * 10, .head = 3, .bytes = 8});
  };
  const FunctionRef<void(const Threadgroup&)> traced_body = traced;
  runtime->SetTracer(tracer.get());
  VARLANE_ASSERT_OK(runtime->Launch(
      {100}, body, {.name = "my \"grid\"", .traced_body = &traced_body}));
  runtime->SetTracer(nullptr);
  VARLANE_ASSERT_OK(runtime->Launch({100}, [](const Threadgroup& group) {
    group.MarkSurplus();
    group.Annotate({});
  }));
  const Result<std::string> json = tracer->ToJson();
  VARLANE_ASSERT_OK(json);
  EXPECT_EQ(CountOf(*json, "\"cat\":\"threadgroup\""), 75);
  EXPECT_EQ(CountOf(*json, "\"name\":\"my \\\"grid\\\"\""), 76);
  EXPECT_EQ(CountOf(*json, "\"threadgroups\":100,\"surplus\":25,\"bytes\":600"),
            1);
  for (int64_t i = 0; i < 100; ++i) {
    std::string args("\"threadgroup\":");
    args.append(std::to_string(i)).append(",\"sequence\":");
    args.append(std::to_string(i * 10)).append(",\"head\":3,");
    EXPECT_EQ(CountOf(*json, args), i % 4 == 1 ? 0 : 1) << i;
  }
  EXPECT_EQ(tracer->stats().overwritten, 0);
}

// What overlaps adds up, and what ends where another begins leaves no gap.
TEST(TracerTest, ReadRatesAddUp) {
  const std::unique_ptr<Tracer> tracer = MakeTracer();
  const TraceClock& clock = tracer->impl()->clock();
  const auto add = [&](int64_t begin_ms, int64_t end_ms, int64_t bytes) {
    Slice slice;
    slice.kind = SliceKind::kReadRate;
    slice.begin = clock.TicksIn(std::chrono::milliseconds(begin_ms));
    slice.end = clock.TicksIn(std::chrono::milliseconds(end_ms));
    slice.note.bytes = bytes;
    tracer->impl()->Ring()->Push(slice);
  };
  add(20, 40, 60'000'000);  // 3 bytes a ns
  add(10, 30, 40'000'000);  // 2
  add(40, 50, 70'000'000);  // 7
  add(60, 60, 1);           // no time at all
  const Result<std::string> json = tracer->ToJson();
  VARLANE_ASSERT_OK(json);
  std::vector<std::pair<double, double>> points;
  const std::string before = "{\"ph\":\"C\",\"pid\":1,\"tid\":0,\"ts\":";
  for (size_t at = json->find(before); at != std::string::npos;
       at = json->find(before, at + 1)) {
    std::pair<double, double> point;
    ASSERT_EQ(std::sscanf(json->c_str() + at + before.size(),
                          "%lf,\"cat\":\"counter\",\"name\":\"read GB/s\","
                          "\"args\":{\"value\":%lf}}",
                          &point.first, &point.second),
              2);
    points.push_back(point);
  }
  const std::vector<std::pair<double, double>> expected = {
      {10e3, 2}, {20e3, 5}, {30e3, 3}, {40e3, 7}, {50e3, 0}};
  ASSERT_EQ(points.size(), expected.size()) << *json;
  for (size_t i = 0; i < points.size(); ++i) {
    EXPECT_NEAR(points[i].first, expected[i].first, expected[i].first * 1e-2);
    EXPECT_NEAR(points[i].second, expected[i].second,
                expected[i].second * 1e-2);
  }
}

TEST(TracerTest, GraphsNameTheirNodes) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(2);
  const std::unique_ptr<Tracer> tracer = MakeTracer();
  LaunchGraph graph;
  VARLANE_ASSERT_OK(
      graph.AddLaunch("wide", 20, [](const Threadgroup&, void*) {}));
  VARLANE_ASSERT_OK(graph.AddHost("plan", [](void*) { return Status(); }));
  VARLANE_ASSERT_OK(graph.Build());
  runtime->SetTracer(tracer.get());
  for (int i = 0; i < 3; ++i) {
    VARLANE_ASSERT_OK(runtime->Run(graph, nullptr, {.name = "step"}));
  }
  runtime->SetTracer(nullptr);
  VARLANE_ASSERT_OK(runtime->Run(graph));
  const Result<std::string> json = tracer->ToJson();
  VARLANE_ASSERT_OK(json);
  EXPECT_EQ(CountOf(*json, "\"cat\":\"threadgroup\",\"name\":\"wide\""), 60);
  EXPECT_EQ(CountOf(*json, "\"cat\":\"host\",\"name\":\"plan\""), 3);
  EXPECT_EQ(CountOf(*json, "\"cat\":\"launch\",\"name\":\"step\""), 3);
}

TEST(TracerTest, FailedAndNestedLaunchesOfManyCallersRecordInPeace) {
  const std::unique_ptr<Runtime> runtime = MakeRuntime(3);
  const std::unique_ptr<Tracer> tracer = MakeTracer(64);
  runtime->SetTracer(tracer.get());
  std::vector<std::thread> callers;
  std::atomic<bool> done = false;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        const Status status =
            runtime->Launch({20}, [&](const Threadgroup& group) {
              group.Annotate({.sequence = 5});
              VARLANE_EXPECT_OK(runtime->Launch(
                  {2}, [](const Threadgroup& g) { g.MarkSurplus(); }));
              if (i % 5 == 0 && group.index() == 7) throw 1;
            });
        EXPECT_EQ(status.ok(), i % 5 != 0);
      }
    });
  }
  std::thread reader([&] {
    while (!done) {
      tracer->Counter("pool", 3);
      VARLANE_EXPECT_OK(tracer->ToJson());
    }
  });
  for (std::thread& caller : callers) caller.join();
  done = true;
  reader.join();
  runtime->SetTracer(nullptr);
  EXPECT_GT(tracer->stats().overwritten, 0);
  EXPECT_GE(tracer->stats().num_threads, 4);
}

TEST(TracerTest, BadOptionsAndFilesAreErrors) {
  EXPECT_EQ(Tracer::Create({0}).status().code(), StatusCode::kInvalidArgument);
  const Status status = MakeTracer()->WriteJson("/no/such/folder/x.json");
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("/no/such/folder/x.json"),
            std::string_view::npos);
}

}  // namespace
}  // namespace varlane
