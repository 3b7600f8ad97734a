// Proves who may join which launch, and how many tasks are sent for.
//
// SPDX-License-Identifier: Apache-2.0

#include "runtime/launch_board.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <vector>

#include "tests/testing/testing.h"

namespace varlane {
namespace {

using Tasks = std::vector<int>;

TEST(LaunchBoardTest, AdmitsAsManyHelpersAsAsked) {
  LaunchBoard board({3});
  LaunchState* const state = board.Take();
  LaunchEngine* engine = nullptr;
  EXPECT_EQ(board.Join(&engine), nullptr) << "nothing is open yet";
  board.Open(state, nullptr, 2);
  EXPECT_EQ(board.Join(&engine), state);
  EXPECT_EQ(board.Join(&engine), state);
  EXPECT_EQ(board.Join(&engine), nullptr) << "two were asked for";
  state->Leave();
  state->Leave();
  board.Close(state);
  state->WaitForHelpers(std::chrono::nanoseconds(0));
  board.Put(state);
}

TEST(LaunchBoardTest, AClosedLaunchAdmitsNobodyAndTheNextOldestIsServed) {
  LaunchBoard board({3});
  std::vector<LaunchState*> states;
  for (int i = 0; i < 3; ++i) {
    states.push_back(board.Take());
    board.Open(states.back(), nullptr, 3);
  }
  LaunchEngine* engine = nullptr;
  EXPECT_EQ(board.Join(&engine), states[0]);
  states[0]->Leave();
  board.Close(states[1]);
  EXPECT_EQ(board.Join(&engine), states[0]);
  states[0]->Leave();
  board.Close(states[0]);
  EXPECT_EQ(board.Join(&engine), states[2]);
  states[2]->Leave();
  board.Close(states[2]);
  EXPECT_EQ(board.Join(&engine), nullptr);
  for (LaunchState* const state : states) board.Put(state);
}

TEST(LaunchBoardTest, SendsForNoMoreTasksThanThreadsAndCountsThoseUnderWay) {
  LaunchBoard board({1, 2});
  LaunchState* const first = board.Take();
  LaunchState* const second = board.Take();
  board.Open(first, nullptr, 2);
  EXPECT_EQ(first->num_tasks, (Tasks{1, 1})) << "round robin";
  board.Open(second, nullptr, 3);
  EXPECT_EQ(second->num_tasks, (Tasks{0, 1})) << "two are on their way";
  board.TaskStarted(1);
  board.Open(first, nullptr, 7);
  EXPECT_EQ(first->num_tasks, (Tasks{0, 1})) << "three threads there are";
  board.Close(first);
  board.TaskStarted(0);
  board.Open(first, nullptr, 7);
  EXPECT_EQ(first->num_tasks, (Tasks{0, 0})) << "it is closed";
  board.Close(second);
  LaunchEngine* engine = nullptr;
  EXPECT_EQ(board.Join(&engine), nullptr);
  board.Put(first);
  board.Put(second);
}

TEST(LaunchBoardTest, SendsForThoseWhoHaveWorkFirst) {
  LaunchBoard board({1, 2, 2, 2});
  const auto tasks = [&](const std::vector<int64_t>& begin, int joins) {
    LaunchState* const state = board.Take();
    state->grid.Reset({begin.back(), begin});
    board.Open(state, nullptr, joins);
    const Tasks sent = state->num_tasks;
    board.Close(state);
    for (size_t node = 0; node < sent.size(); ++node) {
      for (int i = 0; i < sent[node]; ++i) {
        board.TaskStarted(static_cast<int>(node));
      }
    }
    board.Put(state);
    return sent;
  };
  EXPECT_EQ(tasks({0, 0, 0, 9, 9}, 2), (Tasks{0, 0, 2, 0}));
  EXPECT_EQ(tasks({0, 0, 1, 1, 9}, 3), (Tasks{0, 1, 0, 2}));
  EXPECT_EQ(tasks({0, 0, 0, 9, 9}, 4), (Tasks{1, 1, 2, 0})) << "then others";
  EXPECT_EQ(tasks({0, 0, 0, 9, 9}, 99), (Tasks{1, 2, 2, 2}));
}

TEST(LaunchBoardTest, TheHighestPriorityIsServedFirstAndThenTheOldest) {
  LaunchBoard board({3});
  constexpr int kNobody = std::numeric_limits<int>::min();
  EXPECT_EQ(board.most_urgent(), kNobody);
  std::vector<LaunchState*> states;
  for (const int priority : {0, 2, 0, 2, 1}) {
    states.push_back(board.Take());
    states.back()->priority = priority;
    board.Open(states.back(), nullptr, 1);
  }
  EXPECT_EQ(board.most_urgent(), 2);
  LaunchEngine* engine = nullptr;
  for (const size_t next : {1, 3, 4, 0}) {
    EXPECT_EQ(board.Join(&engine), states[next]) << next;
  }
  EXPECT_EQ(board.most_urgent(), 0);
  board.Rejoin(states[4]);
  EXPECT_EQ(board.most_urgent(), 1) << "one may come back";
  states[4]->Leave();
  EXPECT_EQ(board.Join(&engine), states[4]);
  board.Close(states[0]);
  board.Rejoin(states[0]);
  EXPECT_EQ(board.Join(&engine), states[2]) << "it is closed";
  EXPECT_EQ(board.most_urgent(), kNobody);
  for (LaunchState* const state : states) {
    state->Leave();
    board.Close(state);
    state->WaitForHelpers(std::chrono::nanoseconds(0));
    board.Put(state);
  }
}

}  // namespace
}  // namespace varlane
