// Pace against a model of memory: a tile takes as long as its bytes need to
// come, or as its steps and their delays, whichever is longer.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "hwy/base.h"

#define VARLANE_NS pace_test
#include "kernels/pace-inl.h"

namespace varlane::pace_test {
namespace {

constexpr float kBytes = 131072;
constexpr double kSteps = 512;  // of four lines

struct Memory {
  double ticks_per_step = 40;  // what four lines take to come
  double asking_again = 1;     // a tile takes so many times as long by it
  double noise = 0.05;         // deviation of a tile's time
};

class PaceTest : public ::testing::Test {
 protected:
  void Run(const Memory& memory, int tiles) {
    std::normal_distribution<double> noise(1, memory.noise);
    for (int i = 0; i < tiles; ++i) {
      const double step =
          std::max(memory.ticks_per_step, 12 + 2.0 / 3 * pace_.delay());
      const double again = pace_.again() ? memory.asking_again : 1;
      steps_ += step;
      delays_ += pace_.delay();
      asked_again_ += pace_.again() ? 1 : 0;
      now_ += static_cast<uint64_t>(kSteps * step * again *
                                    std::max(noise(random_), 0.5));
      pace_.Next(now_, kBytes);
    }
  }

  // Mean over the tiles of another run.
  double MeanDelay(const Memory& memory, int tiles) {
    delays_ = 0;
    Run(memory, tiles);
    return delays_ / tiles;
  }
  // Of what memory alone would take.
  double MeanStep(const Memory& memory, int tiles) {
    steps_ = 0;
    Run(memory, tiles);
    return steps_ / tiles / memory.ticks_per_step;
  }
  double ShareAskedAgain(const Memory& memory, int tiles) {
    asked_again_ = 0;
    Run(memory, tiles);
    return asked_again_ / tiles;
  }

  Pace pace_;
  std::mt19937_64 random_{1};
  uint64_t now_ = 1;
  double steps_ = 0;
  double delays_ = 0;
  double asked_again_ = 0;
};

TEST_F(PaceTest, TheDelayIsWhatMemoryTakes) {
  for (const double ticks : {60.0, 32.0, 90.0}) {  // best: 72, 30 and 117
    const double best = (ticks - 12) * 3 / 2;
    Run({.ticks_per_step = ticks}, 40000);
    EXPECT_NEAR(MeanDelay({.ticks_per_step = ticks}, 2000), best, 0.1 * best)
        << ticks;
  }
}

TEST_F(PaceTest, WhatItTriesCostsLittleAmongNoise) {
  for (const double ticks : {28.0, 38.0, 60.0}) {
    const Memory memory = {.ticks_per_step = ticks, .noise = 0.2};
    Run(memory, 20000);
    EXPECT_LT(MeanStep(memory, 20000), 1.02) << ticks;
  }
}

TEST_F(PaceTest, WhatACacheGivesTeachesLittle) {
  const Memory memory = {.ticks_per_step = 50};
  Run(memory, 6000);
  const int before = pace_.delay();
  Run({.ticks_per_step = 14}, 256);
  EXPECT_NEAR(pace_.delay(), before, 0.4 * before);
}

TEST_F(PaceTest, TurnsWithACacheTeachLittleByAndBy) {
  const Memory memory = {.ticks_per_step = 50};  // best: 57
  const Memory cache = {.ticks_per_step = 14};
  Run(memory, 20000);
  double mean = 0;
  for (int turn = 0; turn < 20; ++turn) {
    Run(cache, 500);
    mean = MeanDelay(memory, 1000);
  }
  EXPECT_GT(mean, 0.6 * 57);
}

TEST_F(PaceTest, MemoryThatBecameQuickerIsNoCacheForLong) {
  Run({.ticks_per_step = 60}, 6000);
  const Memory quick = {.ticks_per_step = 40};
  Run(quick, 6000);
  EXPECT_NEAR(MeanDelay(quick, 2000), 42, 12);
}

TEST_F(PaceTest, AsksAgainWhereThatIsQuicker) {
  for (const double factor : {0.95, 1.05, 0.95}) {
    const Memory memory = {.asking_again = factor};
    Run(memory, 6000);
    const double share = ShareAskedAgain(memory, 4000);
    if (factor < 1) {
      EXPECT_GT(share, 0.8);
    } else {
      EXPECT_LT(share, 0.2);
    }
  }
}

}  // namespace
}  // namespace varlane::pace_test
