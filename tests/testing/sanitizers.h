// Whether this test runs under a sanitizer that takes memory of its own (ASan,
// TSan): random tests scale down, tests of the process's memory are skipped.
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

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_SANITIZERS_H_
