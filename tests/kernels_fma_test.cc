// The fused multiply-add of targets that have no such instruction, against the
// C library's.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels_fma_test.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"

#undef VARLANE_NS
#define VARLANE_NS HWY_NAMESPACE
HWY_BEFORE_NAMESPACE();
#include "kernels/fma-inl.h"

namespace varlane {
namespace HWY_NAMESPACE {

// out[i] = a[i] * b[i] + c[i]; n is a multiple of every vector's lanes.
void FuseAll(size_t n, const float* a, const float* b, const float* c,
             float* out) {
  const hn::CappedTag<float, 16> d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto x = hn::LoadU(d, a + i);
    const auto y = hn::LoadU(d, b + i);
    const auto z = hn::LoadU(d, c + i);
#if VARLANE_HAS_FMA
    hn::StoreU(hn::MulAdd(x, y, z), d, out + i);
#else
    hn::StoreU(FusedMulAdd(d, x, y, z), d, out + i);
#endif
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace varlane
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace varlane {
namespace {

HWY_EXPORT(FuseAll);

class FmaTest : public ::testing::Test {
 protected:
  void Add(float a, float b, float c) {
    a_.push_back(a);
    b_.push_back(b);
    c_.push_back(c);
  }

  // On every target that this CPU runs.
  void ExpectFused() {
    while (a_.size() % 16 != 0) Add(0, 0, 0);
    std::vector<float> out(a_.size());
    const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
    ASSERT_FALSE(targets.empty());
    for (const int64_t target : targets) {
      hwy::GetChosenTarget().Update(target);
      HWY_DYNAMIC_DISPATCH(FuseAll)
      (a_.size(), a_.data(), b_.data(), c_.data(), out.data());
      ExpectOut(out, hwy::TargetName(target));
    }
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }

  // How many a sum in fp64 would round otherwise.
  int CountHard() const {
    int hard = 0;
    for (size_t i = 0; i < a_.size(); ++i) {
      const double product = double{a_[i]} * double{b_[i]};
      hard += static_cast<float>(product + double{c_[i]}) !=
              std::fma(a_[i], b_[i], c_[i]);
    }
    return hard;
  }

  std::vector<float> a_;
  std::vector<float> b_;
  std::vector<float> c_;

 private:
  void ExpectOut(const std::vector<float>& out, const char* target) {
    int wrong = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const float expected = std::fma(a_[i], b_[i], c_[i]);
      const bool same = std::isnan(expected)
                            ? std::isnan(out[i])
                            : std::bit_cast<uint32_t>(out[i]) ==
                                  std::bit_cast<uint32_t>(expected);
      if (same || ++wrong > 3) continue;
      ADD_FAILURE() << target << ": " << std::hexfloat << a_[i] << " * "
                    << b_[i] << " + " << c_[i] << " = " << out[i] << ", not "
                    << expected;
    }
    EXPECT_EQ(wrong, 0) << target;
  }
};

TEST_F(FmaTest, AnyNumbers) {
  std::mt19937_64 random(1);
  const auto number = [&](int exponent) {
    const float mantissa = 1 + std::ldexp(float(random() >> 41), -23);
    return std::ldexp((random() & 1) != 0 ? mantissa : -mantissa, exponent);
  };
  std::uniform_int_distribution<int> exponent(-40, 40);
  std::uniform_int_distribution<int> beside(-60, 60);
  for (int i = 0; i < 400000; ++i) {
    const int of_a = exponent(random);
    const int of_b = exponent(random);
    Add(number(of_a), number(of_b), number(of_a + of_b + beside(random) / 2));
  }
  ExpectFused();
}

// bf16 times bf16 is often exactly half of the sum's last place.
TEST_F(FmaTest, ShortNumbersThatMeetTies) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 400000; ++i) {
    const float a = 1 + std::ldexp(float(random() % 128), -7);
    const float b = 1 + std::ldexp(float(random() % 128), -7);
    const float c = 1 + std::ldexp(float(random() >> 41), -23);
    const int shift = -7 - int(random() % 5);
    Add((random() & 1) != 0 ? a : -a, std::ldexp(b, shift), c);
  }
  ExpectFused();
}

// (1 + i u)(1 - i u) is 1 - (i u)^2, u an ulp: beside c half of its last place,
// but for less than fp64 tells.
TEST_F(FmaTest, NearlyTies) {
  std::mt19937_64 random(3);
  for (int i = 1; i <= 4000; ++i) {
    const float above = 1 + std::ldexp(float(i), -23);
    for (const float below : {2 - above, 1 / above}) {
      for (const int sign : {1, -1}) {
        const float c = 1 + std::ldexp(float(random() >> 41), -23);
        const float scale = std::ldexp(float(sign), -24);
        const int power = int(random() % 100) - 50;
        Add(std::ldexp(above * scale, power), below, std::ldexp(c, power));
        Add(std::ldexp(above * scale, power), -below, std::ldexp(-c, power));
      }
    }
  }
  EXPECT_GT(CountHard(), 1000);
  ExpectFused();
}

// The product alone is midway between two numbers, and what is added is lost
// in fp64.
TEST_F(FmaTest, TiesOfTheProductAlone) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 4000; ++i) {
    // Odd and below 4/3 times a power of 2.
    const float a = 1 + std::ldexp(float(random() % (1 << 21) * 2 + 1), -23);
    const int power = int(random() % 100) - 50;
    const float c = std::ldexp((random() & 1) != 0 ? 1.0f : -1.0f, power - 60);
    Add(std::ldexp(a, power), (random() & 1) != 0 ? 1.5f : -1.5f, c);
  }
  EXPECT_GT(CountHard(), 1000);
  ExpectFused();
}

TEST_F(FmaTest, WhatIsNoNumberOrTooLarge) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kMax = std::numeric_limits<float>::max();
  const std::vector<float> all = {0.0f, -0.0f, 1.0f, -1.0f, 3e-38f,
                                  kMax, -kMax, kInf, -kInf, kNaN};
  for (const float a : all) {
    for (const float b : all) {
      for (const float c : all) {
        // The kernels flush what would be denormal.
        const float expected = std::fma(a, b, c);
        if (std::fpclassify(expected) == FP_SUBNORMAL) continue;
        Add(a, b, c);
      }
    }
  }
  // Past the largest number by less and by more than rounding forgives.
  Add(kMax, 1, std::ldexp(1.0f, 102));
  Add(kMax, 1, std::ldexp(1.0f, 103));
  Add(kMax, 1, std::nextafter(std::ldexp(1.0f, 103), 0.0f));
  Add(-kMax, 1, -std::ldexp(1.0f, 103));
  ExpectFused();
}

}  // namespace
}  // namespace varlane
#endif  // HWY_ONCE
