// One register group of rows over a pair of key tiles: scores, softmax, values.
//
// Interior tiles take no masks. At the edges of what a row sees its P.V stops
// where the row does, half a step where a pair is cut.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// --- dispatch on the register tile -------------------------------------------

template <class Ops, FetchMode kFetch>
struct Micro {
  using Operand = typename Ops::Operand;
  using Score = void (*)(const Operand*, const std::byte* const*, size_t,
                         size_t, float*, Prefetch&);
  using Value = void (*)(const Operand*, const std::byte* const*, size_t,
                         size_t, int, int, float*, size_t, Prefetch&);
  template <int R>
  static Score ScoreFor(int vecs) {
    if constexpr (kMaxVecs == 4) {
      if (vecs == 4) return &ScoreTile<Ops, R, 4, kFetch>;
      if (vecs == 3) return &ScoreTile<Ops, R, 3, kFetch>;
    }
    return vecs == 2 ? &ScoreTile<Ops, R, 2, kFetch>
                     : &ScoreTile<Ops, R, 1, kFetch>;
  }
  template <int R>
  static Value ValueFor(int vecs) {
    if constexpr (kMaxVecs == 4) {
      if (vecs == 4) return &ValueTile<Ops, R, 4, kFetch>;
      if (vecs == 3) return &ValueTile<Ops, R, 3, kFetch>;
    }
    return vecs == 2 ? &ValueTile<Ops, R, 2, kFetch>
                     : &ValueTile<Ops, R, 1, kFetch>;
  }
};

// Scores of R rows for the vectors of keys that hold [begin, end) of the tile
// whose groups stand at `groups`.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void Scores(const typename Ops::Operand* q,
                       const std::byte* const* groups, size_t stride,
                       size_t steps, int begin, int end, float* scores,
                       Prefetch& fetch) {
  constexpr int kVecBytes =
      static_cast<int>(kN) * Ops::kPack * int{sizeof(typename Ops::Cache)};
  constexpr int kGroupVecs = kGroupTokens / static_cast<int>(kN);
  const int vecs = (end + static_cast<int>(kN) - 1) / static_cast<int>(kN);
  for (int v = begin / static_cast<int>(kN); v < vecs; v += kMaxVecs) {
    const int width = HWY_MIN(kMaxVecs, vecs - v);
    const std::byte* k[kMaxVecs];
    for (int i = 0; i < width; ++i) {
      k[i] = groups[(v + i) / kGroupVecs] + (v + i) % kGroupVecs * kVecBytes;
    }
    const auto score = Micro<Ops, kFetch>::template ScoreFor<R>(width);
    score(q, k, stride, steps, scores + v * static_cast<int>(kN), fetch);
  }
}

// acc += p v of R rows, lane steps [begin, end) of the groups, all dims.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void Values(const typename Ops::Operand* p,
                       const std::byte* const* groups, int begin, int end,
                       float* acc, int acc_floats, Prefetch& fetch) {
  constexpr size_t kElem = sizeof(typename Ops::Cache);
  const auto stride = static_cast<size_t>(acc_floats) * Ops::kPack * kElem;
  const int vecs = acc_floats / static_cast<int>(kN);
  const int passes = (vecs + kMaxVecs - 1) / kMaxVecs;
  for (int i = 0; i < passes; ++i) {
    const int first = vecs * i / passes;
    const int width = vecs * (i + 1) / passes - first;
    const auto value = Micro<Ops, kFetch>::template ValueFor<R>(width);
    value(p, groups, static_cast<size_t>(first) * kN * Ops::kPack * kElem,
          stride, begin, end, acc + first * static_cast<int>(kN),
          static_cast<size_t>(acc_floats), fetch);
  }
}

// What the groups of a chunk share while they pass a pair of key tiles.
template <class Ops>
struct PairContext {
  const AttendArgs* args;
  const Workspace<Ops>* ws;
  const PairPages* pages;
  int64_t begin;  // first key of the pair
  int tiles;      // kPair, or 1 where nobody sees the second
  size_t key_stride;
  Prefetch score_fetch[kPair];  // while a group's scores of a tile
  Prefetch value_fetch;         // and its values are computed
};

// Keys [begin, end) of a tile that one row sees; empty where end == begin.
struct Span {
  int begin;
  int end;
};

HWY_INLINE Span RowSpan(const RowPlace& place, int64_t tile_begin) {
  const int64_t end = HWY_MIN(place.high - tile_begin, int64_t{kKeyTile});
  const int64_t begin = HWY_MAX(place.low - tile_begin, int64_t{0});
  if (begin >= end) return {0, 0};
  return {static_cast<int>(begin), static_cast<int>(end)};
}

// A row's own values outside what its group does together: whole steps
// [begin, end), and the half steps at the ends of its span.
template <class Ops>
HWY_INLINE void OwnValues(const std::byte* const* groups,
                          const typename Ops::Operand* p, int begin, int end,
                          bool odd_before, bool even_after, float* acc,
                          int acc_floats) {
  constexpr int kSteps = kGroupTokens / Ops::kPack;
  const size_t stride = static_cast<size_t>(acc_floats) * Ops::kPack *
                        sizeof(typename Ops::Cache);
  const auto lane = [&](int step) HWY_ATTR {
    return groups[step / kSteps] + static_cast<size_t>(step % kSteps) * stride;
  };
  const int vecs = acc_floats / static_cast<int>(kN);
  if constexpr (Ops::kPack == 2) {
    if (odd_before) {
      ValueHalfStep<Ops, false>(p + begin - 1, lane(begin - 1), vecs, acc);
    }
  }
  if (begin < end) {
    Prefetch none;
    Values<Ops, 1, kNoFetch>(p, groups, begin, end, acc, acc_floats, none);
  }
  if constexpr (Ops::kPack == 2) {
    if (even_after) ValueHalfStep<Ops, true>(p + end, lane(end), vecs, acc);
  }
}

// acc += p v of R rows with spans that may differ, over one tile: what all see
// goes through the register tile, the ends row by row. Each row keeps its token
// order.
template <class Ops, int R>
HWY_NOINLINE void RaggedValues(const std::byte* const* groups,
                               const Span* spans,
                               const typename Ops::Operand* p, float* acc,
                               int acc_floats) {
  constexpr int kPack = Ops::kPack;
  int common_begin = 0;
  int common_end = kTileSteps<Ops>;
  for (int r = 0; r < R; ++r) {
    common_begin = HWY_MAX(common_begin, (spans[r].begin + kPack - 1) / kPack);
    common_end = HWY_MIN(common_end, spans[r].end / kPack);
  }
  const bool common = common_begin < common_end;
  for (int r = 0; r < R; ++r) {
    const int whole_begin = (spans[r].begin + kPack - 1) / kPack;
    const int whole_end = spans[r].end / kPack;
    OwnValues<Ops>(
        groups, p + r * kPairSteps<Ops>, whole_begin,
        common ? common_begin : whole_end, spans[r].begin % kPack != 0,
        !common && spans[r].end % kPack != 0, acc + r * acc_floats, acc_floats);
  }
  if (!common) return;
  Prefetch none;
  Values<Ops, R, kNoFetch>(p, groups, common_begin, common_end, acc, acc_floats,
                           none);
  for (int r = 0; r < R; ++r) {
    OwnValues<Ops>(groups, p + r * kPairSteps<Ops>, common_end,
                   spans[r].end / kPack, false, spans[r].end % kPack != 0,
                   acc + r * acc_floats, acc_floats);
  }
}

// What R rows see of one key tile, and whether its values are still to add.
template <int R>
struct TileView {
  Span spans[R];
  int begin;  // keys that any row sees; none where end == 0
  int end;
  bool interior;  // every row sees all
  bool pending = false;

  HWY_INLINE TileView(const RowPlace* place, int64_t tile_begin)
      : begin(0),
        end(kKeyTile),
        // Ends never fall with the row: the first and the last bound them all.
        interior(place[R - 1].low <= tile_begin &&
                 place[0].high >= tile_begin + kKeyTile) {
    for (int r = 0; r < R; ++r) spans[r] = {0, kKeyTile};
    if (HWY_LIKELY(interior)) return;
    begin = kKeyTile;
    end = 0;
    for (int r = 0; r < R; ++r) {
      spans[r] = RowSpan(place[r], tile_begin);
      if (spans[r].end == 0) continue;
      begin = HWY_MIN(begin, spans[r].begin);
      end = HWY_MAX(end, spans[r].end);
    }
  }
};

// One register group of R rows over a pair of key tiles.
template <class Ops, int R, FetchMode kFetch>
class GroupPass {
 public:
  // `row` is the group's first row in the threadgroup, `local` in the chunk.
  HWY_INLINE GroupPass(PairContext<Ops>& pair, int row, int local)
      : pair_(pair),
        ws_(*pair.ws),
        row_(row),
        local_(local),
        acc_(ws_.acc + local * ws_.acc_floats),
        views_{{ws_.places + row, pair.begin},
               {ws_.places + row, pair.begin + kKeyTile}} {}

  HWY_INLINE void Run() {
    for (int tile = 0; tile < pair_.tiles; ++tile) {
      if (views_[tile].end == 0) continue;
      const auto steps = static_cast<size_t>(ws_.steps);
      Scores<Ops, R, kFetch>(ws_.q + static_cast<size_t>(row_) * steps,
                             pair_.pages->k + tile * kGroups, pair_.key_stride,
                             steps, views_[tile].begin, views_[tile].end,
                             ws_.scores, pair_.score_fetch[tile]);
      Softmax(tile);
    }
    if (HWY_LIKELY(views_[0].pending && views_[0].interior &&
                   views_[1].pending && views_[1].interior)) {
      Values<Ops, R, kFetch>(ws_.p, pair_.pages->v, 0, kPairSteps<Ops>, acc_,
                             ws_.acc_floats, pair_.value_fetch);
      return;
    }
    AddPending(0);
    AddPending(1);
  }

 private:
  HWY_INLINE void Softmax(int tile) {
    const AttendArgs& args = *pair_.args;
    TileView<R>& view = views_[tile];
    const bool modified = args.softcap != 0 || args.alibi_slopes != nullptr;
    for (int r = 0; r < R; ++r) {
      if (view.spans[r].end == 0) continue;
      float* scores = ws_.scores + r * kKeyTile;
      if (HWY_UNLIKELY(modified)) {
        const RowPlace& place = ws_.places[row_ + r];
        ModifyScores(args, place.head, args.mask.first_position + place.token,
                     pair_.begin + tile * kKeyTile, scores);
      }
      // A rescale must find the values of the tile before already added.
      const auto before_rescale = [&]() HWY_ATTR { AddPending(0); };
      if (!SoftmaxRow<Ops>(scores, view.spans[r].begin, view.spans[r].end,
                           modified ? 1.0f : args.scale_log2,
                           ws_.rows[local_ + r],
                           ws_.lanes + (local_ + r) * kLanes,
                           acc_ + r * ws_.acc_floats, ws_.acc_floats,
                           ws_.p + r * kPairSteps<Ops> + tile * kTileSteps<Ops>,
                           before_rescale)) {
        view.spans[r] = {0, 0};
        view.interior = false;
      }
    }
    view.pending = true;
  }

  HWY_NOINLINE void AddPending(int tile) {
    TileView<R>& view = views_[tile];
    if (!view.pending) return;
    view.pending = false;
    const std::byte* const* groups = pair_.pages->v + tile * kGroups;
    const auto* p = ws_.p + tile * kTileSteps<Ops>;
    if (view.interior) {
      Values<Ops, R, kFetch>(p, groups, 0, kTileSteps<Ops>, acc_,
                             ws_.acc_floats, pair_.value_fetch);
    } else {
      RaggedValues<Ops, R>(groups, view.spans, p, acc_, ws_.acc_floats);
    }
  }

  PairContext<Ops>& pair_;
  const Workspace<Ops>& ws_;
  int row_;
  int local_;
  float* acc_;
  TileView<R> views_[kPair];
};

template <class Ops, int R, FetchMode kFetch>
HWY_NOINLINE void PassGroup(PairContext<Ops>& pair, int row, int local) {
  GroupPass<Ops, R, kFetch>(pair, row, local).Run();
}

template <class Ops, FetchMode kFetch>
HWY_INLINE void PassGroup(PairContext<Ops>& pair, int rows, int row,
                          int local) {
  switch (rows) {
    case 1:
      return PassGroup<Ops, 1, kFetch>(pair, row, local);
    case 2:
      return PassGroup<Ops, 2, kFetch>(pair, row, local);
    case 3:
      return PassGroup<Ops, 3, kFetch>(pair, row, local);
    default:
      return PassGroup<Ops, 4, kFetch>(pair, row, local);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
