// Score modifiers: softcap, then ALiBi, on the staged scores of one row.
//
// The result is in log2 units, so the softmax scales it by one.
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// tanh(x) to a relative 4e-7: by e^(-2|x|), whose difference from one cancels
// near zero, so there by the odd series (x^11 term: 9e-9 of x at 1/4).
HWY_INLINE V Tanh(V x) {
  constexpr float kTwoLog2E = 2.88539008177792681472f;
  const V one = Broadcast(1.0f);
  const V size = hn::Abs(x);
  const V e = Exp2<3>(hn::Mul(size, Broadcast(-kTwoLog2E)));
  const V large = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  const V square = hn::Mul(size, size);
  V series = Broadcast(62.0f / 2835);
  series = Fma(series, square, Broadcast(-17.0f / 315));
  series = Fma(series, square, Broadcast(2.0f / 15));
  series = Fma(series, square, Broadcast(-1.0f / 3));
  const V small = Fma(hn::Mul(series, square), size, size);
  const auto near = hn::Lt(size, Broadcast(0.25f));
  return hn::CopySign(hn::IfThenElse(near, small, large), x);
}

// scores[j] of key first_key + j, for a row at `position`.
inline HWY_NOINLINE void ModifyScores(const AttendArgs& args, int head,
                                      int64_t position, int64_t first_key,
                                      float* HWY_RESTRICT scores) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const float slope =
      args.alibi_slopes == nullptr ? 0.0f : args.alibi_slopes[head] * kLog2E;
  const V scale = Broadcast(args.scale_log2);
  const V inverse = Broadcast(1.0f / (args.softcap == 0 ? 1.0f : args.softcap));
  const V cap = Broadcast(args.softcap * kLog2E);
  const auto distance = static_cast<float>(first_key - position);
  for (int i = 0; i < kKeyTile; i += static_cast<int>(kN)) {
    V s = hn::Mul(LoadF(scores + i), scale);
    if (args.softcap != 0) {
      s = hn::Mul(cap, Tanh(hn::Mul(s, inverse)));
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
