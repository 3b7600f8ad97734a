// Rows of a threadgroup: packing q, finishing and merging.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// --- elements in and out ----------------------------------------------------

// Reads n elements of `dtype` as fp32. n need not be a multiple of anything.
HWY_INLINE void ReadRow(const void* from, DType dtype, int n,
                        float* HWY_RESTRICT to) {
  const D16 d16;
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

// Writes n values as `dtype`, rounding to nearest even; value(i) gives the
// vector from element i on, whose lanes past n are dropped. `kFlushed` says
// that no value is denormal: the CPU's own conversion to bf16 would lose them.
// `kStreams` as Put has it.
template <bool kFlushed, bool kStreams, class Value>
HWY_INLINE void WriteValues(DType dtype, int n, void* to, const Value& value) {
  constexpr int kStep = static_cast<int>(kN);
  int i = 0;
  if (dtype == DType::kF32) {
    auto* out = static_cast<float*>(to);
    for (; i + kStep <= n; i += kStep) Put<kStreams>(value(i), D(), out + i);
    if (kStreams || i == n) return;
    alignas(64) float rest[kLanes];
    StoreF(value(i), rest);
    for (int j = i; j < n; ++j) out[j] = rest[j - i];
    return;
  }
  auto* out = static_cast<uint16_t*>(to);
  const auto half = [&]() HWY_ATTR {
    if (dtype == DType::kF16) return ToF16(value(i));
    return hn::DemoteTo(D16(), hn::BitCast(DI(), RoundToBf16(value(i))));
  };
#if VARLANE_NATIVE_BF16
  if (kFlushed && dtype == DType::kBF16) {
    for (; i + 2 * kStep <= n; i += 2 * kStep) {
      const V lo = value(i);
      OpsBf16::StorePairs<kStreams>(lo, value(i + kStep), out + i);
    }
  }
#endif
  for (; i + kStep <= n; i += kStep) Put<kStreams>(half(), D16(), out + i);
  if (kStreams || i == n) return;
  alignas(64) uint16_t rest[kLanes];
  hn::StoreU(half(), D16(), rest);
  for (int j = i; j < n; ++j) out[j] = rest[j - i];
}

// The same of what stands in memory, readable to a whole vector.
HWY_INLINE void WriteRow(const float* HWY_RESTRICT from, DType dtype, int n,
                         void* to) {
  WriteValues<false, false>(dtype, n, to,
                            [&](int i) HWY_ATTR { return LoadF(from + i); });
}

HWY_INLINE const void* RowAt(const void* base, DType dtype, int64_t elements) {
  return static_cast<const std::byte*>(base) +
         elements * static_cast<int64_t>(SizeOf(dtype));
}
HWY_INLINE void* RowAt(void* base, DType dtype, int64_t elements) {
  return static_cast<std::byte*>(base) +
         elements * static_cast<int64_t>(SizeOf(dtype));
}

// Where q of a row stands that is so far from the one at `q`, and where its
// output goes.
HWY_INLINE const void* QueryRow(const AttendArgs& args, const void* q,
                                int64_t token, int64_t head) {
  return RowAt(q, args.q_dtype,
               token * args.q_token_stride + head * args.q_head_stride);
}
template <class Args>
HWY_INLINE void* OutRow(const Args& args, int64_t token, int64_t head) {
  return RowAt(args.out, args.out_dtype,
               token * args.out_token_stride + head * args.out_head_stride);
}

// Packs one q row to operands, contiguous. `floats` [head_size + kLanes] is
// scratch. Operands are the row's own numbers where nothing rounds them, and a
// pair of bf16 operands stands in memory as the row itself does.
template <class Ops>
HWY_NOINLINE void PackQuery(const AttendArgs& args, const void* from,
                            float* HWY_RESTRICT floats,
                            typename Ops::Operand* HWY_RESTRICT to) {
#if VARLANE_NATIVE_BF16
  if (Ops::kPack == 2 && args.q_dtype == DType::kBF16 && !args.negate_q) {
    std::memcpy(to, from, static_cast<size_t>(args.head_size) * 2);
    return;
  }
#endif
  if constexpr (!VARLANE_NATIVE_BF16 || Ops::kPack == 1) {
    const bool exact = !Ops::kRoundQ || args.q_dtype == DType::kBF16;
    if (exact && !args.negate_q) {
      ReadRow(from, args.q_dtype, args.head_size, reinterpret_cast<float*>(to));
      return;
    }
  }
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

// Division by one number: a reciprocal and Newton steps instead of a division
// an element, which would cost as much as a short row's arithmetic. The first
// step's remainder is nearly exact: what is to be rounded to 16 bits needs no
// more. The second one's is exact, so its last step rounds once.
// Source: P. Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", IBM J. Res. Dev. 34 (1990).
class Divisor {
 public:
  HWY_INLINE explicit Divisor(float by)
      : by_(Broadcast(by)), reciprocal_(Broadcast(1.0f / by)) {}

  // Collects into `odd` what is NaN where a quotient is not finite, and the
  // result to be taken from NotFinite.
  template <int kSteps>
  HWY_INLINE V Divide(V x, V& odd) const {
    V quotient = hn::Mul(x, reciprocal_);
    HWY_UNROLL(2) for (int step = 0; step < kSteps; ++step) {
      const V rest = MinusFma(quotient, by_, x);
      if (step == 0) odd = hn::Add(odd, rest);
      quotient = Fma(rest, reciprocal_, quotient);
    }
    return quotient;
  }

  HWY_INLINE V NotFinite(V x) const { return hn::Mul(x, reciprocal_); }

 private:
  V by_;
  V reciprocal_;
};

// acc / by, n elements of `dtype`. acc is readable to a multiple of kLanes.
template <int kSteps, bool kStreams>
HWY_INLINE void PutDivided(const float* HWY_RESTRICT acc, float by, DType dtype,
                           int n, void* to) {
  const Divisor divisor(by);
  V odd = Zero();
  WriteValues<true, kStreams>(dtype, n, to, [&](int i) HWY_ATTR {
    return divisor.Divide<kSteps>(LoadF(acc + i), odd);
  });
  if (HWY_LIKELY(hn::AllFalse(D(), hn::IsNaN(odd)))) return;
  WriteValues<true, kStreams>(dtype, n, to, [&](int i) HWY_ATTR {
    V rest = Zero();
    const V x = LoadF(acc + i);
    const V quotient = divisor.Divide<kSteps>(x, rest);
    return hn::IfThenElse(hn::IsNaN(rest), divisor.NotFinite(x), quotient);
  });
}

// The same past the caches. Called: it is seldom done, and long.
template <int kSteps>
HWY_NOINLINE void StreamDivided(const float* HWY_RESTRICT acc, float by,
                                DType dtype, int n, void* to) {
  PutDivided<kSteps, true>(acc, by, dtype, n, to);
}

template <int kSteps>
HWY_INLINE void WriteDivided(const float* HWY_RESTRICT acc, float by,
                             DType dtype, int n, void* to, bool streams) {
  if constexpr (kMayStream) {
    if (HWY_UNLIKELY(streams)) {
      StreamDivided<kSteps>(acc, by, dtype, n, to);
      return;
    }
  }
  PutDivided<kSteps, false>(acc, by, dtype, n, to);
}

// --- states in memory --------------------------------------------------------

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

// out = acc / sum of a complete row, past the caches where `streams`, and the
// natural LSE.
template <class Ops, class Args>
HWY_INLINE void FinishRow(const Args& args, int64_t token, int64_t head,
                          State state, bool streams) {
  if (args.sinks != nullptr) {
    AddSink<Ops>(args.sinks[head], state, PaddedWidth(args.v_head_size));
  }
  void* out = OutRow(args, token, head);
  float* lse = args.lse == nullptr
                   ? nullptr
                   : args.lse + token * args.lse_token_stride + head;
  if (state.max == kMinusInf) {  // saw nothing
    std::memset(out, 0,
                static_cast<size_t>(args.v_head_size) * SizeOf(args.out_dtype));
    if (lse != nullptr) *lse = kMinusInf;
    return;
  }
  if (args.out_dtype == DType::kF32) {
    WriteDivided<2>(state.acc, state.sum, args.out_dtype, args.v_head_size, out,
                    streams);
  } else {
    WriteDivided<1>(state.acc, state.sum, args.out_dtype, args.v_head_size, out,
                    streams);
  }
  if (lse != nullptr) {
    constexpr double kLn2 = 0.693147180559945309417;
    *lse = static_cast<float>((static_cast<double>(state.max) +
                               std::log2(static_cast<double>(state.sum))) *
                              kLn2);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
