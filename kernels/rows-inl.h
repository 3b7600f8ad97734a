// Rows of a threadgroup: packing q, the online softmax, finishing and merging.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// A row's weights rescale only when a tile's maximum exceeds the reference
// maximum by more than this (log2 units): sums stay below 2^8 x tokens.
constexpr float kRescaleHeadroom = 8.0f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// --- elements in and out ----------------------------------------------------

// Reads n elements of `dtype` as fp32. n need not be a multiple of anything.
HWY_INLINE void ReadRow(const void* from, DType dtype, int n,
                        float* HWY_RESTRICT to) {
  const hn::Rebind<uint16_t, D> d16;
  const int whole = n - n % static_cast<int>(kN);
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
  } else if (dtype == DType::kBF16) {
    const auto* p = static_cast<const uint16_t*>(from);
    for (int i = 0; i < whole; i += static_cast<int>(kN)) {
      const auto wide = hn::PromoteTo(DU(), hn::LoadU(d16, p + i));
      StoreF(hn::BitCast(D(), hn::ShiftLeft<16>(wide)), to + i);
    }
    for (int i = whole; i < n; ++i) to[i] = ToFloat(BF16{p[i]});
  } else {
    const auto* p = static_cast<const uint16_t*>(from);
    for (int i = 0; i < whole; i += static_cast<int>(kN)) {
      StoreF(LoadF16(p + i), to + i);
    }
    for (int i = whole; i < n; ++i) to[i] = ToFloat(F16{p[i]});
  }
}

// Writes n fp32 as `dtype`, rounding to nearest even.
HWY_INLINE void WriteRow(const float* HWY_RESTRICT from, DType dtype, int n,
                         void* to) {
  const hn::Rebind<uint16_t, D> d16;
  const int whole = n - n % static_cast<int>(kN);
  if (dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
  } else if (dtype == DType::kBF16) {
    auto* p = static_cast<uint16_t*>(to);
    for (int i = 0; i < whole; i += static_cast<int>(kN)) {
      const auto bits = hn::BitCast(DI(), RoundToBf16(LoadF(from + i)));
      hn::StoreU(hn::DemoteTo(d16, bits), d16, p + i);
    }
    for (int i = whole; i < n; ++i) p[i] = ToBF16(from[i]).bits;
  } else {
    auto* p = static_cast<uint16_t*>(to);
    for (int i = 0; i < whole; i += static_cast<int>(kN)) {
      StoreF16(LoadF(from + i), p + i);
    }
    for (int i = whole; i < n; ++i) p[i] = ToF16(from[i]).bits;
  }
}

HWY_INLINE const void* RowAt(const void* base, DType dtype, int64_t elements) {
  return static_cast<const std::byte*>(base) +
         elements * static_cast<int64_t>(SizeOf(dtype));
}
HWY_INLINE void* RowAt(void* base, DType dtype, int64_t elements) {
  return static_cast<std::byte*>(base) +
         elements * static_cast<int64_t>(SizeOf(dtype));
}

// Packs one q row to operands, contiguous. `floats` [head_size + kLanes] is
// scratch. A pair of bf16 operands stands in memory as the row itself does.
template <class Ops>
HWY_NOINLINE void PackQuery(const AttendArgs& args, int64_t token, int64_t head,
                            float* HWY_RESTRICT floats,
                            typename Ops::Operand* HWY_RESTRICT to) {
  const void* from =
      RowAt(args.q, args.q_dtype,
            token * args.q_token_stride + head * args.q_head_stride);
#if VARLANE_NATIVE_BF16
  if (Ops::kPack == 2 && args.q_dtype == DType::kBF16 && !args.negate_q) {
    std::memcpy(to, from, static_cast<size_t>(args.head_size) * 2);
    return;
  }
#endif
  ReadRow(from, args.q_dtype, args.head_size, floats);
  const V sign = Broadcast(args.negate_q ? -1.0f : 1.0f);
  constexpr int kStep = static_cast<int>(kN);
#if VARLANE_NATIVE_BF16
  if constexpr (Ops::kPack == 2) {
    for (int d = 0; d < args.head_size; d += 2 * kStep) {
      Ops::StorePairs(hn::Mul(LoadF(floats + d), sign),
                      hn::Mul(LoadF(floats + d + kStep), sign), to + d / 2);
    }
    return;
  }
#endif
  auto* out = reinterpret_cast<float*>(to);
  for (int d = 0; d < args.head_size; d += kStep) {
    StoreF(RoundOperand<Ops>(hn::Mul(LoadF(floats + d), sign)), out + d);
  }
}

// Correctly rounded division by one number: a reciprocal and two Newton steps
// instead of a division an element, which would cost as much as a short row's
// arithmetic. The second remainder is exact, so the last step rounds once.
// Source: P. Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", IBM J. Res. Dev. 34 (1990).
class Divisor {
 public:
  HWY_INLINE explicit Divisor(float by)
      : by_(Broadcast(by)), reciprocal_(Broadcast(1.0f / by)) {}

  HWY_INLINE V Divide(V x) const {
#if VARLANE_HAS_FMA
    const V first = hn::Mul(x, reciprocal_);
    const V error = hn::NegMulAdd(first, by_, x);
    const V second = Fma(error, reciprocal_, first);
    const V rest = hn::NegMulAdd(second, by_, x);
    const V quotient = Fma(rest, reciprocal_, second);
    return hn::IfThenElse(hn::IsNaN(error), first, quotient);  // infinities
#else
    return hn::Div(x, by_);
#endif
  }

 private:
  V by_;
  V reciprocal_;
};

// --- online softmax ----------------------------------------------------------

// One row's running state. Maxima are of raw scores resp. in log2 units.
struct RowState {
  float threshold;  // raw score above which the row rescales
  float max;        // reference maximum x scale_log2; -inf before any key
};

HWY_INLINE void ResetRow(RowState& state, float* HWY_RESTRICT lanes,
                         float* HWY_RESTRICT acc, int acc_floats) {
  state = {kMinusInf, kMinusInf};
  std::memset(lanes, 0, kLanes * sizeof(float));
  std::memset(acc, 0, static_cast<size_t>(acc_floats) * sizeof(float));
}

// Moves the reference maximum to this tile's: rare after the first tile, where
// there is nothing to rescale.
template <class Ops>
HWY_NOINLINE void Rescale(float tile_max, float scale_log2, RowState& state,
                          float* HWY_RESTRICT lanes, float* HWY_RESTRICT acc,
                          int acc_floats) {
  const float new_max = tile_max * scale_log2;
  if (state.max != kMinusInf) {
    const V alpha = Exp2<Ops::kExpDegree>(Broadcast(state.max - new_max));
    for (int i = 0; i < kLanes; i += static_cast<int>(kN)) {
      StoreF(hn::Mul(LoadF(lanes + i), alpha), lanes + i);
    }
    for (int i = 0; i < acc_floats; i += static_cast<int>(kN)) {
      StoreF(hn::Mul(LoadF(acc + i), alpha), acc + i);
    }
  }
  state.max = new_max;
  state.threshold = tile_max + kRescaleHeadroom / scale_log2;
}

// Scores [at, at + kN) where they lie in [begin, end), -inf elsewhere.
HWY_INLINE V LoadMasked(const float* scores, int at, int begin, int end) {
  const V minus_inf = Broadcast(kMinusInf);
  const int first = begin - at;
  const int last = end - at;
  if (last <= 0 || first >= static_cast<int>(kN)) return minus_inf;
  V s = LoadF(scores + at);
  if (first > 0) {
    const auto before = hn::FirstN(D(), static_cast<size_t>(first));
    s = hn::IfThenElse(before, minus_inf, s);
  }
  if (last < static_cast<int>(kN)) {
    const auto seen = hn::FirstN(D(), static_cast<size_t>(last));
    s = hn::IfThenElse(seen, s, minus_inf);
  }
  return s;
}

// Turns the scores of one row and tile into weights p = 2^(s x scale - max) and
// adds them to the row's lane sums. `visible` in [1, kKeyTile]: later scores
// are masked. Returns false when every score so far is -inf: nothing to add
// then.
//
// `before_rescale` is called before acc is rescaled. The lanes of the sum are
// token mod 16 whatever the vector width.
template <class Ops, class BeforeRescale>
HWY_INLINE bool SoftmaxRow(const float* HWY_RESTRICT scores, int begin, int end,
                           float scale_log2, RowState& state,
                           float* HWY_RESTRICT lanes, float* HWY_RESTRICT acc,
                           int acc_floats,
                           typename Ops::Operand* HWY_RESTRICT p,
                           const BeforeRescale& before_rescale) {
  V s[kTileVecs];
  if (HWY_LIKELY(end - begin == kKeyTile)) {
    HWY_UNROLL(16) for (int v = 0; v < kTileVecs; ++v) {
      s[v] = LoadF(scores + v * static_cast<int>(kN));
    }
  } else {
    for (int v = 0; v < kTileVecs; ++v) {
      s[v] = LoadMasked(scores, v * static_cast<int>(kN), begin, end);
    }
  }
  V high = s[0];
  HWY_UNROLL(16) for (int v = 1; v < kTileVecs; ++v) {
    high = hn::Max(high, s[v]);
  }
  // The horizontal maximum is needed only where the row may rescale. A NaN that
  // Max dropped still shows: its own weight is NaN.
  if (state.max == kMinusInf ||
      !hn::AllTrue(D(), hn::Le(high, Broadcast(state.threshold)))) {
    auto nan = hn::IsNaN(s[0]);
    for (int v = 1; v < kTileVecs; ++v) nan = hn::Or(nan, hn::IsNaN(s[v]));
    const float tile_max = hn::AllFalse(D(), nan)
                               ? hn::GetLane(hn::MaxOfLanes(D(), high))
                               : std::numeric_limits<float>::quiet_NaN();
    if (tile_max == kMinusInf) return false;  // only before the first finite
    before_rescale();
    Rescale<Ops>(tile_max, scale_log2, state, lanes, acc, acc_floats);
  }

  const V scale = Broadcast(scale_log2);
  const V minus_max = Broadcast(-state.max);
  HWY_UNROLL(16) for (int v = 0; v < kTileVecs; ++v) {
    s[v] = Exp2<Ops::kExpDegree>(Fma(s[v], scale, minus_max));
  }
  constexpr int kLaneVecs = kLanes / static_cast<int>(kN);
  HWY_UNROLL(16) for (int i = 0; i < kLaneVecs; ++i) {
    V sum = LoadF(lanes + i * static_cast<int>(kN));
    HWY_UNROLL(16) for (int g = 0; g < kGroups; ++g) {
      sum = hn::Add(sum, s[g * kLaneVecs + i]);
    }
    StoreF(sum, lanes + i * static_cast<int>(kN));
  }
#if VARLANE_NATIVE_BF16
  if constexpr (Ops::kPack == 2) {
    Ops::StorePairs(s[0], s[1], p);
    Ops::StorePairs(s[2], s[3], p + kLanes);
    return true;
  }
#endif
  auto* floats = reinterpret_cast<float*>(p);
  HWY_UNROLL(16) for (int v = 0; v < kTileVecs; ++v) {
    StoreF(RoundOperand<Ops>(s[v]), floats + v * static_cast<int>(kN));
  }
  return true;
}

// --- states in memory
// ----------------------------------------------------------

// A merged state: m (log2 units), l, acc [Dv'].
struct State {
  float max;
  float sum;
  float* acc;
};

// into = into (+) from, in this order; an empty state changes nothing.
// Source: online softmax, Milakov & Gimelshein, arXiv:1805.02867; the merge of
// partial states as FlashInfer, docs/tutorials/recursive_attention.rst.
template <class Ops>
HWY_INLINE void MergeState(State& into, float max, float sum,
                           const float* HWY_RESTRICT acc, int acc_floats) {
  if (max == kMinusInf) return;
  if (into.max == kMinusInf) {
    into.max = max;
    into.sum = sum;
    std::memcpy(into.acc, acc, static_cast<size_t>(acc_floats) * sizeof(float));
    return;
  }
  const float new_max = into.max > max ? into.max : max;
  const V a = Exp2<Ops::kExpDegree>(Broadcast(into.max - new_max));
  const V b = Exp2<Ops::kExpDegree>(Broadcast(max - new_max));
  for (int i = 0; i < acc_floats; i += static_cast<int>(kN)) {
    const V scaled = hn::Mul(LoadF(into.acc + i), a);
    StoreF(Fma(LoadF(acc + i), b, scaled), into.acc + i);
  }
  into.sum =
      hn::GetLane(Fma(Broadcast(sum), b, hn::Mul(Broadcast(into.sum), a)));
  into.max = new_max;
}

// One more logit without a value: it counts in the sum only.
template <class Ops>
HWY_INLINE void AddSink(float sink, State& state, int acc_floats) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const float max = sink * kLog2E;
  if (state.max == kMinusInf) {
    std::memset(state.acc, 0, static_cast<size_t>(acc_floats) * sizeof(float));
    state.sum = 0;
    state.max = max;
  }
  if (max > state.max) {
    const V scale = Exp2<Ops::kExpDegree>(Broadcast(state.max - max));
    for (int i = 0; i < acc_floats; i += static_cast<int>(kN)) {
      StoreF(hn::Mul(LoadF(state.acc + i), scale), state.acc + i);
    }
    state.sum *= hn::GetLane(scale);
    state.max = max;
  }
  state.sum += Exp2Scalar<Ops::kExpDegree>(max - state.max);
}

// out = acc / sum and the natural LSE. acc is overwritten.
template <class Ops>
HWY_INLINE void FinishRow(State state, const float* sink, int v_head_size,
                          DType out_dtype, void* out, float* lse) {
  if (sink != nullptr) {
    AddSink<Ops>(*sink, state, (v_head_size + kLanes - 1) / kLanes * kLanes);
  }
  if (state.max == kMinusInf) {  // saw nothing
    std::memset(out, 0, static_cast<size_t>(v_head_size) * SizeOf(out_dtype));
    if (lse != nullptr) *lse = kMinusInf;
    return;
  }
  const Divisor divisor(state.sum);
  constexpr int kStep = static_cast<int>(kN);
  int i = 0;
  if (out_dtype == DType::kF32) {
    auto* floats = static_cast<float*>(out);
    for (; i + kStep <= v_head_size; i += kStep) {
      StoreF(divisor.Divide(LoadF(state.acc + i)), floats + i);
    }
  }
  const int left = v_head_size - i;
  for (int j = i; j < v_head_size; j += kStep) {
    StoreF(divisor.Divide(LoadF(state.acc + j)), state.acc + j);
  }
  WriteRow(state.acc + i, out_dtype, left, RowAt(out, out_dtype, i));
  if (lse != nullptr) {
    constexpr double kLn2 = 0.693147180559945309417;
    *lse = static_cast<float>((static_cast<double>(state.max) +
                               std::log2(static_cast<double>(state.sum))) *
                              kLn2);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
