// Whether this test runs under a sanitizer that takes memory of its own (ASan,
// TSan): random tests scale down (Operations), tests of the process's memory
// are skipped.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_SANITIZERS_H_
#define VARLANE_TESTS_TESTING_SANITIZERS_H_

namespace varlane::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // g++
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;  // clang
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

// How many random operations a test does: `full`, or `sanitized` where each
// costs ten times as much and more. Enough for every path, which the tests'
// premises say; the counts that find what is rare are Release's.
constexpr int Operations(int full, int sanitized) {
  return kSanitized ? sanitized : full;
}

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_SANITIZERS_H_
