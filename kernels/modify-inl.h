// Score modifiers: softcap, then ALiBi, on the staged scores of one row.
//
// The result is in log2 units, so the softmax scales it by one.
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// tanh(x) from y = 2 log2(e) x, by e^(-2|x|): absolute error 1e-7.
HWY_INLINE V TanhOfLog2(V y) {
  const V one = Broadcast(1.0f);
  const V e = Exp2<5>(hn::Neg(hn::Abs(y)));
  const V magnitude = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  return hn::CopySign(magnitude, y);
}

// scores[j] of key first_key + j, for a row at `position`.
inline HWY_NOINLINE void ModifyScores(const AttendArgs& args, int head,
                                      int64_t position, int64_t first_key,
                                      float* HWY_RESTRICT scores) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const float slope =
      args.alibi_slopes == nullptr ? 0.0f : args.alibi_slopes[head] * kLog2E;
  const V scale = Broadcast(args.scale_log2);
  const V to_log2 =
      Broadcast(2.0f * kLog2E / (args.softcap == 0 ? 1.0f : args.softcap));
  const V cap = Broadcast(args.softcap * kLog2E);
  const auto distance = static_cast<float>(first_key - position);
  for (int i = 0; i < kKeyTile; i += static_cast<int>(kN)) {
    V s = hn::Mul(LoadF(scores + i), scale);
    if (args.softcap != 0) {
      s = hn::Mul(cap, TanhOfLog2(hn::Mul(s, to_log2)));
    }
    if (args.alibi_slopes != nullptr) {
      const V away = hn::Iota(D(), distance + static_cast<float>(i));
      s = Fma(Broadcast(slope), away, s);
    }
    StoreF(s, scores + i);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
