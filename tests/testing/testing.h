// Helpers that every test may use.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_TESTING_H_
#define VARLANE_TESTS_TESTING_TESTING_H_

#include <gtest/gtest.h>

#include "varlane/status.h"

namespace varlane::testing {

inline ::testing::AssertionResult IsOk(const Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status.ToString();
}
template <typename T>
::testing::AssertionResult IsOk(const Result<T>& result) {
  return IsOk(result.status());
}

}  // namespace varlane::testing

#define VARLANE_ASSERT_OK(expr) ASSERT_TRUE(::varlane::testing::IsOk(expr))
#define VARLANE_EXPECT_OK(expr) EXPECT_TRUE(::varlane::testing::IsOk(expr))

#endif  // VARLANE_TESTS_TESTING_TESTING_H_
