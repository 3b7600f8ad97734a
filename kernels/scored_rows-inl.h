// Rows of a register group over a key tile of which they see a part, or where
// their maxima move.
//
// As many as there are when it runs: most tiles are seen whole by rows whose
// maxima stay (group_pass-inl.h), so this need not be compiled for each number
// of rows and each way of fetching.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// What the tile that begins at `tile_begin` has of keys [low, high).
HWY_INLINE Span OfTile(int64_t low, int64_t high, int64_t tile_begin) {
  const int64_t end = HWY_MIN(high - tile_begin, int64_t{kKeyTile});
  const int64_t begin = HWY_MAX(low - tile_begin, int64_t{0});
  if (begin >= end) return {0, 0};
  return {static_cast<int>(begin), static_cast<int>(end)};
}

inline HWY_NOINLINE void FindSpans(const RowPlace* places, int rows,
                                   int64_t tile_begin, Span* spans) {
  HWY_UNROLL(1) for (int r = 0; r < rows; ++r) {
    spans[r] = OfTile(places[r].low, places[r].high, tile_begin);
  }
}

// Rows that have seen no score above -inf yet have no weights: their spans
// become empty, and this false.
HWY_INLINE bool DropUnseen(const RowState* states, int rows, Span* spans) {
  bool all = true;
  HWY_UNROLL(1) for (int r = 0; r < rows; ++r) {
    if (states[r].max != kMinusInf) continue;
    spans[r] = {0, 0};
    all = false;
  }
  return all;
}

// Scores of what rows do not see become -inf: they have no weight.
inline HWY_NOINLINE void MaskOutside(const Span* spans, int rows,
                                     float* HWY_RESTRICT scores) {
  HWY_UNROLL(1) for (int r = 0; r < rows; ++r, scores += kKeyTile) {
    V masked[kTileVecs];
    if (HWY_LIKELY(spans[r].end != 0)) {
      LoadMasked(spans[r].begin, spans[r].end, scores, masked);
    } else {
      for (V& none : masked) none = Broadcast(kMinusInf);
    }
    StoreScores(masked, scores);
  }
}

// `count` rows whose scores of a tile are computed. A rescale must find the
// values of the tiles before already added, which is what `before` does.
template <class Ops>
struct ScoredRows {
  // Moves the rows' reference maxima where they must; false where a row has
  // seen no score above -inf yet.
  HWY_NOINLINE bool MoveMaxima(FunctionRef<void()> before) const {
    bool all = true;
    HWY_UNROLL(1)
    for (int r = 0; r < count; ++r) all &= MoveMaximumOf(r, before);
    return all;
  }

  // Weights of what each row sees. A row that has seen no score above -inf yet
  // has none: its span becomes empty, and this false.
  HWY_NOINLINE bool WeighSpans(Span* spans, FunctionRef<void()> before) const {
    const SoftenRows<Ops, kMostRows<Ops>> soften(unweighed);
    bool all = true;
    HWY_UNROLL(1) for (int r = 0; r < count; ++r) {
      if (spans[r].end == 0) continue;
      float* of_row = unweighed.scores + r * kKeyTile;
      V masked[kTileVecs];
      LoadMasked(spans[r].begin, spans[r].end, of_row, masked);
      if (HWY_UNLIKELY(!Stays(unweighed.rows[r], Highest(masked)))) {
        StoreScores(masked, of_row);
        if (!CallMoveMaximumOf(r, before)) {
          spans[r] = {0, 0};
          all = false;
          continue;
        }
      }
      soften.RowOf(r, masked, of_row);
    }
    return all;
  }

  int count;
  Unweighed<Ops> unweighed;
  float* acc;  // [count][acc_floats]
  int acc_floats;

 private:
  HWY_INLINE bool MoveMaximumOf(int r, FunctionRef<void()> before) const {
    return MoveMaximum<Ops>(unweighed.scores + r * kKeyTile,
                            unweighed.scale_log2, unweighed.rows[r],
                            unweighed.lanes + r * kLanes, acc + r * acc_floats,
                            acc_floats, before);
  }
  HWY_NOINLINE bool CallMoveMaximumOf(int r, FunctionRef<void()> before) const {
    return MoveMaximumOf(r, before);
  }
};

}  // namespace VARLANE_NS
}  // namespace varlane
