// SPDX-License-Identifier: Apache-2.0

#include "runtime/spin.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace varlane {
namespace {

using std::chrono::nanoseconds;

TEST(SpinTest, WhatIsDoneIsSeenWithoutPatience) {
  EXPECT_TRUE(SpinUntil(nanoseconds(0), [] { return true; }));
}

TEST(SpinTest, WithoutPatienceItLooksOnce) {
  int looks = 0;
  EXPECT_FALSE(SpinUntil(nanoseconds(0), [&] {
    ++looks;
    return false;
  }));
  EXPECT_EQ(looks, 1);
}

TEST(SpinTest, ItGivesUpNoSoonerThanAsked) {
  constexpr std::chrono::microseconds kPatience(300);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(SpinUntil(kPatience, [] { return false; }));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kPatience);
}

TEST(SpinTest, ItSeesWhatAnotherThreadDoes) {
  std::atomic<bool> done = false;
  std::thread other([&] { done.store(true, std::memory_order_release); });
  EXPECT_TRUE(SpinUntil(std::chrono::minutes(1),
                        [&] { return done.load(std::memory_order_acquire); }));
  other.join();
}

}  // namespace
}  // namespace varlane
