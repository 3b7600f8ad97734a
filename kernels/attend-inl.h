// Attention of one threadgroup: its rows against one sequence's context.
//
// Loop nest, from the outside: partition (its K/V stay in L2), chunk of 32 rows
// (whose accumulators stay in L1), key tile, register group of up to 4 rows:
//
//   scores = q k^T   (ScoreTile)  ->  p = softmax (SoftmaxRow)  ->  acc += p v
//
// Memory traffic of one (chunk, tile) at head size 128, bf16: 32 KiB of K/V
// from L2 for 8 groups x 1024 VDPBF16PS cycles: 4 bytes a cycle, an eighth of
// what L2 gives. Interior tiles take no masks; a row at its limit stops its P.V
// there. Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

constexpr int kChunkGroups = 8;
constexpr int kChunkRows = kChunkGroups * kMaxRows;

// How `rows` are cut into register groups of 1 to kMaxRows, as even as can be.
struct RowGroups {
  int rows;
  int count;
  HWY_INLINE explicit RowGroups(int num_rows)
      : rows(num_rows), count((num_rows + kMaxRows - 1) / kMaxRows) {}
  HWY_INLINE int begin(int g) const {
    return static_cast<int>(int64_t{rows} * g / count);
  }
};

// Where a row belongs and which keys it sees, worked out once a threadgroup:
// divisions and masks stay out of the tile loop.
struct RowPlace {
  int64_t low;  // keys [low, high)
  int64_t high;
  int32_t token;
  int32_t head;  // in the group
};

// The scratch of one threadgroup, carved once.
template <class Ops>
struct Workspace {
  using Operand = typename Ops::Operand;
  int acc_floats;    // Dv padded
  int steps;         // of a dot product
  Operand* q;        // [rows][steps]
  float* running;    // [rows][acc_floats] merged over partitions
  State* states;     // [rows]
  float* acc;        // [kChunkRows][acc_floats]
  float* lanes;      // [kChunkRows][kLanes]
  RowState* rows;    // [kChunkRows]
  RowPlace* places;  // [rows]
  float* scores;     // [kMaxRows][kKeyTile]
  Operand* p;        // [kMaxRows][kKeyTile / kPack]
  float* floats;     // [head_size]

  // Carves from `base`, or only counts where that is null; returns the bytes.
  HWY_INLINE size_t Carve(std::byte* base, int num_rows, int head_size,
                          int v_head_size) {
    acc_floats = (v_head_size + kLanes - 1) / kLanes * kLanes;
    steps = head_size / Ops::kPack;
    size_t used = 0;
    const auto take = [&](auto*& pointer, size_t count) HWY_ATTR {
      using T = std::remove_reference_t<decltype(*pointer)>;
      if (base != nullptr) pointer = reinterpret_cast<T*>(base + used);
      used += (count * sizeof(T) + 63) / 64 * 64;
    };
    const auto n = static_cast<size_t>(num_rows);
    const auto width = static_cast<size_t>(acc_floats);
    // Packing stores whole vectors, which may overhang the last row.
    take(q, n * static_cast<size_t>(steps) + 2 * kLanes);
    take(acc, kChunkRows * width);
    take(lanes, size_t{kChunkRows} * kLanes);
    take(rows, kChunkRows);
    take(scores, size_t{kMaxRows} * kKeyTile);
    take(p, size_t{kMaxRows} * kKeyTile / Ops::kPack);
    take(floats, static_cast<size_t>(head_size) + 2 * kLanes);
    take(states, n);
    take(places, n);
    take(running, n * width);
    return used;
  }
};

template <class Ops>
size_t AttendScratchBytes(int rows, int head_size, int v_head_size) {
  Workspace<Ops> ws;
  return ws.Carve(nullptr, rows, head_size, v_head_size);
}

template <class Ops>
HWY_INLINE void PlaceRows(const AttendArgs& args, const Workspace<Ops>& ws) {
  RowPlace* place = ws.places;
  for (int token = 0; token < args.num_tokens; ++token) {
    const int64_t low = args.mask.low(token);
    const int64_t high = args.mask.high(token);
    for (int head = 0; head < args.group; ++head) {
      *place++ = {low, high, token, head};
    }
  }
}

// Addresses of the 16-token groups of the tile at `begin` that hold keys of
// [low, high); the others repeat a neighbour, so that their table entries are
// never read and a fetch of them is harmless.
template <class Ops>
HWY_INLINE TilePages FindPages(const AttendArgs& args, const KvPages& kv,
                               int64_t begin, int64_t low, int64_t high) {
  constexpr int64_t kElem = sizeof(typename Ops::Cache);
  const int64_t mask = (int64_t{1} << kv.block_size_log2) - 1;
  const int64_t dv = (args.v_head_size + kLanes - 1) / kLanes * kLanes;
  const int64_t first = low / kGroupTokens * kGroupTokens;
  const int64_t last = (high - 1) / kGroupTokens * kGroupTokens;
  TilePages pages;
  for (int g = 0; g < kGroups; ++g) {
    const int64_t token =
        HWY_MIN(HWY_MAX(begin + g * kGroupTokens, first), last);
    const int64_t block = kv.block_table[token >> kv.block_size_log2];
    const int64_t base = block * kv.block_bytes;
    const int64_t within = token & mask;
    pages.k[g] = kv.k + base + within * Ops::kPack * kElem;
    pages.v[g] = kv.v + base + within * dv * kElem;
  }
  return pages;
}

template <class Ops>
HWY_INLINE size_t KeyStride(const AttendArgs& args) {
  return (size_t{Ops::kPack} * sizeof(typename Ops::Cache))
         << args.kv.block_size_log2;
}

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

// The lines of one 16-token group of K resp. V.
template <class Ops>
HWY_INLINE Prefetch KeyLines(const TileContext<Ops>& tile) {
  Prefetch fetch;
  const size_t bytes = static_cast<size_t>(tile.ws->steps) * tile.key_stride;
  fetch.stride = HWY_MAX(tile.key_stride, size_t{64});
  fetch.lines = bytes / fetch.stride;
  return fetch;
}
template <class Ops>
HWY_INLINE Prefetch ValueLines(const TileContext<Ops>& tile) {
  Prefetch fetch;
  fetch.stride = 64;
  fetch.lines = static_cast<size_t>(tile.ws->acc_floats) * kGroupTokens *
                sizeof(typename Ops::Cache) / 64;
  return fetch;
}

// What group `g` of `groups` fetches. Near: the first group this tile's values
// before it needs them, the last one the next tile's keys. Far: the eight
// 16-token pieces of the next tile are dealt out over groups and phases.
template <class Ops, FetchMode kFetch>
HWY_INLINE void AimFetch(TileContext<Ops>& tile, const TilePages& next,
                         bool has_next, int g, int groups) {
  if constexpr (kFetch == kFetchNear) {
    tile.fetch[0] = ValueLines(tile);
    tile.fetch[1] = KeyLines(tile);
    for (int i = 0; i < kGroups; ++i) {
      tile.fetch[0].stream[i] = tile.pages->v[i];
      tile.fetch[1].stream[i] = next.k[i];
    }
    if (g != 0) tile.fetch[0].lines = 0;
    if (g != groups - 1 || !has_next) tile.fetch[1].lines = 0;
  } else if constexpr (kFetch == kFetchFar) {
    for (int phase = 0; phase < 2; ++phase) {
      const int piece = g + phase * groups;
      const bool keys = piece < kGroups;
      tile.fetch[phase] = keys ? KeyLines(tile) : ValueLines(tile);
      tile.fetch[phase].stream[0] =
          keys ? next.k[piece] : next.v[piece % kGroups];
      if (piece >= 2 * kGroups || !has_next) tile.fetch[phase].lines = 0;
    }
  }
}

// Fetches what a group's rows will write, and the q rows one chunk later, while
// there is arithmetic to hide it: a large batch's q and out come from DRAM.
template <class Ops>
HWY_INLINE void FetchRows(const AttendArgs& args, const Workspace<Ops>& ws,
                          int row_begin, int row_end) {
  const int rows = args.num_tokens * args.group;
  for (int row = row_begin; row < row_end; ++row) {
    if (args.partials == nullptr) {
      const RowPlace& place = ws.places[row];
      const auto* out = static_cast<const std::byte*>(
          RowAt(static_cast<const void*>(args.out), args.out_dtype,
                place.token * args.out_token_stride +
                    place.head * args.out_head_stride));
      const size_t bytes =
          static_cast<size_t>(args.v_head_size) * SizeOf(args.out_dtype);
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(out + i, 1, 3);
    }
    if (row + kChunkRows < rows) {
      const RowPlace& place = ws.places[row + kChunkRows];
      const auto* q = static_cast<const std::byte*>(RowAt(
          args.q, args.q_dtype,
          place.token * args.q_token_stride + place.head * args.q_head_stride));
      const size_t bytes =
          static_cast<size_t>(args.head_size) * SizeOf(args.q_dtype);
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(q + i, 0, 3);
    }
  }
}

// --- one chunk of rows over one partition
// --------------------------------------

template <class Ops, FetchMode kFetch>
HWY_INLINE void PassPartition(const AttendArgs& args, const Workspace<Ops>& ws,
                              const RowGroups& groups, int group_begin,
                              int group_end, int64_t partition) {
  const int row_begin = groups.begin(group_begin);
  const int row_end = groups.begin(group_end);
  for (int local = 0; local < row_end - row_begin; ++local) {
    ResetRow(ws.rows[local], ws.lanes + local * kLanes,
             ws.acc + local * ws.acc_floats, ws.acc_floats);
  }
  const int64_t low = HWY_MAX(partition * kPartition, ws.places[row_begin].low);
  const int64_t high =
      HWY_MIN((partition + 1) * kPartition, ws.places[row_end - 1].high);
  if (low >= high) return;

  TileContext<Ops> tile;
  tile.args = &args;
  tile.ws = &ws;
  tile.key_stride = KeyStride<Ops>(args);
  const int64_t begin = low / kKeyTile * kKeyTile;
  // What follows this partition's last tile: the next partition's first one, or
  // the next work's.
  const int64_t all =
      HWY_MIN(args.partition_end * kPartition, ws.places[row_end - 1].high);
  TilePages pages = FindPages<Ops>(args, args.kv, begin, low, all);
  for (int64_t t = begin; t < high; t += kKeyTile) {
    const int64_t next = t + kKeyTile;
    TilePages next_pages = pages;
    bool has_next = next < all;
    if (has_next) {
      next_pages = FindPages<Ops>(args, args.kv, next, low, all);
    } else if (kFetch == kFetchNear && args.next.k != nullptr) {
      has_next = true;
      next_pages =
          FindPages<Ops>(args, args.next, args.next_low / kKeyTile * kKeyTile,
                         args.next_low, args.next_high);
    }
    tile.pages = &pages;
    tile.tile_begin = t;
    for (int g = group_begin; g < group_end; ++g) {
      const int row = groups.begin(g);
      if (t == begin) FetchRows(args, ws, row, groups.begin(g + 1));
      AimFetch<Ops, kFetch>(tile, next_pages, has_next, g - group_begin,
                            group_end - group_begin);
      PassTile<Ops, kFetch>(tile, groups.begin(g + 1) - row, row,
                            row - row_begin);
    }
    pages = next_pages;
  }
}

// Hands a row's state of one partition on: to its partial record, to its output
// where this is all there is, or into the merged state.
template <class Ops>
HWY_INLINE void ClosePartition(const AttendArgs& args, const Workspace<Ops>& ws,
                               int row, int local, int64_t partition) {
  const float max = ws.rows[local].max;
  const float sum = SumLanes(ws.lanes + local * kLanes);
  float* acc = ws.acc + local * ws.acc_floats;
  if (args.partials != nullptr) {
    float* record = args.partials + row * PartialFloats(ws.acc_floats);
    record[0] = max;
    record[1] = sum;
    std::memcpy(record + kLanes, acc,
                static_cast<size_t>(ws.acc_floats) * sizeof(float));
    return;
  }
  const RowPlace& place = ws.places[row];
  const int64_t last =
      HWY_MIN(HWY_MAX((place.high - 1) / kPartition, args.partition_begin),
              args.partition_end - 1);
  if (partition > last) return;  // finished before
  State state = {max, sum, acc};
  if (partition != args.partition_begin || partition != last) {
    State& merged = ws.states[row];
    if (partition == args.partition_begin) {
      merged = {kMinusInf, 0, ws.running + int64_t{row} * ws.acc_floats};
    }
    MergeState<Ops>(merged, max, sum, acc, ws.acc_floats);
    state = merged;
  }
  if (partition != last) return;
  const int64_t token = place.token;
  const int64_t head = place.head;
  float* lse = args.lse == nullptr
                   ? nullptr
                   : args.lse + token * args.lse_token_stride + head;
  FinishRow<Ops>(
      state, args.sinks == nullptr ? nullptr : args.sinks + head,
      args.v_head_size, args.out_dtype,
      RowAt(args.out, args.out_dtype,
            token * args.out_token_stride + head * args.out_head_stride),
      lse);
}

template <class Ops>
HWY_INLINE void PackRows(const AttendArgs& args, const Workspace<Ops>& ws,
                         int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    const RowPlace& place = ws.places[row];
    PackQuery<Ops>(
        args, place.token, place.head, ws.floats,
        ws.q + static_cast<size_t>(row) * static_cast<size_t>(ws.steps));
  }
}

// Few rows stream K/V once, fetching near; the first chunk of many brings a
// partition from L3 or DRAM into L2 for the others.
template <class Ops>
HWY_INLINE void PassChunk(const AttendArgs& args, const Workspace<Ops>& ws,
                          const RowGroups& groups, int begin, int end,
                          int64_t partition) {
  constexpr int kNearGroups = 2;
  if (groups.count <= kNearGroups) {
    PassPartition<Ops, kFetchNear>(args, ws, groups, begin, end, partition);
  } else if (begin == 0) {
    PassPartition<Ops, kFetchFar>(args, ws, groups, begin, end, partition);
  } else {
    PassPartition<Ops, kNoFetch>(args, ws, groups, begin, end, partition);
  }
}

template <class Ops>
void AttendRows(const AttendArgs& args) {
  const ScopedFlushDenormals flush;
  const int rows = args.num_tokens * args.group;
  const RowGroups groups(rows);
  Workspace<Ops> ws;
  ws.Carve(args.scratch, rows, args.head_size, args.v_head_size);
  PlaceRows(args, ws);
  for (int64_t p = args.partition_begin; p < args.partition_end; ++p) {
    for (int g = 0; g < groups.count; g += kChunkGroups) {
      const int group_end = HWY_MIN(g + kChunkGroups, groups.count);
      const int row_begin = groups.begin(g);
      const int row_end = groups.begin(group_end);
      if (p == args.partition_begin) PackRows(args, ws, row_begin, row_end);
      PassChunk<Ops>(args, ws, groups, g, group_end, p);
      for (int row = row_begin; row < row_end; ++row) {
        ClosePartition<Ops>(args, ws, row, row - row_begin, p);
      }
    }
  }
}

// Folds partial records in index order and writes the rows.
template <class Ops>
void MergePartials(const MergeArgs& args) {
  const ScopedFlushDenormals flush;
  const int acc_floats = (args.v_head_size + kLanes - 1) / kLanes * kLanes;
  for (int row = 0; row < args.num_tokens * args.group; ++row) {
    State state = {kMinusInf, 0, reinterpret_cast<float*>(args.scratch)};
    const float* record = args.partials + row * PartialFloats(acc_floats);
    for (int64_t p = 0; p < args.num_partials; ++p) {
      MergeState<Ops>(state, record[0], record[1], record + kLanes, acc_floats);
      record += args.partial_stride;
    }
    const int64_t token = row / args.group;
    const int64_t head = row % args.group;
    FinishRow<Ops>(
        state, args.sinks == nullptr ? nullptr : args.sinks + head,
        args.v_head_size, args.out_dtype,
        RowAt(args.out, args.out_dtype,
              token * args.out_token_stride + head * args.out_head_stride),
        args.lse == nullptr ? nullptr
                            : args.lse + token * args.lse_token_stride + head);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
