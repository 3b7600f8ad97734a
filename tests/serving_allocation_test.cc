// A warm scheduler takes no memory of its own, step after step.
//
// A binary of its own, because it counts every call of operator new.
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "serving/request_queue.h"
#include "tests/testing/serving_harness.h"
#include "tests/testing/testing.h"
#include "varlane/scheduler.h"

namespace {

std::atomic<int64_t> allocations = 0;

}  // namespace

void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size);
}
// Not inline: g++ would pair the free with a new that it cannot see through.
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace varlane {
namespace {

using testing::kTestBlockSize;
using testing::ServingHarness;

TEST(SchedulerAllocationTest, WarmDecodeStepsAllocateNothing) {
  ServingHarness service(64, {.watermark = 0});
  for (RequestId id = 0; id < 8; ++id) {
    service.Submit({.id = id, .prompt_tokens = 3, .max_new_tokens = 60});
  }
  Step step;
  Scheduler& scheduler = service.scheduler();
  for (int i = 0; i < 2; ++i) {
    VARLANE_ASSERT_OK(scheduler.Schedule(&step));
    VARLANE_ASSERT_OK(scheduler.Complete(step, {}));
  }
  // Until the tables grow by a block, which may cost the pool memory.
  const int64_t before = allocations;
  EXPECT_GT(before, 0) << "not counting";
  for (int64_t length = 5; length <= kTestBlockSize; ++length) {
    Status status = scheduler.Schedule(&step);
    if (status.ok()) status = scheduler.Complete(step, {});
    VARLANE_ASSERT_OK(status);
    ASSERT_EQ(step.total_q(), 8);
  }
  EXPECT_EQ(allocations, before);
}

TEST(SchedulerAllocationTest, StartingAndReturningMovesNodesOnly) {
  RequestQueue queue;
  for (RequestId id = 0; id < 50; ++id) {
    queue.Add({.id = id, .prompt_tokens = 1, .priority = int(id % 3)});
  }
  const int64_t before = allocations;
  while (!queue.waiting().empty()) queue.Start(*queue.waiting().begin());
  while (!queue.running().empty()) queue.Return(queue.victim());
  EXPECT_EQ(allocations, before);
  EXPECT_EQ(queue.waiting().size(), 50u);
}

}  // namespace
}  // namespace varlane
