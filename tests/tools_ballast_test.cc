// Ballast: waves as they are asked for.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/ballast.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace varlane::tools {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kTickNs = 10'000'000;

// Ticks until `done` holds; false after a minute of the ballast's own time.
template <typename Done>
bool TickUntil(Ballast* ballast, int64_t* now_ns, Done done) {
  for (int i = 0; i < 6000; ++i) {
    if (done()) return true;
    ballast->Tick(*now_ns += kTickNs);
  }
  return false;
}

TEST(BallastTest, TakesWavesOfTheHeightsAskedForAndGivesThemBack) {
  BallastState state;
  state.least_bytes = 8 * kMiB;
  state.most_bytes = 24 * kMiB;
  int64_t now_ns = 0;
  Ballast ballast({}, 7, &state);
  ballast.Tick(now_ns);
  EXPECT_EQ(state.held_bytes, 0) << "nobody has asked for pressure";
  state.presses = true;
  for (int wave = 1; wave <= 3; ++wave) {
    ASSERT_TRUE(
        TickUntil(&ballast, &now_ns, [&] { return state.waves == wave; }));
    EXPECT_GE(state.held_bytes, 7 * kMiB);
    EXPECT_LE(state.held_bytes, 24 * kMiB);
    ASSERT_TRUE(
        TickUntil(&ballast, &now_ns, [&] { return state.held_bytes == 0; }));
  }
  EXPECT_EQ(state.waits, 0);
  EXPECT_EQ(state.starved, 0);
  ASSERT_TRUE(
      TickUntil(&ballast, &now_ns, [&] { return state.held_bytes > 0; }));
  state.presses = false;
  ballast.Tick(now_ns += kTickNs);
  EXPECT_EQ(state.held_bytes, 0);
}

}  // namespace
}  // namespace varlane::tools
