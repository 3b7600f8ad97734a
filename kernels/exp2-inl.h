// Exp2<degree>: 2^x with exact 2^0 = 1 and 2^-inf = 0, from a table and a
// polynomial, the same bits on every target.
//
// Included once per pass by pass-inl.h and limits.cc, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Of 2^r, |r| <= 1/16: minimax with 2^0 fixed to 1; relative errors of 3.7e-6
// and 2.6e-8. The shorter one is kOf[0] ((r + kShift)^2 + kRest), which
// needs a single lookup.
struct Exp2Square {
  static constexpr double kOf[] = {0.2403117115709021};
  static constexpr float kShift = 1.44252908f;
  static constexpr float kRest = 2.08037186f;
};
struct Exp2Cubic {
  static constexpr double kOf[] = {1.0, 0.6931471805599453, 0.240258177445858,
                                   0.05551714055209237};
};
// With a fused multiply-add and without.
static_assert(static_cast<float>(double{Exp2Square::kShift} *
                                     Exp2Square::kShift +
                                 Exp2Square::kRest) *
                  static_cast<float>(Exp2Square::kOf[0]) ==
              1.0f);
static_assert((Exp2Square::kShift * Exp2Square::kShift + Exp2Square::kRest) *
                  static_cast<float>(Exp2Square::kOf[0]) ==
              1.0f);

// 2^(j/8), j = 0 .. 7.
constexpr double kEighths[] = {1.0,
                               1.0905077326652577,
                               1.1892071150027210,
                               1.2968395546510096,
                               1.4142135623730951,
                               1.5422108254079408,
                               1.6817928305074290,
                               1.8340080864093424};

// A coefficient times 2^(j/8), each twice so that the low three or four bits of
// an index find it.
template <class Polynomial, int kPower>
struct Exp2Table {
  static constexpr float At(int j) {
    return static_cast<float>(Polynomial::kOf[kPower] * kEighths[j % 8]);
  }
  alignas(64) static constexpr float kValues[16] = {
      At(0), At(1), At(2),  At(3),  At(4),  At(5),  At(6),  At(7),
      At(8), At(9), At(10), At(11), At(12), At(13), At(14), At(15)};

  // By the low three bits of what SplitExp2 has summed up.
  static HWY_INLINE V Look(V sum) {
    auto index = hn::BitCast(DI(), sum);
#if HWY_TARGET == HWY_AVX3
    // It takes the low four itself, and the table has everything twice.
    return V{_mm512_permutexvar_ps(index.raw, hn::Load(D(), kValues).raw)};
#elif HWY_TARGET == HWY_AVX2
    // It takes the low three itself.
    return V{_mm256_permutevar8x32_ps(hn::Load(D(), kValues).raw, index.raw)};
#else
    index = hn::And(index, hn::Set(DI(), 7));
    if constexpr (kN >= 8) {
      return hn::TableLookupLanes(hn::Load(D(), kValues),
                                  hn::IndicesFromVec(D(), index));
    } else {
      return hn::GatherIndex(D(), kValues, index);
    }
#endif
  }
};

// Added to x it leaves multiples of 1/8. Where there is no instruction for p *
// 2^n it has fp32's bias in it as well.
#if HWY_TARGET == HWY_AVX3
constexpr float kEighthsMagic = 1572864.0f;
#else
constexpr float kEighthsMagic = 1572864.0f + 127.0f;
#endif

// p * 2^floor(n) for n in [-127, 127], a multiple of 1/8, on AVX3 any n up to
// 127; `sum` is n + kEighthsMagic, elsewhere with the bits of n + 127 above
// three of eighths. Results below 2^-126 count as zero: the kernels run with
// denormals flushed.
HWY_INLINE V Ldexp(V p, V sum) {
#if HWY_TARGET == HWY_AVX3
  const V n = hn::Sub(sum, Broadcast(kEighthsMagic));
  return V{_mm512_scalef_ps(p.raw, n.raw)};
#else
  const auto bits = hn::BitCast(DI(), sum);
  const auto power = hn::ShiftLeft<23>(hn::ShiftRight<3>(bits));
  return hn::Mul(p, hn::BitCast(D(), power));
#endif
}

// max(x, low), but NaN stays NaN.
HWY_INLINE V AtLeast(V x, float low) {
  const V floor = Broadcast(low);
#if VARLANE_X86_VECTORS
  return hn::Max(floor, x);  // x86 returns the second operand on NaN
#else
  return hn::IfThenElse(hn::Lt(x, floor), floor, x);
#endif
}

// 2^x for x <= 127 in two parts, each short enough that nothing waits long for
// the other's results: x rounded to eighths, then the polynomial of what is
// left. The eighth picks a factor or, of a cubic, whose rounding would show,
// the coefficients: lookups cost less than multiplications, which are scarce.
// NaN stays NaN, -inf gives 0.
struct SplitExponent {
  V sum;   // x + kEighthsMagic, whose ulps are eighths
  V rest;  // of x, at most 1/16
};

HWY_INLINE SplitExponent SplitExp2(V x) {
  const V magic = Broadcast(kEighthsMagic);
#if VARLANE_INTEL_AVX512 || VARLANE_ZEN5
  // The same numbers in fewer operations, all of which would take a multiplier
  // from others: what is left of any x below -127 is finite, so of -inf too,
  // and Ldexp makes 0 of both.
  constexpr int kToEighths = 3 << 4 | _MM_FROUND_TO_NEAREST_INT;
  return {hn::Add(x, magic), V{_mm512_reduce_ps(x.raw, kToEighths)}};
#else
  x = AtLeast(x, -127.0f);
  const V sum = hn::Add(x, magic);
  return {sum, hn::Sub(x, hn::Sub(sum, magic))};
#endif
}

// Several at once, step by step: one after the other they would fill Zen 3's
// schedulers with what waits for the step before (in turns, 8x512 1% faster,
// longer prefill 0 to 1%). This is the part without the power of two.
template <int kDegree, int kCount>
HWY_INLINE void JoinFractions(const SplitExponent (&split)[kCount],
                              V (&powers)[kCount]) {
  if constexpr (kDegree == 2) {
    HWY_UNROLL(8) for (int i = 0; i < kCount; ++i) {
      const V shifted = hn::Add(split[i].rest, Broadcast(Exp2Square::kShift));
      powers[i] = Fma(shifted, shifted, Broadcast(Exp2Square::kRest));
    }
    HWY_UNROLL(8) for (int i = 0; i < kCount; ++i) {
      powers[i] =
          hn::Mul(powers[i], Exp2Table<Exp2Square, 0>::Look(split[i].sum));
    }
  } else {
    HWY_UNROLL(8) for (int i = 0; i < kCount; ++i) {
      powers[i] = Exp2Table<Exp2Cubic, 2>::Look(split[i].sum);
    }
    HWY_UNROLL(8) for (int i = 0; i < kCount; ++i) {
      powers[i] = Fma(split[i].rest,
                      Exp2Table<Exp2Cubic, 3>::Look(split[i].sum), powers[i]);
    }
    HWY_UNROLL(8) for (int i = 0; i < kCount; ++i) {
      powers[i] = Fma(split[i].rest, powers[i],
                      Exp2Table<Exp2Cubic, 1>::Look(split[i].sum));
    }
    HWY_UNROLL(8) for (int i = 0; i < kCount; ++i) {
      powers[i] = Fma(split[i].rest, powers[i],
                      Exp2Table<Exp2Cubic, 0>::Look(split[i].sum));
    }
  }
}

template <int kDegree, int kCount>
HWY_INLINE void JoinExp2s(const SplitExponent (&split)[kCount],
                          V (&powers)[kCount]) {
  JoinFractions<kDegree>(split, powers);
  HWY_UNROLL(8) for (int i = 0; i < kCount; ++i) {
    powers[i] = Ldexp(powers[i], split[i].sum);
  }
}

template <int kDegree>
HWY_INLINE V JoinExp2(const SplitExponent& split) {
  const SplitExponent one[1] = {split};
  V power[1];
  JoinExp2s<kDegree>(one, power);
  return power[0];
}

template <int kDegree>
HWY_INLINE V Exp2(V x) {
  return JoinExp2<kDegree>(SplitExp2(x));
}

template <int kDegree>
HWY_INLINE float Exp2Scalar(float x) {
  return hn::GetLane(Exp2<kDegree>(Broadcast(x)));
}

}  // namespace VARLANE_NS
}  // namespace varlane
