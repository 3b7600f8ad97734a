// Proves that the log reaches its callback, and nobody else.
//
// SPDX-License-Identifier: Apache-2.0

#include "base/log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace varlane {
namespace {

// No test's callback outlives it.
class LogTest : public ::testing::Test {
 protected:
  ~LogTest() override { SetLog({}); }

  void Keep(LogLevel least) {
    SetLog([this](const LogRecord& r) { lines_.push_back(FormatLogRecord(r)); },
           least);
  }

  std::vector<std::string> lines_;
};

TEST_F(LogTest, RecordsAtOrAboveTheThresholdArrive) {
  Log(LogLevel::kError, "early", "nobody listens");
  Keep(LogLevel::kWarning);
  EXPECT_FALSE(IsLogged(LogLevel::kInfo));
  EXPECT_TRUE(IsLogged(LogLevel::kWarning));
  Log(LogLevel::kInfo, "low", "below");
  Log(LogLevel::kWarning, "met", "at");
  Log(LogLevel::kError, "high", "above");
  SetLog({});
  EXPECT_FALSE(IsLogged(LogLevel::kError));
  Log(LogLevel::kError, "late", "nobody listens any more");
  EXPECT_EQ(lines_, (std::vector<std::string>{"met: at", "high: above"}));
}

TEST_F(LogTest, OffHearsNothing) {
  Keep(LogLevel::kOff);
  Log(LogLevel::kError, "high", "above");
  EXPECT_TRUE(lines_.empty());
}

TEST_F(LogTest, FieldsKeepTheirTypesAndOrder) {
  Keep(LogLevel::kDebug);
  Log(LogLevel::kDebug, "event", "text",
      {{"blocks", int64_t{-7}}, {"seconds", 0.5}, {"node", "attend"}});
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_EQ(lines_[0], "event: text [blocks=-7 seconds=0.5 node=attend]");
  EXPECT_STREQ(LogLevelName(LogLevel::kWarning), "warning");
}

TEST_F(LogTest, ACallbackMayThrowAndMayUseTheLibrary) {
  int calls = 0;
  SetLog([&](const LogRecord&) {
    ++calls;
    Log(LogLevel::kError, "inner", "is dropped");
    throw std::runtime_error("no disk");
  });
  Log(LogLevel::kError, "outer", "throws");
  Log(LogLevel::kError, "outer", "again");
  EXPECT_EQ(calls, 2);
}

// What the callback uses may go as soon as SetLog has returned.
TEST_F(LogTest, AReplacedCallbackNeverRunsAgain) {
  std::atomic<bool> ends = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!ends) Log(LogLevel::kInfo, "event", "text", {{"key", 1.0}});
    });
  }
  for (int round = 0; round < 50; ++round) {
    const auto count = std::make_unique<std::atomic<int64_t>>(0);
    std::atomic<int64_t>* const counts = count.get();
    SetLog([counts](const LogRecord&) { ++*counts; });
    std::this_thread::yield();
    SetLog({});
    const int64_t seen = *count;
    std::this_thread::yield();
    ASSERT_EQ(*count, seen) << "a callback ran after it was replaced";
  }
  ends = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace varlane
