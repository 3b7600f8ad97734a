// PressureController: the ladder, its hysteresis and what it asks for, with a
// clock and a target made by hand.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/testing/testing.h"
#include "varlane/pressure.h"

namespace varlane {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kMs = 1'000'000;

// Gives what it has at each rung and writes down what it was told.
class FakeTarget : public PressureTarget {
 public:
  void SetGrowth(bool allowed) override {
    growth = allowed;
    log += allowed ? "grow+ " : "grow- ";
  }
  int64_t DropCached(int64_t bytes) override {
    return Give("drop", bytes, &cached);
  }
  int64_t Compact(int64_t bytes) override {
    return Give("compact", bytes, &loose);
  }
  int64_t Preempt(int64_t bytes) override {
    return Give("preempt", bytes, &running);
  }
  void SetAdmission(bool allowed) override {
    admission = allowed;
    log += allowed ? "admit+ " : "admit- ";
  }
  int64_t Regrow(int64_t bytes) override {
    const int64_t taken = std::min(bytes, regrowable);
    log += "regrow" + std::to_string(taken / kMiB) + " ";
    return taken;
  }
  std::string Take() { return std::exchange(log, ""); }

  int64_t cached = 0, loose = 0, running = 0;
  int64_t regrowable = std::numeric_limits<int64_t>::max();
  bool growth = true, admission = true;
  std::string log;

 private:
  int64_t Give(const char* what, int64_t bytes, int64_t* from) {
    const int64_t given = std::min(bytes, *from);
    *from -= given;
    log += what + std::to_string(bytes / kMiB) + " ";
    return given;
  }
};

PressureSample Sample(PressureLevel level, int64_t available_mib = 64,
                      int64_t reserve_mib = 64) {
  PressureSample sample;
  sample.level = level;
  sample.available_bytes = available_mib * kMiB;
  sample.reserve_bytes = reserve_mib * kMiB;
  sample.cause = "a test";
  return sample;
}

class PressureControllerTest : public ::testing::Test {
 protected:
  bool Update(PressureLevel level, int64_t at_ms, int64_t available_mib = 64) {
    return controller_.Update(Sample(level, available_mib), at_ms * kMs);
  }
  PressureRung rung() const { return controller_.rung(); }

  FakeTarget target_;
  PressureController controller_{{.climb_ns = 100 * kMs, .calm_ns = 1000 * kMs},
                                 &target_};
};

TEST_F(PressureControllerTest, AtRestNothingIsDoneNorAskedToBeCalled) {
  EXPECT_FALSE(Update(PressureLevel::kNone, 0, 1000));
  EXPECT_EQ(target_.Take(), "");
  EXPECT_EQ(controller_.next_update_ns(), std::numeric_limits<int64_t>::max());
}

TEST_F(PressureControllerTest, LowPressureStopsGrowthAndNothingElse) {
  EXPECT_TRUE(Update(PressureLevel::kLow, 0, 40));
  EXPECT_EQ(target_.Take(), "grow- ");
  for (int ms = 50; ms < 5000; ms += 50) Update(PressureLevel::kLow, ms, 40);
  EXPECT_EQ(target_.Take(), "");
  EXPECT_EQ(rung(), PressureRung::kStopGrowing);
}

TEST_F(PressureControllerTest, MediumPressureClimbsARungAtATimeToCompaction) {
  target_.loose = 100 * kMiB;
  Update(PressureLevel::kMedium, 0, 24);  // 40 of the reserve are missing
  EXPECT_EQ(target_.Take(), "grow- drop40 ");
  Update(PressureLevel::kMedium, 50, 24);
  EXPECT_EQ(target_.Take(), "") << "not before climb_ns";
  Update(PressureLevel::kMedium, 100, 24);
  EXPECT_EQ(target_.Take(), "drop40 compact40 ");
  EXPECT_EQ(rung(), PressureRung::kCompact);
  EXPECT_EQ(controller_.stats().released_bytes, 40 * kMiB);
  for (int ms = 200; ms < 2000; ms += 100) {
    Update(PressureLevel::kMedium, ms, 24);
  }
  EXPECT_EQ(rung(), PressureRung::kCompact) << "no preemption for kMedium";
  EXPECT_EQ(target_.loose, 0);
}

TEST_F(PressureControllerTest, WhatAnEarlierRungGivesSparesTheLaterOnes) {
  target_.cached = 100 * kMiB;
  Update(PressureLevel::kCritical, 0, 4);
  EXPECT_EQ(target_.Take(), "grow- drop60 ");
  EXPECT_EQ(rung(), PressureRung::kDropCached);
  EXPECT_TRUE(target_.admission);
}

TEST_F(PressureControllerTest, CriticalPressureGoesAllTheWayAtOnce) {
  target_.cached = 10 * kMiB;
  target_.loose = 20 * kMiB;
  target_.running = 5 * kMiB;
  Update(PressureLevel::kCritical, 0, 4);
  EXPECT_EQ(target_.Take(), "grow- drop60 compact50 preempt30 admit- ");
  EXPECT_EQ(rung(), PressureRung::kRefuse);
  EXPECT_EQ(controller_.stats().climbs, 5);
  EXPECT_EQ(controller_.stats().released_bytes, 35 * kMiB);
  EXPECT_EQ(controller_.stats().cause, "a test");
  // Still short: every rung is asked again for what it has by now.
  target_.running = 100 * kMiB;
  Update(PressureLevel::kCritical, 1, 10);
  EXPECT_EQ(target_.Take(), "drop54 compact54 preempt54 ");
}

TEST_F(PressureControllerTest, EventsWithoutAShortReserveAskForAnEighth) {
  target_.cached = 100 * kMiB;
  Update(PressureLevel::kMedium, 0, 1000);
  EXPECT_EQ(target_.Take(), "grow- drop8 ");
}

TEST_F(PressureControllerTest, TheEmbeddersWishIsWhatIsAsked) {
  PressureSample sample = Sample(PressureLevel::kMedium, 1000);
  sample.wanted_bytes = 300 * kMiB;
  sample.notices = 1;
  target_.cached = 200 * kMiB;
  controller_.Update(sample, 0);
  EXPECT_EQ(target_.Take(), "grow- drop300 ");
  // Once: then what is still owed, then nothing, though the level holds.
  target_.cached = 1000 * kMiB;
  controller_.Update(sample, 100 * kMs);
  EXPECT_EQ(target_.Take(), "drop100 ");
  for (int ms = 200; ms < 2000; ms += 100) controller_.Update(sample, ms * kMs);
  EXPECT_EQ(target_.Take(), "");
  EXPECT_EQ(rung(), PressureRung::kDropCached);
  // The same wish again is another one.
  sample.notices = 2;
  controller_.Update(sample, 3000 * kMs);
  EXPECT_EQ(target_.Take(), "drop300 ");
  EXPECT_EQ(controller_.stats().released_bytes, 600 * kMiB);
}

TEST_F(PressureControllerTest, CalmDescendsARungEachCalmAndInReverse) {
  Update(PressureLevel::kCritical, 0, 4);
  ASSERT_EQ(rung(), PressureRung::kRefuse);
  target_.Take();
  EXPECT_FALSE(Update(PressureLevel::kNone, 999, 64));
  EXPECT_EQ(controller_.next_update_ns(), 1000 * kMs);
  EXPECT_FALSE(target_.admission);
  EXPECT_TRUE(Update(PressureLevel::kNone, 1000, 64));
  EXPECT_EQ(target_.Take(), "admit+ ");
  EXPECT_FALSE(Update(PressureLevel::kNone, 1500, 64));
  for (int ms = 2000; ms <= 4000; ms += 1000) {
    EXPECT_TRUE(Update(PressureLevel::kNone, ms, 64)) << ms;
  }
  EXPECT_EQ(rung(), PressureRung::kStopGrowing);
  EXPECT_EQ(target_.Take(), "");
  EXPECT_TRUE(Update(PressureLevel::kNone, 5000, 64));
  EXPECT_EQ(target_.Take(), "grow+ ");
  EXPECT_EQ(rung(), PressureRung::kNormal);
  EXPECT_EQ(controller_.stats().descents, 5);
}

// Pressure that comes back every half second never lets a rung go: no
// oscillation between refusing and accepting.
TEST_F(PressureControllerTest, RecurringPressureDoesNotOscillate) {
  for (int ms = 0; ms < 20'000; ms += 500) {
    Update(ms % 1000 == 0 ? PressureLevel::kCritical : PressureLevel::kNone, ms,
           ms % 1000 == 0 ? 4 : 64);
  }
  EXPECT_EQ(controller_.stats().descents, 0);
  EXPECT_EQ(rung(), PressureRung::kRefuse);
}

TEST_F(PressureControllerTest, LesserPressureDescendsToItsOwnRungOnly) {
  Update(PressureLevel::kCritical, 0, 4);
  target_.Take();
  for (int ms = 100; ms < 10'000; ms += 100)
    Update(PressureLevel::kLow, ms, 40);
  EXPECT_EQ(target_.Take(), "admit+ ");
  EXPECT_EQ(rung(), PressureRung::kStopGrowing);
  EXPECT_FALSE(target_.growth);
}

TEST_F(PressureControllerTest, WhatWasGivenIsRegrownHalfOfTheClearAtATime) {
  target_.cached = 60 * kMiB;
  Update(PressureLevel::kCritical, 0, 4);
  int ms = 0;
  for (int i = 0; i < 2; ++i) Update(PressureLevel::kNone, ms += 1000, 64);
  ASSERT_EQ(rung(), PressureRung::kNormal);
  target_.Take();
  EXPECT_FALSE(Update(PressureLevel::kNone, ms += 1000, 64));
  EXPECT_EQ(target_.Take(), "") << "nothing is clear of the reserve";
  ms += 2000;  // the pause has doubled
  EXPECT_TRUE(Update(PressureLevel::kNone, ms, 64 + 80));
  EXPECT_EQ(target_.Take(), "regrow40 ");
  EXPECT_TRUE(Update(PressureLevel::kNone, ms += 1000, 64 + 800));
  EXPECT_EQ(target_.Take(), "regrow20 ") << "no more than was given";
  EXPECT_EQ(controller_.stats().regained_bytes, 60 * kMiB);
  EXPECT_FALSE(Update(PressureLevel::kNone, ms += 9000, 9000));
  EXPECT_EQ(controller_.next_update_ns(), std::numeric_limits<int64_t>::max());
}

TEST_F(PressureControllerTest, ThereAreEverFewerTriesToRegrowInVain) {
  target_.cached = 60 * kMiB;
  Update(PressureLevel::kCritical, 0, 4);
  int64_t ms = 0;
  for (int i = 0; i < 2; ++i) Update(PressureLevel::kNone, ms += 1000, 64);
  int tries = 0;
  while (ms < 600'000) {
    ms = std::max(ms + 1, controller_.next_update_ns() / kMs);
    Update(PressureLevel::kNone, ms, 64);
    ++tries;
  }
  EXPECT_LT(tries, 30);
}

TEST_F(PressureControllerTest, AFailedMeasurementChangesNothing) {
  Update(PressureLevel::kCritical, 0, 4);
  target_.Take();
  PressureSample unknown;
  unknown.measured = Status(StatusCode::kUnavailable, "no /proc");
  for (int ms = 100; ms < 9000; ms += 100)
    controller_.Update(unknown, ms * kMs);
  EXPECT_EQ(target_.Take(), "");
  EXPECT_EQ(rung(), PressureRung::kRefuse);
}

TEST(PressureNamesTest, AreThere) {
  EXPECT_STREQ(PressureLevelName(PressureLevel::kCritical), "critical");
  EXPECT_STREQ(PressureRungName(PressureRung::kPreempt), "preempt");
  EXPECT_STREQ(PressureLevelName(static_cast<PressureLevel>(9)), "unknown");
}

}  // namespace
}  // namespace varlane
