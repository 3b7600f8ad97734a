// Integer helpers.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_MATH_H_
#define VARLANE_BASE_MATH_H_

#include <cstdint>
#include <limits>
#include <optional>

namespace varlane {

// Requires: a >= 0, b > 0.
template <typename T>
constexpr T DivCeil(T a, T b) {
  return a / b + (a % b != 0 ? T{1} : T{0});
}

template <typename T>
constexpr T RoundUp(T a, T multiple) {
  return DivCeil(a, multiple) * multiple;
}

template <typename T>
constexpr T RoundDown(T a, T multiple) {
  return a / multiple * multiple;
}

constexpr bool IsPowerOfTwo(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

// a * b, or nothing where that overflows int64.
constexpr std::optional<int64_t> CheckedMul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

constexpr std::optional<int64_t> CheckedAdd(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

}  // namespace varlane

#endif  // VARLANE_BASE_MATH_H_
