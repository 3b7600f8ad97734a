// Proves what a pool tells the log when its size changes.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"
#include "varlane/log.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

TEST(PoolLogTest, EveryChangeOfCapacityIsTold) {
  RuntimeOptions runtime_options;
  runtime_options.num_threads = 1;
  runtime_options.numa = NumaPolicy::kOff;
  Result<std::unique_ptr<Runtime>> runtime = Runtime::Create(runtime_options);
  VARLANE_ASSERT_OK(runtime);
  std::vector<std::string> events;
  const auto field = [](const LogRecord& record, std::string_view key) {
    for (const LogField& f : record.fields) {
      if (f.key == key) return std::get<int64_t>(f.value);
    }
    return int64_t{-1};
  };
  SetLog([&](const LogRecord& record) {
    std::string text(record.event);
    for (const char* key : {"blocks_before", "blocks"}) {
      if (field(record, key) < 0) continue;
      text.append(" ").append(std::to_string(field(record, key)));
    }
    events.push_back(text);
  });
  KvPoolOptions options;
  options.layout.num_layers = 1;
  options.layout.num_kv_heads = 2;
  options.layout.head_size = 64;
  options.num_blocks = 100;
  options.max_blocks = 200;
  {
    Result<std::unique_ptr<KvPool>> pool =
        KvPool::Create(options, runtime->get());
    VARLANE_ASSERT_OK(pool);
    VARLANE_EXPECT_OK((*pool)->Grow(50));
    VARLANE_EXPECT_OK((*pool)->Grow(0));
    VARLANE_EXPECT_OK((*pool)->Shrink(30));
    EXPECT_FALSE((*pool)->Grow(1000).ok());
    EXPECT_FALSE((*pool)->Grow(-1).ok()) << "a caller's mistake is its own";
  }
  SetLog({});
  EXPECT_EQ(events, (std::vector<std::string>{
                        "pool_created 100", "pool_grown 100 150",
                        "pool_shrunk 150 120", "pool_resize_failed 120"}));
}

}  // namespace
}  // namespace varlane
