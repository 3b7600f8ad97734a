// The online softmax of one row: its reference maximum, its weights, its sum.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// A row's weights rescale only when a tile's maximum exceeds the reference
// maximum by more than this (log2 units): sums stay below 2^8 x tokens.
constexpr float kRescaleHeadroom = 8.0f;

// One row's running state.
struct RowState {
  float threshold;  // raw score above which the row rescales; NaN = any
  float max;        // reference maximum x scale_log2; -inf before any key
};

HWY_INLINE void ZeroFloats(float* to, int count) {
  for (int i = 0; i < count; i += static_cast<int>(kN)) StoreF(Zero(), to + i);
}

HWY_INLINE void ResetRow(RowState& state, float* HWY_RESTRICT lanes) {
  state = {std::numeric_limits<float>::quiet_NaN(), kMinusInf};
  ZeroFloats(lanes, kLanes);
}

// Scales what a row has summed up by 2^exponent: rare after the first tile,
// where there is nothing to rescale.
template <class Ops>
HWY_NOINLINE void Rescale(float exponent, float* HWY_RESTRICT lanes,
                          float* HWY_RESTRICT acc, int acc_floats) {
  const V alpha = Exp2<Ops::kExpDegree>(Broadcast(exponent));
  for (int i = 0; i < kLanes; i += static_cast<int>(kN)) {
    StoreF(hn::Mul(LoadF(lanes + i), alpha), lanes + i);
  }
  for (int i = 0; i < acc_floats; i += static_cast<int>(kN)) {
    StoreF(hn::Mul(LoadF(acc + i), alpha), acc + i);
  }
}

// A tile's scores, those outside [begin, end), which is not empty, as -inf.
// What stands there may be anything.
HWY_INLINE void LoadMasked(int begin, int end, const float* HWY_RESTRICT scores,
                           V (&masked)[kTileVecs]) {
  const V minus_inf = Broadcast(kMinusInf);
#if HWY_TARGET == HWY_AVX3
  // Masks are bits there: 8x512 up to 0.5% faster.
  static_assert(kKeyTile == 64 && kN == 16);
  const uint64_t bits = ~uint64_t{0} << begin & ~uint64_t{0} >> (64 - end);
  const auto seen = [&](int at) HWY_ATTR {
    return hn::Mask<D>{static_cast<__mmask16>(bits >> at)};
  };
#else
  const auto first = hn::Set(DI(), begin);
  const auto last = hn::Set(DI(), end);
  const auto seen = [&](int at) HWY_ATTR {
    const auto token = hn::Iota(DI(), at);
    return hn::RebindMask(
        D(), hn::AndNot(hn::Lt(token, first), hn::Lt(token, last)));
  };
#endif
  HWY_UNROLL(16) for (int v = 0; v < kTileVecs; ++v) {
    const int at = v * static_cast<int>(kN);
    masked[v] = hn::IfThenElse(seen(at), LoadF(scores + at), minus_inf);
  }
}

HWY_INLINE void LoadScores(const float* HWY_RESTRICT scores,
                           V (&s)[kTileVecs]) {
  HWY_UNROLL(16) for (int v = 0; v < kTileVecs; ++v) {
    s[v] = LoadF(scores + v * static_cast<int>(kN));
  }
}
HWY_INLINE void StoreScores(const V (&s)[kTileVecs],
                            float* HWY_RESTRICT scores) {
  HWY_UNROLL(16) for (int v = 0; v < kTileVecs; ++v) {
    StoreF(s[v], scores + v * static_cast<int>(kN));
  }
}

// The greatest of a tile's scores, lane by lane; may drop a NaN.
HWY_INLINE V Highest(const V (&scores)[kTileVecs]) {
  V high = scores[0];
  HWY_UNROLL(16) for (int v = 1; v < kTileVecs; ++v) {
    high = hn::Max(high, scores[v]);
  }
  return high;
}

// Whether the reference maximum stays, `high` being the greatest of a tile's
// scores. A NaN that Max dropped still shows: its own weight is NaN.
HWY_INLINE bool Stays(const RowState& state, V high) {
  return hn::AllTrue(D(), hn::Le(high, Broadcast(state.threshold)));
}

// Moves a row's reference maximum where the tile's scores demand it, calling
// `before_rescale` before acc is rescaled. Returns false when every score so
// far is -inf: there is nothing to add then.
template <class Ops>
HWY_INLINE bool MoveMaximum(const float* HWY_RESTRICT scores, float scale_log2,
                            RowState& state, float* HWY_RESTRICT lanes,
                            float* HWY_RESTRICT acc, int acc_floats,
                            FunctionRef<void()> before_rescale) {
  V s[kTileVecs];
  LoadScores(scores, s);
  const V high = Highest(s);
  if (Stays(state, high)) return true;
  auto nan = hn::IsNaN(s[0]);
  HWY_UNROLL(16) for (int v = 1; v < kTileVecs; ++v) {
    nan = hn::Or(nan, hn::IsNaN(s[v]));
  }
  const float tile_max = hn::AllFalse(D(), nan)
                             ? hn::GetLane(hn::MaxOfLanes(D(), high))
                             : std::numeric_limits<float>::quiet_NaN();
  if (tile_max == kMinusInf) return false;  // only before the first finite
  const float new_max = tile_max * scale_log2;
  if (state.max != kMinusInf) {
    before_rescale();
    Rescale<Ops>(state.max - new_max, lanes, acc, acc_floats);
  }
  state.max = new_max;
  state.threshold = tile_max + kRescaleHeadroom / scale_log2;
  return true;
}

// Rows' scores of a tile, and where they become weights.
template <class Ops>
struct Unweighed {
  float* scores;  // [rows][kKeyTile]
  float scale_log2;
  RowState* rows;
  float* lanes;              // [rows][kLanes]
  typename Ops::Operand* p;  // rows p_stride apart; may be the scores
  int p_stride;
};

// Turns scores of R rows and one tile into weights p = 2^(s x scale - max) and
// adds them to the rows' lane sums, half a row at a time. The lanes of a sum
// are token mod 16 whatever the vector width.
//
// Beside arithmetic that hides them the halves overlap: a portion of the work
// ends one half and begins the next one. So nothing waits for long for what it
// needs, taking room that multiply-adds would use; there is half as much of it
// while another thread runs on the same core.
template <class Ops, int R>
class SoftenRows {
 public:
  using Of = Unweighed<Ops>;
  static constexpr int kPortions = 2 * R;
  static constexpr int kLaneVecs = kLanes / static_cast<int>(kN);
  static constexpr int kHalfVecs = kTileVecs / 2;

  // One by one: copied as a whole they would be read in larger parts than they
  // were written in a moment ago, which waits until they are in the cache.
  explicit HWY_INLINE SoftenRows(const Of& of)
      : scores_(of.scores),
        scale_log2_(of.scale_log2),
        rows_(of.rows),
        lanes_(of.lanes),
        p_(of.p),
        p_stride_(of.p_stride) {}

  // Of the half row that has begun.
  struct State {
    const float* scores;
    const RowState* HWY_RESTRICT row;
    float* HWY_RESTRICT lanes;
    typename Ops::Operand* p;
    V sums[kLaneVecs];
    SplitExponent split[kHalfVecs];
  };

  HWY_INLINE void Start(State& state) const { StartAt(0, state); }

  // Ends the first or the second half of a row and begins what comes next.
  template <int kHalf>
  HWY_INLINE void Portion(State& state) const {
    End<kHalf>(state);
    if constexpr (kHalf == 0) {
      Begin<1>(state);
    } else {
      state.scores += kKeyTile;
      state.row += 1;
      state.lanes += kLanes;
      state.p += p_stride_;
      if (state.row != rows_ + R) Begin<0>(state);
    }
  }

  // A row whose scores are at hand, and may be stored at `to`.
  HWY_INLINE void RowOf(int r, const V (&scores_of)[kTileVecs],
                        float* HWY_RESTRICT to) const {
    if constexpr (kLaneVecs == 1) {
      State state;
      Place(r, state);
      Split(scores_of, state);
      End<0>(state);
      Split(scores_of + kHalfVecs, state);
      End<1>(state);
    } else {
      StoreScores(scores_of, to);
      CallRow(r);
    }
  }

  // All of a row. Called where it is long: without vectors it is 4 KB of code,
  // at a dozen places.
  HWY_INLINE void Row(int r) const {
    if constexpr (kLaneVecs == 1) {
      InlineRow(r);
    } else {
      CallRow(r);
    }
  }

 private:
  HWY_NOINLINE void CallRow(int r) const { InlineRow(r); }

  HWY_INLINE void InlineRow(int r) const {
    State state;
    StartAt(r, state);
    End<0>(state);
    Begin<1>(state);
    End<1>(state);
  }

  HWY_INLINE void Place(int r, State& state) const {
    state.scores = scores_ + r * kKeyTile;
    state.row = rows_ + r;
    state.lanes = lanes_ + r * kLanes;
    state.p = p_ + r * p_stride_;
  }

  HWY_INLINE void StartAt(int r, State& state) const {
    Place(r, state);
    Begin<0>(state);
  }

  template <int kHalf>
  HWY_INLINE void Begin(State& state) const {
    const float* from = state.scores + kHalf * (kKeyTile / 2);
    V half[kHalfVecs];
    HWY_UNROLL(16) for (int v = 0; v < kHalfVecs; ++v) {
      half[v] = LoadF(from + v * static_cast<int>(kN));
    }
    Split(half, state);
  }

  HWY_INLINE void Split(const V* half, State& state) const {
    const V scale = Broadcast(scale_log2_);
    const V max = Broadcast(state.row->max);
    HWY_UNROLL(16) for (int v = 0; v < kHalfVecs; ++v) {
      state.split[v] = SplitExp2(FmaMinus(half[v], scale, max));
    }
  }

  template <int kHalf>
  HWY_INLINE void End(State& state) const {
    if constexpr (kHalf == 0) {
      HWY_UNROLL(16) for (int i = 0; i < kLaneVecs; ++i) {
        state.sums[i] = LoadF(state.lanes + i * static_cast<int>(kN));
      }
    }
    V weights[kHalfVecs];
    if constexpr (kAvx2) JoinExp2s<Ops::kExpDegree>(state.split, weights);
    HWY_UNROLL(16) for (int v = 0; v < kHalfVecs; ++v) {
      if constexpr (!kAvx2) {
        weights[v] = JoinExp2<Ops::kExpDegree>(state.split[v]);
      }
      V& sum = state.sums[v % kLaneVecs];
      sum = hn::Add(sum, weights[v]);
    }
    StoreWeights(weights, state.p + kHalf * (kTileSteps<Ops> / 2));
    if constexpr (kHalf == 1) StoreSums(state);
  }

  static HWY_INLINE void StoreWeights(const V (&weights)[kHalfVecs],
                                      typename Ops::Operand* to) {
#if VARLANE_NATIVE_BF16
    if constexpr (Ops::kPack == 2) {
      Ops::StorePairs(weights[0], weights[1], to);
      return;
    }
#endif
    auto* floats = reinterpret_cast<float*>(to);
    HWY_UNROLL(16) for (int v = 0; v < kHalfVecs; ++v) {
      StoreF(RoundWeight<Ops>(weights[v]), floats + v * static_cast<int>(kN));
    }
  }

  static HWY_INLINE void StoreSums(const State& state) {
    HWY_UNROLL(16) for (int i = 0; i < kLaneVecs; ++i) {
      StoreF(state.sums[i], state.lanes + i * static_cast<int>(kN));
    }
  }

  const float* scores_;
  float scale_log2_;
  const RowState* HWY_RESTRICT rows_;
  float* HWY_RESTRICT lanes_;
  typename Ops::Operand* p_;
  int p_stride_;
};

// A tile whose scores wait to become weights, of up to kMostRows rows: beside
// the next scores, whose they may be, or by themselves.
template <class Ops>
class Waiting {
 public:
  HWY_INLINE void Set(const Unweighed<Ops>& rows, int count) {
    rows_ = rows;
    count_ = count;
  }
  HWY_INLINE void Clear() { count_ = 0; }
  HWY_INLINE bool any() const { return count_ != 0; }

  // How many rows it has, and which.
  HWY_INLINE int count() const { return count_; }
  HWY_INLINE const Unweighed<Ops>& rows() const { return rows_; }

  HWY_INLINE void Finish() {
    const SoftenRows<Ops, kMostRows<Ops>> soften(rows_);
    HWY_UNROLL(1) for (int r = 0; r < count_; ++r) soften.Row(r);
    Clear();
  }

 private:
  Unweighed<Ops> rows_ = {};
  int count_ = 0;
};

}  // namespace VARLANE_NS
}  // namespace varlane
