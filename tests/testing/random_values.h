// Values that look random and are the same on every run and machine.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_RANDOM_VALUES_H_
#define VARLANE_TESTS_TESTING_RANDOM_VALUES_H_

#include <cstdint>
#include <vector>

#include "tools/random.h"

namespace varlane::testing {

inline uint64_t RandomBits(uint64_t seed) {
  return tools::SplitMix64(seed).Next();
}

// RandomValue(seed, a, b, c, d) of many d: most of it is worked out once.
class RandomRow {
 public:
  RandomRow(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
    hash_ = RandomBits(RandomBits(seed) ^ a);
    hash_ = RandomBits(RandomBits(hash_ ^ (b << 1)) ^ (c << 2));
  }
  double operator[](uint64_t d) const {
    const uint64_t h = RandomBits(hash_ ^ (d << 3));
    // The sum of four uniforms on 8 bits: deviation 147.8.
    const auto sum =
        static_cast<double>((h & 0xff) + ((h >> 8) & 0xff) +
                            ((h >> 16) & 0xff) + ((h >> 24) & 0xff));
    const double fine = double(h >> 40) * 0x1p-24;  // bits for f32
    return (sum + fine - 510.5) / 147.8;
  }

 private:
  uint64_t hash_;
};

// Deterministic and about N(0, 1).
inline double RandomValue(uint64_t seed, uint64_t a, uint64_t b, uint64_t c,
                          uint64_t d) {
  return RandomRow(seed, a, b, c)[d];
}

// [count, width]
inline std::vector<float> RandomRows(uint64_t seed, int64_t count, int width) {
  std::vector<float> rows;
  rows.reserve(static_cast<size_t>(count * width));
  for (int64_t i = 0; i < count; ++i) {
    const RandomRow row(seed, uint64_t(i), 1, 2);
    for (int d = 0; d < width; ++d) rows.push_back(float(row[uint64_t(d)]));
  }
  return rows;
}

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_RANDOM_VALUES_H_
