// Vector vocabulary of the kernels. With exp2-inl.h the only file that knows
// what a target has.
//
// Included once per pass by pass-inl.h, hence no guard. Everything above is
// written in terms of:
//   D, V, kN          fp32 vectors of at most kLanes lanes
//   Ops{F32,F16,Bf16} how cache elements and broadcast operands multiply
// SPDX-License-Identifier: Apache-2.0

// Whether NaN behaves as x86 vector instructions have it.
#undef VARLANE_X86_VECTORS
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#define VARLANE_X86_VECTORS 1
#else
#define VARLANE_X86_VECTORS 0
#endif

// Whether f16 conversions are instructions. Highway 1.0.3 emulates them
// elsewhere without infinities, NaN or rounding to nearest: we do it right.
#undef VARLANE_NATIVE_F16
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
#define VARLANE_NATIVE_F16 0
#else
#define VARLANE_NATIVE_F16 1
#endif

// AVX-512 as Intel's CPUs have it. What they differ in, measured on Ice Lake
// and Emerald Rapids: all 512-bit arithmetic takes the ports of the two
// multipliers, so nothing hides behind multiply-adds; loads are scarce while
// the core's other thread runs; a prefetch waits for room and is not dropped.
// What AVX2's pass does was measured on Zen 3, that of VARLANE_ZEN5 on Zen 5
// and that of the others on Zen 4.
#undef VARLANE_INTEL_AVX512
#if HWY_TARGET == HWY_AVX3 && !VARLANE_FAST_BF16
#define VARLANE_INTEL_AVX512 1
#else
#define VARLANE_INTEL_AVX512 0
#endif

namespace varlane {
namespace VARLANE_NS {
namespace hn = hwy::HWY_NAMESPACE;

constexpr bool kIntelAvx512 = VARLANE_INTEL_AVX512;
constexpr bool kZen5 = VARLANE_ZEN5;
// 16 vector registers, 512 KiB of L2, two multiply-adds of 8 lanes a cycle.
constexpr bool kAvx2 = HWY_TARGET == HWY_AVX2;

using D = hn::CappedTag<float, kLanes>;
using DU = hn::Rebind<uint32_t, D>;
using DI = hn::Rebind<int32_t, D>;
using D16 = hn::Rebind<uint16_t, D>;
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
// Rows beside that many vectors. 6 rows by 4 vectors take 10 loads for 24
// multiply-adds, 4 rows 8 for 16. By 2 vectors 6 rows are 12 chains of them,
// where 8 are needed to hide their latency.
constexpr int kMaxRows = HWY_TARGET == HWY_AVX3 || kAvx2 ? 6 : 4;
// Vectors of a register tile of R rows; few rows would be too few chains.
template <int R>
constexpr int kVecsBeside = R > kMaxRows     ? kMaxVecs / 2
                            : kAvx2&& R <= 2 ? 2 * kMaxVecs
                                             : kMaxVecs;

HWY_INLINE V Zero() { return hn::Zero(D()); }
HWY_INLINE V Broadcast(float x) { return hn::Set(D(), x); }
HWY_INLINE V LoadF(const float* p) { return hn::LoadU(D(), p); }
HWY_INLINE void StoreF(V v, float* p) { hn::StoreU(v, D(), p); }

// Stores past the caches, where `kStreams`: whole lines, aligned, which others
// see after hwy::FlushStream. Not of less than a vector of Highway's.
constexpr bool kMayStream = kN >= 8;
template <bool kStreams, class VT, class Tag, class T>
HWY_INLINE void Put(VT v, Tag d, T* to) {
  static_assert(kMayStream || !kStreams);
  if constexpr (kStreams) {
    hn::Stream(v, d, to);
  } else {
    hn::StoreU(v, d, to);
  }
}

// The one fused operation results depend on: a * b + c, a * b - c, c - a * b.
#if VARLANE_HAS_FMA
HWY_INLINE V Fma(V a, V b, V c) { return hn::MulAdd(a, b, c); }
HWY_INLINE V FmaMinus(V a, V b, V c) { return hn::MulSub(a, b, c); }
HWY_INLINE V MinusFma(V a, V b, V c) { return hn::NegMulAdd(a, b, c); }
#else
HWY_INLINE V Fma(V a, V b, V c) { return FusedMulAdd(D(), a, b, c); }
HWY_INLINE V FmaMinus(V a, V b, V c) { return Fma(a, b, hn::Neg(c)); }
HWY_INLINE V MinusFma(V a, V b, V c) { return Fma(hn::Neg(a), b, c); }
#endif

// acc += a * b, fused. GCC else lets sums change registers, and moves and
// spills them where they take 12 of 16.
HWY_INLINE void FmaInto(V& acc, V a, V b) {
#if HWY_TARGET == HWY_AVX2
  auto sum = acc.raw;
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a.raw), "x"(b.raw));
  acc.raw = sum;
#else
  acc = Fma(a, b, acc);
#endif
}

// fp32 bits whose high halves are bf16, to nearest even; of a NaN anything.
HWY_INLINE hn::Vec<DU> RaiseToBf16(hn::Vec<DU> bits) {
  const DU du;
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff)));
}

// fp32 to bf16, to nearest even, as 16 bits in each 32-bit lane. NaN stays.
HWY_INLINE hn::Vec<DU> RoundToBf16(V v) {
  const DU du;
  const auto bits = hn::BitCast(du, v);
  const auto rounded = hn::ShiftRight<16>(RaiseToBf16(bits));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

// f16 bits to fp32 and, to nearest even, back.
// Source of the branch-free forms: F. Giesen, "half <-> float conversions"
// (float_to_half_fast3_rtne), public domain.
HWY_INLINE V LoadF16(const uint16_t* from) {
  const D16 d16;
#if VARLANE_NATIVE_F16
  const hn::Rebind<hwy::float16_t, D> dh;
  return hn::PromoteTo(D(), hn::BitCast(dh, hn::LoadU(d16, from)));
#else
  const DU du;
  const auto half = hn::PromoteTo(du, hn::LoadU(d16, from));
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
  const auto shifted = hn::ShiftLeft<13>(hn::And(half, hn::Set(du, 0x7fffu)));
  const auto exponent = hn::And(shifted, hn::Set(du, 0x0f800000u));
  const auto bits = hn::Add(shifted, hn::Set(du, 112u << 23));
  // Infinity and NaN take the rest of the exponent; denormals renormalise.
  const auto special = hn::Add(bits, hn::Set(du, 112u << 23));
  const auto denormal = hn::BitCast(
      du, hn::Sub(hn::BitCast(D(), hn::Add(bits, hn::Set(du, 1u << 23))),
                  hn::BitCast(D(), hn::Set(du, 113u << 23))));
  const auto is_special = hn::Eq(exponent, hn::Set(du, 0x0f800000u));
  const auto is_small = hn::Eq(exponent, hn::Zero(du));
  const auto magnitude = hn::IfThenElse(
      is_special, special, hn::IfThenElse(is_small, denormal, bits));
  return hn::BitCast(D(), hn::Or(magnitude, sign));
#endif
}

HWY_INLINE hn::Vec<D16> ToF16(V v) {
  const D16 d16;
#if VARLANE_NATIVE_F16
  const hn::Rebind<hwy::float16_t, D> dh;
  return hn::BitCast(d16, hn::DemoteTo(dh, v));
#else
  const DU du;
  const DI di;
  const auto bits = hn::BitCast(du, v);
  const auto sign = hn::And(bits, hn::Set(du, 0x80000000u));
  const auto magnitude = hn::Xor(bits, sign);
  const auto magic = hn::Set(du, 126u << 23);
  const auto small = hn::Sub(
      hn::BitCast(
          du, hn::Add(hn::BitCast(D(), magnitude), hn::BitCast(D(), magic))),
      magic);
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
  const auto normal = hn::ShiftRight<13>(
      hn::Add(hn::Add(magnitude, hn::Set(du, 0xc8000fffu)), odd));
  // Signed comparisons are right: the sign bit is gone.
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  const auto is_nan =
      hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 255 << 23)));
  const auto is_large = hn::RebindMask(
      du, hn::Gt(signed_magnitude, hn::Set(di, (143 << 23) - 1)));
  const auto is_small =
      hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 113 << 23)));
  auto half = hn::IfThenElse(is_small, small, normal);
  half = hn::IfThenElse(is_large, hn::Set(du, 0x7c00u), half);
  half = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00u), half);
  half = hn::Or(half, hn::ShiftRight<16>(sign));
  return hn::DemoteTo(d16, hn::BitCast(di, half));
#endif
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
  static constexpr int kExpDegree = 3;
  static constexpr bool kRoundQ = false;
  static HWY_INLINE Raw Load(const std::byte* p) {
    return hn::LoadU(D(), reinterpret_cast<const float*>(p));
  }
  static HWY_INLINE void Store(Raw raw, float* to) { StoreF(raw, to); }
  static HWY_INLINE V MulAdd(V acc, Raw raw, Operand x) {
    return Fma(raw, Broadcast(x), acc);
  }
};

struct OpsF16 {
  using Cache = uint16_t;
  using Operand = float;
  using Raw = V;
  static constexpr int kPack = 1;
  static constexpr int kExpDegree = 3;
  static constexpr bool kRoundQ = false;
  static HWY_INLINE Raw Load(const std::byte* p) {
    return LoadF16(reinterpret_cast<const uint16_t*>(p));
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
  static constexpr int kExpDegree = 2;
  static constexpr bool kRoundQ = true;
  static HWY_INLINE Raw Load(const std::byte* p) {
    return hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(p));
  }
  static HWY_INLINE Raw DropOdd(Raw raw) {
    return hn::And(raw, hn::Set(DU(), 0xffffu));
  }
  static HWY_INLINE Raw DropEven(Raw raw) {
    return hn::And(raw, hn::Set(DU(), 0xffff0000u));
  }
  static HWY_INLINE V MulAdd(V acc, Raw raw, Operand x) {
    const auto pair = hn::Set(DU(), x);
    return V{_mm512_dpbf16_ps(acc.raw, reinterpret_cast<__m512bh>(raw.raw),
                              reinterpret_cast<__m512bh>(pair.raw))};
  }
  // Two vectors of fp32 to 32 bf16 operands' halves, in order.
  template <bool kStreams = false>
  static HWY_INLINE void StorePairs(V lo, V hi, void* to) {
    const __m512bh packed = _mm512_cvtne2ps_pbh(hi.raw, lo.raw);
    Put<kStreams>(Raw{reinterpret_cast<__m512i>(packed)}, DU(),
                  static_cast<uint32_t*>(to));
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
  static constexpr int kExpDegree = 2;
  static constexpr bool kRoundQ = true;
  static HWY_INLINE Raw Load(const std::byte* p) {
    const auto pair = hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(p));
    return {hn::BitCast(D(), hn::ShiftLeft<16>(pair)),
            hn::BitCast(D(), hn::And(pair, hn::Set(DU(), 0xffff0000u)))};
  }
  static HWY_INLINE Raw DropOdd(Raw raw) { return {raw.even, Zero()}; }
  static HWY_INLINE Raw DropEven(Raw raw) { return {Zero(), raw.odd}; }
  static HWY_INLINE V MulAdd(V acc, Raw raw, Operand x) {
    acc = Fma(raw.odd, Broadcast(x.odd), acc);
    return Fma(raw.even, Broadcast(x.even), acc);
  }
};

// The same of fp32: a vector of even elements, then one of odd ones.
struct OpsBf16Wide : OpsBf16 {
  using Cache = float;
  static HWY_INLINE Raw Load(const std::byte* p) {
    const auto* floats = reinterpret_cast<const float*>(p);
    return {LoadF(floats), LoadF(floats + kN)};
  }
  static HWY_INLINE void Store(Raw raw, float* to) {
    StoreF(raw.even, to);
    StoreF(raw.odd, to + kN);
  }
};
#endif

// Whether each number is converted to fp32 where it is read, f16's.
template <class Ops>
constexpr bool kConverts = Ops::kPack == 1 &&
                           sizeof(typename Ops::Cache) != sizeof(float);

// Rows of a register tile, at most. Twice as many beside half of the vectors
// share each conversion where it takes a multiplier's port (Emerald Rapids, in
// turns: 5 tokens of a group of 4, 7% faster in bf16 and 17% in f16; one token
// of a group of 8, 9% and 14%).
//
// On Zen 5 a single group of up to 8 or 12 rows streams K/V from memory at its
// pace and from a cache once, where two groups read it twice (in turns, one
// token of a group of 8: f32 19 to 26% faster from DRAM, 20% from L3; bf16 16%
// from L3, from DRAM at head size 256 20%, at 128 7% faster to 4% slower; f16
// from DRAM 11 to 19%, from L2 and L3 2 to 8%, but 12 rows 2 to 8% slower).
template <class Ops>
constexpr int MostRows() {
  constexpr bool kIsF32 = sizeof(typename Ops::Cache) == sizeof(float);
  if (kIntelAvx512) return kIsF32 ? kMaxRows : 2 * kMaxRows;
  if (!kZen5) return kMaxRows;
  return kConverts<Ops> ? 8 : 2 * kMaxRows;
}
template <class Ops>
constexpr int kMostRows = MostRows<Ops>();
// The same where several groups pass a run.
template <class Ops>
constexpr int kMostOfSeveral = kZen5 ? kMaxRows : kMostRows<Ops>;

// Bytes of the cache in one lane, and in one vector.
template <class Ops>
constexpr size_t kLaneBytes = Ops::kPack * sizeof(typename Ops::Cache);
template <class Ops>
constexpr size_t kVecBytes = kN* kLaneBytes<Ops>;

// Bytes from a step's first vector in the cache to vector `vec`.
template <class Ops>
HWY_INLINE size_t VecOffset(int vec) {
  return static_cast<size_t>(vec) * kVecBytes<Ops>;
}

#if HWY_TARGET == HWY_AVX2
// In memory: as a register's mask they would be the 17th vector beside a tile.
alignas(32) constexpr uint32_t kHighHalves[8] = {
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
#endif

// The odd elements of pairs in two vectors; `kSparing` of registers.
template <class Ops, bool kSparing>
HWY_INLINE V LoadOdd(const std::byte* p) {
#if HWY_TARGET == HWY_AVX2
  if constexpr (kSparing) {
    V odd;
    asm("vmovups %1, %0\n\tvandps %2, %0, %0"
        : "=x"(odd.raw)
        : "m"(*reinterpret_cast<const __m256_u*>(p)), "m"(kHighHalves));
    return odd;
  }
#endif
  return Ops::Load(p).odd;
}

// Rounds fp32 to what Ops multiplies and keeps it as fp32.
template <class Ops>
HWY_INLINE V RoundOperand(V v) {
  if constexpr (Ops::kRoundQ) {
    return hn::BitCast(D(), hn::ShiftLeft<16>(RoundToBf16(v)));
  } else {
    return v;
  }
}

// The same of weights, without an eye to NaN: a row with such a weight has it
// in its sum, and so in all it gives, whatever becomes of it here.
template <class Ops>
HWY_INLINE V RoundWeight(V v) {
  if constexpr (Ops::kRoundQ) {
    const DU du;
    const auto raised = RaiseToBf16(hn::BitCast(du, v));
    return hn::BitCast(D(), hn::And(raised, hn::Set(du, 0xffff0000u)));
  } else {
    return v;
  }
}

// 16 lanes summed in one fixed shape, whatever the vector width: lane i and
// i + 8, then i + 4, i + 2, i + 1.
HWY_INLINE float SumLanes(const float* HWY_RESTRICT lanes) {
  alignas(32) float eight[8];
  const hn::CappedTag<float, 8> d8;
  const size_t n8 = hn::Lanes(d8);
  for (size_t i = 0; i < 8; i += n8) {
    hn::Store(hn::Add(hn::LoadU(d8, lanes + i), hn::LoadU(d8, lanes + 8 + i)),
              d8, eight + i);
  }
  alignas(16) float four[4];
  const hn::CappedTag<float, 4> d4;
  const size_t n4 = hn::Lanes(d4);
  for (size_t i = 0; i < 4; i += n4) {
    hn::Store(hn::Add(hn::Load(d4, eight + i), hn::Load(d4, eight + 4 + i)), d4,
              four + i);
  }
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// 0, on Zen 5 not before `line` has been read.
HWY_INLINE size_t ZeroOnceRead(const std::byte* line) {
#if VARLANE_ZEN5
  uint32_t zero;
  asm volatile("movl %1, %0\n\tandl $0, %0"
               : "=r"(zero)
               : "m"(*reinterpret_cast<const uint32_t*>(line))
               : "cc");
  return zero;
#else
  (void)line;
  return 0;
#endif
}

// So many cycles of Zen 5 as ZeroLater takes them: multiplications, of 3 each,
// above two bits for what is left.
HWY_INLINE int WaitOf(int cycles) { return cycles / 3 * 4 + cycles % 3; }

// `zero`, on Zen 5 so much later: an address that needs it waits for it, and so
// does the next one made of the result.
HWY_INLINE size_t ZeroLater(size_t zero, int wait) {
#if VARLANE_ZEN5
  for (int i = wait >> 2; i != 0; --i) {
    asm volatile("imulq %0, %0" : "+r"(zero) : : "cc");
  }
  if ((wait & 1) != 0) asm volatile("orq $0, %0" : "+r"(zero) : : "cc");
  if ((wait & 2) != 0) {
    asm volatile("orq $0, %0\n\torq $0, %0" : "+r"(zero) : : "cc");
  }
#else
  (void)wait;
#endif
  return zero;
}

// The CPU's clock of constant rate; elsewhere than on Zen 5, which alone needs
// it, 0.
HWY_INLINE uint64_t Ticks() {
#if VARLANE_ZEN5
  return __builtin_ia32_rdtsc();
#else
  return 0;
#endif
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
