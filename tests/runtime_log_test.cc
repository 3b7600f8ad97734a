// Proves what runtimes and launches tell the log.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <vector>

#include "tests/testing/runtimes.h"
#include "tests/testing/testing.h"
#include "varlane/graph.h"
#include "varlane/log.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

class RuntimeLogTest : public ::testing::Test {
 protected:
  RuntimeLogTest() {
    SetLog(
        [this](const LogRecord& record) {
          const std::lock_guard lock(mutex_);
          lines_.push_back(std::string(LogLevelName(record.level)) + " " +
                           FormatLogRecord(record));
        },
        LogLevel::kDebug);
  }
  ~RuntimeLogTest() override { SetLog({}); }

  std::vector<std::string> Take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(lines_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;  // guarded by mutex_
};

TEST_F(RuntimeLogTest, CreationTellsWarningsAndSizes) {
  const std::unique_ptr<Runtime> runtime =
      testing::MakeRuntime(0, "numa:2 core:3 pu:1");
  const std::vector<std::string> lines = Take();
  ASSERT_EQ(lines.size(), runtime->topology().warnings.size() + 1);
  ASSERT_GE(lines.size(), 2u) << "a synthetic machine lacks something";
  EXPECT_EQ(lines[0],
            "warning runtime_warning: " + runtime->topology().warnings[0]);
  EXPECT_EQ(lines.back(),
            "info runtime_created: workers are ready [workers=6 nodes=2 "
            "pinned=0 source=synthetic:numa:2 core:3 pu:1]");
}

TEST_F(RuntimeLogTest, AFailedLaunchIsToldOnceWithItsName) {
  const std::unique_ptr<Runtime> runtime =
      testing::MakeRuntime(0, "numa:1 core:3 pu:1");
  Take();
  LaunchOptions options;
  options.name = "gemm";
  VARLANE_EXPECT_OK(runtime->Launch(
      {9}, [](const Threadgroup&) {}, options));
  EXPECT_TRUE(Take().empty()) << "what goes well is not told";
  const Status failed = runtime->Launch(
      {9},
      [](const Threadgroup& group) {
        if (group.index() == 4) throw std::runtime_error("no weights");
      },
      options);
  EXPECT_EQ(failed.code(), StatusCode::kAborted);
  EXPECT_EQ(Take(), (std::vector<std::string>{
                        "warning launch_failed: the body of threadgroup 4 "
                        "threw: no weights [code=ABORTED name=gemm "
                        "threadgroups=9]"}));
  std::stop_source stop;
  stop.request_stop();
  options.stop = stop.get_token();
  (void)runtime->Launch(
      {9}, [](const Threadgroup&) {}, options);
  const std::vector<std::string> lines = Take();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(lines[0].starts_with("debug launch_failed")) << lines[0];
}

TEST_F(RuntimeLogTest, AFailedGraphNamesItsNode) {
  const std::unique_ptr<Runtime> runtime =
      testing::MakeRuntime(0, "numa:1 core:3 pu:1");
  LaunchGraph graph;
  VARLANE_ASSERT_OK(graph.AddHost("sample", [](void*) {
    return Status(StatusCode::kUnavailable, "no logits");
  }));
  VARLANE_ASSERT_OK(graph.Build());
  Take();
  EXPECT_EQ(runtime->Run(graph).code(), StatusCode::kUnavailable);
  EXPECT_EQ(Take(), (std::vector<std::string>{
                        "warning launch_failed: node \"sample\": no logits "
                        "[code=UNAVAILABLE name= threadgroups=0]"}));
}

}  // namespace
}  // namespace varlane
