// SplitMix64: the one source of randomness of the tools, the same everywhere.
//
// Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
// OOPSLA 2014.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_RANDOM_H_
#define VARLANE_TOOLS_RANDOM_H_

#include <cstdint>

namespace varlane::tools {

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// A bijection of 64 bits in which every input bit moves every output bit.
constexpr uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class SplitMix64 {
 public:
  explicit constexpr SplitMix64(uint64_t seed) : state_(seed) {}
  constexpr uint64_t Next() { return Mix64(state_ += kGolden); }
  // Uniform in [0, 1).
  constexpr double Uniform() {
    return static_cast<double>(Next() >> 11) * 0x1p-53;
  }

 private:
  uint64_t state_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_RANDOM_H_
