// Score modifiers: softcap, then ALiBi, on the staged scores of a tile.
//
// The result is in log2 units, so the softmax scales it by one.
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// tanh(x) with the sign of `sign`, of `size` = -2 log2(e) |x|, by
// e^(-2|x|) - 1: what is left of the exponent gives 2^r - 1, and a table's
// power minus one does not cancel where r counts. To 2.1e-7, and 1.3e-6 of it.
HWY_INLINE V TanhOf(V size, V sign) {
  const auto [sum, rest] = SplitExp2(size);
  const V power = Ldexp(Exp2Table<Exp2Cubic, 0>::Look(sum), sum);
  const auto of = [](int i) HWY_ATTR {
    return Broadcast(static_cast<float>(Exp2Cubic::kOf[i]));
  };
  const V slope = Fma(rest, Fma(rest, of(3), of(2)), of(1));
  const V less = Fma(hn::Mul(power, rest), slope,
                     hn::Sub(power, Broadcast(1.0f)));  // e^(-2|x|) - 1
  return hn::CopySign(hn::Div(less, hn::Add(less, Broadcast(2.0f))), sign);
}

// A tile's keys, counted from its first one: Iota of Highway 1.0.3 is a call.
struct TileKeys {
  constexpr TileKeys() {
    for (int i = 0; i < kKeyTile; ++i) at[i] = static_cast<float>(i);
  }
  alignas(64) float at[kKeyTile] = {};
};
constexpr TileKeys kTileKeys;

// What makes a score's size an exponent of tanh; finite, or a score of zero
// would become NaN.
HWY_INLINE float SoftcapExponent(const AttendArgs& args) {
  constexpr float kTwoLog2E = 2.88539008177792681472f;
  if (args.softcap == 0) return 0;
  const float factor = kTwoLog2E * args.scale_log2 / args.softcap;
  return -HWY_MIN(factor, std::numeric_limits<float>::max());
}

// Modifies the scores that `rows` rows have of the tile of keys from
// `first_key` on. True where no row's maximum moves.
inline HWY_NOINLINE bool ModifyTile(const AttendArgs& args,
                                    const RowPlace* places,
                                    const RowState* states, int rows,
                                    int64_t first_key,
                                    float* HWY_RESTRICT scores) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const V scale = Broadcast(args.scale_log2);
  const V cap = Broadcast(args.softcap * kLog2E);
  const V to_size = Broadcast(SoftcapExponent(args));
  const int64_t before = first_key - args.mask.first_position;
  bool steady = true;
  HWY_UNROLL(1) for (int r = 0; r < rows; ++r, scores += kKeyTile) {
    V s[kTileVecs];
    LoadScores(scores, s);
    if (args.softcap != 0) {
      HWY_UNROLL(16) for (V& of : s) {
        of = hn::Mul(cap, TanhOf(hn::Mul(hn::Abs(of), to_size), of));
      }
    } else {
      HWY_UNROLL(16) for (V& of : s) of = hn::Mul(of, scale);
    }
    if (args.alibi_slopes != nullptr) {
      const V slope = Broadcast(args.alibi_slopes[places[r].head] * kLog2E);
      const V distance =
          Broadcast(static_cast<float>(before - places[r].token));
      HWY_UNROLL(16) for (int v = 0; v < kTileVecs; ++v) {
        const V away =
            hn::Add(LoadF(kTileKeys.at + v * static_cast<int>(kN)), distance);
        s[v] = Fma(slope, away, s[v]);
      }
    }
    StoreScores(s, scores);
    steady &= Stays(states[r], Highest(s));
  }
  return steady;
}

}  // namespace VARLANE_NS
}  // namespace varlane
