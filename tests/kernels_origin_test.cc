// Origin against models of memory and of a cache, where reading in the other
// one's way takes longer.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "hwy/base.h"

#define VARLANE_NS origin_test
#include "kernels/origin-inl.h"

namespace varlane::origin_test {
namespace {

// Ticks a byte, read as from memory and as from a cache.
struct Source {
  double as_memory = 1;
  double as_cache = 1;
};
constexpr Source kMemory = {.as_memory = 0.20, .as_cache = 0.24};
constexpr Source kCache = {.as_memory = 0.10, .as_cache = 0.08};

class OriginTest : public ::testing::Test {
 protected:
  // Share of `runs` that were read as from memory. What a run asks for is read
  // by the next one, so that is what a way of reading shows in.
  double ShareAsMemory(const Source& source, int runs, double deviation = 0.1) {
    std::normal_distribution<double> noise(1, deviation);
    int as_memory = 0;
    for (int i = 0; i < runs; ++i) {
      const double ticks =
          asked_as_memory_ ? source.as_memory : source.as_cache;
      asked_as_memory_ = origin_.memory();
      as_memory += asked_as_memory_ ? 1 : 0;
      origin_.Note(static_cast<float>(ticks * std::max(noise(random_), 0.5)));
    }
    return static_cast<double>(as_memory) / runs;
  }

  Origin origin_;
  std::mt19937_64 random_{1};
  bool asked_as_memory_ = true;
};

TEST_F(OriginTest, BeginsAsFromMemory) { EXPECT_TRUE(origin_.memory()); }

TEST_F(OriginTest, StaysWithMemoryWhereThatIsQuicker) {
  ShareAsMemory(kMemory, 2000);
  EXPECT_GT(ShareAsMemory(kMemory, 20000), 0.98);
}

TEST_F(OriginTest, FindsACacheSoonAndStaysThere) {
  ShareAsMemory(kCache, 200);
  EXPECT_FALSE(origin_.memory());
  ShareAsMemory(kCache, 2000);
  EXPECT_LT(ShareAsMemory(kCache, 20000), 0.02);
}

// Long after the last trial, when the next one is far.
TEST_F(OriginTest, TriesAtOnceWhereRunsAreNotAsUsual) {
  ShareAsMemory(kMemory, 20000);
  ShareAsMemory(kCache, 100);
  EXPECT_LT(ShareAsMemory(kCache, 2000), 0.05);
  ShareAsMemory(kCache, 20000);
  ShareAsMemory(kMemory, 100);
  EXPECT_GT(ShareAsMemory(kMemory, 2000), 0.95);
}

// What other work drove out of a cache comes back with the first few runs.
TEST_F(OriginTest, ShortTimesOfMemoryChangeNothing) {
  ShareAsMemory(kCache, 2000);
  double share = 0;
  for (int i = 0; i < 200; ++i) {
    ShareAsMemory(kMemory, 40);
    share += ShareAsMemory(kCache, 300) / 200;
  }
  EXPECT_LT(share, 0.03);
}

// Another process that takes the core for a while is no reason to change.
TEST_F(OriginTest, OneLongRunChangesNothing) {
  ShareAsMemory(kMemory, 2000);
  double share = 0;
  for (int i = 0; i < 200; ++i) {
    share += ShareAsMemory(kMemory, 50) / 200;
    origin_.Note(100);
  }
  EXPECT_GT(share, 0.97);
}

// Noise alone makes it change its mind now and then, and back.
TEST_F(OriginTest, NoiseCostsLittle) {
  ShareAsMemory(kMemory, 2000, 0.3);
  EXPECT_GT(ShareAsMemory(kMemory, 50000, 0.3), 0.85);
}

}  // namespace
}  // namespace varlane::origin_test
