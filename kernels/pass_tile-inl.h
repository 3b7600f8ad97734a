// One register group of rows over one key tile: scores, softmax, values.
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
                         size_t, float*, const Prefetch&);
  using Value = void (*)(const Operand*, const std::byte* const*, size_t,
                         size_t, int, int, float*, size_t, const Prefetch&);
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

// Scores of R rows for the vectors of keys that hold [begin, end) of the tile.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void Scores(const typename Ops::Operand* q, const TilePages& pages,
                       size_t stride, size_t steps, int begin, int end,
                       float* scores, const Prefetch& fetch) {
  constexpr int kVecBytes =
      static_cast<int>(kN) * Ops::kPack * int{sizeof(typename Ops::Cache)};
  constexpr int kGroupVecs = kGroupTokens / static_cast<int>(kN);
  const int vecs = (end + static_cast<int>(kN) - 1) / static_cast<int>(kN);
  for (int v = begin / static_cast<int>(kN); v < vecs; v += kMaxVecs) {
    const int width = HWY_MIN(kMaxVecs, vecs - v);
    const std::byte* k[kMaxVecs];
    for (int i = 0; i < width; ++i) {
      k[i] = pages.k[(v + i) / kGroupVecs] + (v + i) % kGroupVecs * kVecBytes;
    }
    const auto score = Micro<Ops, kFetch>::template ScoreFor<R>(width);
    score(q, k, stride, steps, scores + v * static_cast<int>(kN), fetch);
  }
}

// acc += p v of R rows, lane steps [begin, end), all dims.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void Values(const typename Ops::Operand* p, const TilePages& pages,
                       int begin, int end, float* acc, int acc_floats,
                       Prefetch fetch) {
  constexpr size_t kElem = sizeof(typename Ops::Cache);
  const auto stride = static_cast<size_t>(acc_floats) * Ops::kPack * kElem;
  const int vecs = acc_floats / static_cast<int>(kN);
  const int passes = (vecs + kMaxVecs - 1) / kMaxVecs;
  for (int i = 0; i < passes; ++i) {
    const int first = vecs * i / passes;
    const int width = vecs * (i + 1) / passes - first;
    const auto value = Micro<Ops, kFetch>::template ValueFor<R>(width);
    value(p, pages.v, static_cast<size_t>(first) * kN * Ops::kPack * kElem,
          stride, begin, end, acc + first * static_cast<int>(kN),
          static_cast<size_t>(acc_floats), fetch);
    if constexpr (kFetch != kNoFetch) {
      constexpr size_t kSteps = kKeyTile / Ops::kPack;
      for (const std::byte*& stream : fetch.stream) {
        stream += kSteps * fetch.stride;
      }
      fetch.lines -= HWY_MIN(fetch.lines, kSteps);
    }
  }
}

// What the groups of a chunk share while they pass one key tile.
template <class Ops>
struct TileContext {
  const AttendArgs* args;
  const Workspace<Ops>* ws;
  const TilePages* pages;
  int64_t tile_begin;
  size_t key_stride;
  Prefetch fetch[2];  // while a group's scores resp. values are computed
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
HWY_INLINE void OwnValues(const TilePages& pages,
                          const typename Ops::Operand* p, int begin, int end,
                          bool odd_before, bool even_after, float* acc,
                          int acc_floats) {
  constexpr int kSteps = kGroupTokens / Ops::kPack;
  const size_t stride = static_cast<size_t>(acc_floats) * Ops::kPack *
                        sizeof(typename Ops::Cache);
  const auto lane = [&](int step) HWY_ATTR {
    return pages.v[step / kSteps] + static_cast<size_t>(step % kSteps) * stride;
  };
  const int vecs = acc_floats / static_cast<int>(kN);
  if constexpr (Ops::kPack == 2) {
    if (odd_before) {
      ValueHalfStep<Ops, false>(p + begin - 1, lane(begin - 1), vecs, acc);
    }
  }
  if (begin < end) {
    Values<Ops, 1, kNoFetch>(p, pages, begin, end, acc, acc_floats, {});
  }
  if constexpr (Ops::kPack == 2) {
    if (even_after) ValueHalfStep<Ops, true>(p + end, lane(end), vecs, acc);
  }
}

// acc += p v of R rows with spans that may differ: what all see goes through
// the register tile, the ends row by row. Each row keeps its token order.
template <class Ops, int R, FetchMode kFetch>
HWY_NOINLINE void RaggedValues(const TileContext<Ops>& tile, const Span* spans,
                               float* acc) {
  const Workspace<Ops>& ws = *tile.ws;
  constexpr int kPack = Ops::kPack;
  constexpr int kRowSteps = kKeyTile / kPack;
  int common_begin = 0;
  int common_end = kRowSteps;
  for (int r = 0; r < R; ++r) {
    common_begin = HWY_MAX(common_begin, (spans[r].begin + kPack - 1) / kPack);
    common_end = HWY_MIN(common_end, spans[r].end / kPack);
  }
  const bool common = common_begin < common_end;
  for (int r = 0; r < R; ++r) {
    const int whole_begin = (spans[r].begin + kPack - 1) / kPack;
    const int whole_end = spans[r].end / kPack;
    OwnValues<Ops>(*tile.pages, ws.p + r * kRowSteps, whole_begin,
                   common ? common_begin : whole_end,
                   spans[r].begin % kPack != 0,
                   !common && spans[r].end % kPack != 0,
                   acc + r * ws.acc_floats, ws.acc_floats);
  }
  if (!common) return;
  Values<Ops, R, kFetch>(ws.p, *tile.pages, common_begin, common_end, acc,
                         ws.acc_floats, tile.fetch[1]);
  for (int r = 0; r < R; ++r) {
    OwnValues<Ops>(*tile.pages, ws.p + r * kRowSteps, common_end,
                   spans[r].end / kPack, false, spans[r].end % kPack != 0,
                   acc + r * ws.acc_floats, ws.acc_floats);
  }
}

// One register group of R rows over one key tile. `row` is its first row in the
// threadgroup, `local` in the chunk.
template <class Ops, int R, FetchMode kFetch>
HWY_NOINLINE void PassTile(const TileContext<Ops>& tile, int row, int local) {
  const AttendArgs& args = *tile.args;
  const Workspace<Ops>& ws = *tile.ws;
  const RowPlace* place = ws.places + row;
  Span spans[R];
  int begin = 0;
  int end = kKeyTile;
  // Ends never fall with the row: the first and the last one bound them all.
  bool interior = place[R - 1].low <= tile.tile_begin &&
                  place[0].high >= tile.tile_begin + kKeyTile;
  for (int r = 0; r < R; ++r) spans[r] = {0, kKeyTile};
  if (HWY_UNLIKELY(!interior)) {
    begin = kKeyTile;
    end = 0;
    for (int r = 0; r < R; ++r) {
      spans[r] = RowSpan(place[r], tile.tile_begin);
      if (spans[r].end == 0) continue;
      begin = HWY_MIN(begin, spans[r].begin);
      end = HWY_MAX(end, spans[r].end);
    }
    if (end == 0) return;
  }

  const auto steps = static_cast<size_t>(ws.steps);
  Scores<Ops, R, kFetch>(ws.q + static_cast<size_t>(row) * steps, *tile.pages,
                         tile.key_stride, steps, begin, end, ws.scores,
                         tile.fetch[0]);
  constexpr int kRowSteps = kKeyTile / Ops::kPack;
  const bool modified = args.softcap != 0 || args.alibi_slopes != nullptr;
  for (int r = 0; r < R; ++r) {
    if (spans[r].end == 0) continue;
    float* scores = ws.scores + r * kKeyTile;
    if (HWY_UNLIKELY(modified)) {
      ModifyScores(args, place[r].head,
                   args.mask.first_position + place[r].token, tile.tile_begin,
                   scores);
    }
    if (!SoftmaxRow<Ops>(scores, spans[r].begin, spans[r].end,
                         modified ? 1.0f : args.scale_log2, ws.rows[local + r],
                         ws.lanes + (local + r) * kLanes,
                         ws.acc + (local + r) * ws.acc_floats, ws.acc_floats,
                         ws.p + r * kRowSteps)) {
      spans[r] = {0, 0};
      interior = false;
    }
  }
  float* acc = ws.acc + local * ws.acc_floats;
  if (HWY_LIKELY(interior)) {
    Values<Ops, R, kFetch>(ws.p, *tile.pages, 0, kRowSteps, acc, ws.acc_floats,
                           tile.fetch[1]);
  } else {
    RaggedValues<Ops, R, kFetch>(tile, spans, acc);
  }
}

template <class Ops, FetchMode kFetch>
HWY_INLINE void PassTile(const TileContext<Ops>& tile, int rows, int row,
                         int local) {
  switch (rows) {
    case 1:
      return PassTile<Ops, 1, kFetch>(tile, row, local);
    case 2:
      return PassTile<Ops, 2, kFetch>(tile, row, local);
    case 3:
      return PassTile<Ops, 3, kFetch>(tile, row, local);
    default:
      return PassTile<Ops, 4, kFetch>(tile, row, local);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
