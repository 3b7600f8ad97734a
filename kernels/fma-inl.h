// a * b + c rounded once on targets without that instruction, so that the bits
// of a result are the same on every one.
//
// Included once per pass by pass-inl.h and limits.cc, hence no guard.
// SPDX-License-Identifier: Apache-2.0

// Whether hn::MulAdd rounds once.
#undef VARLANE_HAS_FMA
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128 || \
    (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2)
#define VARLANE_HAS_FMA 0
#else
#define VARLANE_HAS_FMA 1
#endif

namespace varlane {
namespace VARLANE_NS {
namespace hn = hwy::HWY_NAMESPACE;

#if !VARLANE_HAS_FMA

// Where a sum in fp64 stands midway between two fp32 numbers.
template <class DD, class VD = hn::Vec<DD>>
HWY_INLINE auto IsTie(DD /*dd*/, VD sum) {
  const hn::Rebind<int64_t, DD> di;
  const auto past_fp32 = hn::And(hn::BitCast(di, sum), hn::Set(di, 0x1fffffff));
  return hn::Eq(past_fp32, hn::Set(di, 0x10000000));
}

// Where a sum in fp64 stands midway between two fp32 numbers but only since it
// was rounded itself, one step towards what was rounded off; others as they
// are. `product` and `addend` are what it is the sum of.
// Source: what is rounded off, D. Knuth, "The Art of Computer Programming",
// vol. 2, 4.2.2, theorem B.
template <class DD, class VD = hn::Vec<DD>>
HWY_NOINLINE VD StepOffTies(DD dd, VD product, VD addend, VD sum) {
  const hn::Rebind<int64_t, DD> di;
  const VD added = hn::Sub(sum, product);
  const VD off =
      hn::Add(hn::Sub(product, hn::Sub(sum, added)), hn::Sub(addend, added));
  const auto bits = hn::BitCast(di, sum);
  const auto steps =
      hn::AndNot(hn::RebindMask(di, hn::Eq(off, hn::Zero(dd))), IsTie(dd, sum));
  // 1 away from zero where the signs are the same, else -1.
  const auto step =
      hn::Or(hn::BroadcastSignBit(hn::Xor(bits, hn::BitCast(di, off))),
             hn::Set(di, 1));
  return hn::BitCast(dd, hn::Add(bits, hn::IfThenElseZero(steps, step)));
}

// In fp64, of numbers of fp32: what rounds to their a * b + c. The product is
// exact, and of the sum's rounding to 53 bits that to 24 hides everything, but
// where it makes a tie.
// Source: S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded
// sums: proved algorithms using rounding to odd", IEEE Trans. Comput. 57
// (2008).
template <class DD, class VD = hn::Vec<DD>>
HWY_INLINE VD MulAddToRound(DD dd, VD a, VD b, VD c) {
  const hn::Rebind<int64_t, DD> di;
  const VD product = hn::Mul(a, b);
  const VD sum = hn::Add(product, c);
  if (HWY_LIKELY(hn::AllFalse(di, IsTie(dd, sum)))) return sum;
  return StepOffTies(dd, product, c, sum);
}

// fp64 to fp32, infinities where it is out of range, which Highway saturates
// where it emulates.
template <class DF, class VD>
HWY_INLINE hn::Vec<DF> ToFp32(DF d, VD v) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  const hn::Rebind<double, DF> dd;
  alignas(16) double wide[hn::MaxLanes(dd)];
  alignas(16) float narrow[hn::MaxLanes(dd)];
  hn::Store(v, dd, wide);
  for (size_t i = 0; i < hn::MaxLanes(dd); ++i) {
    narrow[i] = static_cast<float>(wide[i]);
  }
  return hn::LoadU(d, narrow);
#else
  return hn::DemoteTo(d, v);
#endif
}

// Lane by lane a * b + c, rounded once to nearest even.
template <class DF, class VF = hn::Vec<DF>>
HWY_INLINE VF FusedMulAdd(DF d, VF a, VF b, VF c) {
#if HWY_TARGET == HWY_SCALAR
  const hn::Rebind<double, DF> dd;
  return ToFp32(d, MulAddToRound(dd, hn::PromoteTo(dd, a), hn::PromoteTo(dd, b),
                                 hn::PromoteTo(dd, c)));
#else
  const hn::Half<DF> dh;
  const hn::Rebind<double, decltype(dh)> dd;
  const auto lower = [&](VF v) HWY_ATTR {
    return hn::PromoteTo(dd, hn::LowerHalf(dh, v));
  };
  const auto upper = [&](VF v) HWY_ATTR {
    return hn::PromoteTo(dd, hn::UpperHalf(dh, v));
  };
  const auto low = MulAddToRound(dd, lower(a), lower(b), lower(c));
  const auto high = MulAddToRound(dd, upper(a), upper(b), upper(c));
  return hn::Combine(d, ToFp32(dh, high), ToFp32(dh, low));
#endif
}

#endif  // !VARLANE_HAS_FMA

}  // namespace VARLANE_NS
}  // namespace varlane
