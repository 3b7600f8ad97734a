// What launches did, counted.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_LAUNCHES_H_
#define VARLANE_TESTS_TESTING_LAUNCHES_H_

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "varlane/runtime.h"

namespace varlane::testing {

// Counts how often each index ran.
class Counts {
 public:
  explicit Counts(int64_t n) : counts_(static_cast<size_t>(n)) {}
  void Add(int64_t index) {
    counts_[static_cast<size_t>(index)].fetch_add(1, std::memory_order_relaxed);
  }
  // The first index that did not run exactly once, -1 if all did.
  int64_t FirstWrong() const {
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (counts_[i].load(std::memory_order_relaxed) != 1) {
        return static_cast<int64_t>(i);
      }
    }
    return -1;
  }

 private:
  std::vector<std::atomic<int>> counts_;
};

// Launches all of `grid`, each of which must run once; returns what went wrong.
inline ::testing::AssertionResult RunsAllOnce(Runtime& runtime,
                                              const Grid& grid) {
  Counts counts(grid.num_threadgroups);
  const Status status = runtime.Launch(
      grid, [&](const Threadgroup& group) { counts.Add(group.index()); });
  if (!status.ok()) {
    return ::testing::AssertionFailure() << status.ToString();
  }
  if (counts.FirstWrong() >= 0) {
    return ::testing::AssertionFailure()
           << "index " << counts.FirstWrong() << " of " << grid.num_threadgroups
           << " did not run once";
  }
  return ::testing::AssertionSuccess();
}

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_LAUNCHES_H_
