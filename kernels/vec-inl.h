// Vector vocabulary of the kernels: the only file that knows what a target has.
//
// Included once per pass by pass-inl.h, hence no guard. Everything above is
// written in terms of:
//   D, V, kN          fp32 vectors of at most kLanes lanes
//   Exp2<degree>      2^x with exact 2^0 = 1 and 2^-inf = 0
//   Ops{F32,F16,Bf16} how cache elements and broadcast operands multiply
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, kLanes>;
using DU = hn::Rebind<uint32_t, D>;
using DI = hn::Rebind<int32_t, D>;
using V = hn::Vec<D>;
constexpr size_t kN = hn::MaxLanes(D());
static_assert(kLanes % kN == 0, "lanes of the running sum must tile");
// Vectors of one softmax step, and of one register tile beside 4 rows: 16
// accumulators where there are 32 registers, 8 where there are 16.
constexpr int kTileVecs = kKeyTile / static_cast<int>(kN);
#if HWY_TARGET <= HWY_AVX3 || !HWY_ARCH_X86
constexpr int kMaxVecs = 4;
#else
constexpr int kMaxVecs = 2;
#endif

HWY_INLINE V Zero() { return hn::Zero(D()); }
HWY_INLINE V Broadcast(float x) { return hn::Set(D(), x); }
HWY_INLINE V LoadF(const float* p) { return hn::LoadU(D(), p); }
HWY_INLINE void StoreF(V v, float* p) { hn::StoreU(v, D(), p); }
// The one fused operation results depend on; on targets without FMA two.
HWY_INLINE V Fma(V a, V b, V c) { return hn::MulAdd(a, b, c); }

// p * 2^n for integral n in [-127, 127]. Results below 2^-126 count as zero:
// the kernels run with denormals flushed.
HWY_INLINE V Ldexp(V p, V n) {
#if HWY_TARGET == HWY_AVX3
  return V{_mm512_scalef_ps(p.raw, n.raw)};
#else
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(DI(), n));
  return hn::BitCast(D(), hn::Add(hn::BitCast(DI(), p), exponent));
#endif
}

// 2^x for x <= 127: minimax on [0, 1) with the constant term fixed to 1, so
// that 2^0 is exactly 1; degree 4 has a relative error of 2.9e-6, degree 5 of
// 8.3e-8 (Remez exchange). NaN stays NaN, -inf gives 0.
template <int kDegree>
HWY_INLINE V Exp2(V x) {
  static_assert(kDegree == 4 || kDegree == 5);
  // This order keeps NaN on x86: max returns its second operand then.
  x = hn::Max(Broadcast(-127.0f), x);
  const V n = hn::Floor(x);
  const V f = hn::Sub(x, n);
  V p;
  if constexpr (kDegree == 4) {
    p = Fma(Broadcast(0.0134266838f), f, Broadcast(0.0522424765f));
    p = Fma(p, f, Broadcast(0.241280198f));
    p = Fma(p, f, Broadcast(0.693044841f));
  } else {
    p = Fma(Broadcast(0.00186713017f), f, Broadcast(0.00901702978f));
    p = Fma(p, f, Broadcast(0.0557999127f));
    p = Fma(p, f, Broadcast(0.240164444f));
    p = Fma(p, f, Broadcast(0.693151295f));
  }
  return Ldexp(Fma(p, f, Broadcast(1.0f)), n);
}

template <int kDegree>
HWY_INLINE float Exp2Scalar(float x) {
  return hn::GetLane(Exp2<kDegree>(Broadcast(x)));
}

// fp32 to bf16, to nearest even, as 16 bits in each 32-bit lane. NaN stays.
HWY_INLINE hn::Vec<DU> RoundToBf16(V v) {
  const DU du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded =
      hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

// --- how cache elements multiply -------------------------------------------
//
// Ops::Raw      one vector of cache lanes, ready to multiply
// Ops::Operand  what is broadcast against it: one (pair of) q or p
// Ops::kPack    cache elements a lane (x and y of kv_layout.h)
// MulAdd(acc, raw, operand): for a pair the odd product is added first, then
//   the even one, each fused: exactly what VDPBF16PS does (PEERS section 5).

struct OpsF32 {
  using Cache = float;
  using Operand = float;
  using Raw = V;
  static constexpr int kPack = 1;
  static constexpr int kExpDegree = 5;
  static constexpr bool kRoundQ = false;
  static HWY_INLINE Raw Load(const std::byte* p) {
    return hn::LoadU(D(), reinterpret_cast<const float*>(p));
  }
  static HWY_INLINE V MulAdd(V acc, Raw raw, Operand x) {
    return Fma(raw, Broadcast(x), acc);
  }
};

struct OpsF16 {
  using Cache = hwy::float16_t;
  using Operand = float;
  using Raw = V;
  static constexpr int kPack = 1;
  static constexpr int kExpDegree = 5;
  static constexpr bool kRoundQ = false;
  static HWY_INLINE Raw Load(const std::byte* p) {
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(
        D(), hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
  }
  static HWY_INLINE V MulAdd(V acc, Raw raw, Operand x) {
    return Fma(raw, Broadcast(x), acc);
  }
};

#if VARLANE_NATIVE_BF16
struct OpsBf16 {
  using Cache = uint16_t;
  using Operand = uint32_t;  // two bf16, even in the low half
  using Raw = hn::Vec<DU>;
  static constexpr int kPack = 2;
  static constexpr int kExpDegree = 4;
  static constexpr bool kRoundQ = true;
  static HWY_INLINE Raw Load(const std::byte* p) {
    return hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(p));
  }
  static HWY_INLINE Raw DropOdd(Raw raw) {
    return hn::And(raw, hn::Set(DU(), 0xffffu));
  }
  static HWY_INLINE V MulAdd(V acc, Raw raw, Operand x) {
    const auto pair = hn::Set(DU(), x);
    return V{_mm512_dpbf16_ps(acc.raw, reinterpret_cast<__m512bh>(raw.raw),
                              reinterpret_cast<__m512bh>(pair.raw))};
  }
  // Two vectors of fp32 to 32 bf16 operands' halves, in order.
  static HWY_INLINE void StorePairs(V lo, V hi, Operand* to) {
    const __m512bh packed = _mm512_cvtne2ps_pbh(hi.raw, lo.raw);
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(packed));
  }
};
#else
struct OpsBf16 {
  using Cache = uint16_t;
  struct Operand {
    float even;
    float odd;
  };
  struct Raw {
    V even;
    V odd;
  };
  static constexpr int kPack = 2;
  static constexpr int kExpDegree = 4;
  static constexpr bool kRoundQ = true;
  static HWY_INLINE Raw Load(const std::byte* p) {
    const auto pair = hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(p));
    return {hn::BitCast(D(), hn::ShiftLeft<16>(pair)),
            hn::BitCast(D(), hn::And(pair, hn::Set(DU(), 0xffff0000u)))};
  }
  static HWY_INLINE Raw DropOdd(Raw raw) { return {raw.even, Zero()}; }
  static HWY_INLINE V MulAdd(V acc, Raw raw, Operand x) {
    acc = Fma(raw.odd, Broadcast(x.odd), acc);
    return Fma(raw.even, Broadcast(x.even), acc);
  }
};
#endif

// Rounds fp32 to what Ops multiplies and keeps it as fp32.
template <class Ops>
HWY_INLINE V RoundOperand(V v) {
  if constexpr (Ops::kRoundQ) {
    return hn::BitCast(D(), hn::ShiftLeft<16>(RoundToBf16(v)));
  } else {
    return v;
  }
}

// 0 -> 16 lanes summed in one fixed shape, whatever the vector width.
HWY_INLINE float SumLanes(const float* lanes) {
  float sum[kLanes];
  for (int i = 0; i < kLanes; ++i) sum[i] = lanes[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  }
  return sum[0];
}

// Flushes denormals while it lives: they would make results depend on the
// instruction set (VDPBF16PS always flushes) and cost hundreds of cycles.
class ScopedFlushDenormals {
 public:
#if HWY_ARCH_X86
  static constexpr unsigned kFtzDaz = 0x8040;
  HWY_INLINE ScopedFlushDenormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | kFtzDaz);
  }
  HWY_INLINE ~ScopedFlushDenormals() { _mm_setcsr(saved_); }
#elif HWY_ARCH_ARM_A64
  static constexpr uint64_t kFz = uint64_t{1} << 24;
  HWY_INLINE ScopedFlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | kFz));
  }
  HWY_INLINE ~ScopedFlushDenormals() {
    asm volatile("msr fpcr, %0" ::"r"(saved_));
  }
#else
  ScopedFlushDenormals() : saved_(0) { (void)saved_; }
#endif
  ScopedFlushDenormals(const ScopedFlushDenormals&) = delete;
  ScopedFlushDenormals& operator=(const ScopedFlushDenormals&) = delete;

 private:
#if HWY_ARCH_ARM_A64
  uint64_t saved_;
#else
  unsigned saved_;
#endif
};

}  // namespace VARLANE_NS
}  // namespace varlane
