// What to fetch ahead: the next run, and where rows will write.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// The values of the group that stands at `group`, from vector `vec` on.
template <class Ops>
HWY_INLINE StreamHead ValueHead(const std::byte* group, int vec,
                                int acc_floats) {
  StreamHead head;
  for (int i = 0; i < kHeadLines; ++i) {
    head.line[i] = group + VecOffset<Ops>(vec) + i * 64;
  }
  head.stride = ValueStride<Ops>(acc_floats);
  return head;
}

// Whether the blocks that hold keys [begin, end) of a run are seen as a whole.
template <class Ops>
HWY_INLINE bool SeesBlocks(const RunContext<Ops>& run, const RunPages& pages,
                           int begin, int end) {
  const int mask = (1 << run.args->kv.block_size_log2) - 1;
  return (begin & ~mask) >= pages.low && ((end + mask) & ~mask) <= pages.high;
}
template <class Ops>
HWY_INLINE bool SeesAll(const RunContext<Ops>& run, const RunPages& pages) {
  return SeesBlocks(run, pages, 0, pages.count * kGroupTokens);
}

// Where the lines of K stand that are asked for as a 16-token group's, as many
// as it fills: the piece of group g begins (g & mask) * shift bytes after it.
struct KeyPieces {
  size_t stride = 64;
  size_t shift = 0;
  int mask = 0;
};

// A block of 16 tokens is a piece. In larger ones, each row has a part of every
// group; where they are seen as a whole a piece is as much of the block, so
// that memory is read in the order in which it stands (in turns, 5 tokens of a
// group of 4 in bf16, blocks of 32 and 128 tokens: 5% faster; 4 rows from L3,
// 32: 8 to 12%). Of others it is a line of each row; two groups of f16 share
// that line, so each takes half of the rows.
template <class Ops>
HWY_INLINE KeyPieces KeyPiecesOf(const RunContext<Ops>& run, bool whole) {
  const size_t row = run.pool_key_stride;
  const size_t part = run.pool_key_part;
  if (row == part) return {};
  if (whole) {
    const int groups = (1 << run.args->kv.block_size_log2) / kGroupTokens;
    return {.shift = run.pool_key_bytes - part, .mask = groups - 1};
  }
  if (part >= 64) return {.stride = row};
  const auto rows = static_cast<size_t>(run.ws->steps);
  return {.stride = row, .shift = rows / 2 * row - part, .mask = 1};
}

// Pieces [from, to) of a run in the pool, each one 16-token group's K resp. V;
// `whole`: of blocks that are seen as a whole.
template <class Ops>
HWY_NOINLINE void FetchKeys(RunContext<Ops>& run, const RunPages& pages,
                            int from, int to, bool whole, Pieces side_by_side,
                            Prefetch& fetch) {
  const KeyPieces pieces = KeyPiecesOf(run, whole);
  const std::byte* const* first = pages.k + from;
  if (pieces.shift != 0) {
    const std::byte** const shifted =
        run.shifted[&fetch == &run.score_fetch ? 0 : 1];
    for (int g = from; g < to; ++g) {
      shifted[g - from] =
          pages.k[g] + static_cast<size_t>(g & pieces.mask) * pieces.shift;
    }
    first = shifted;
  }
  fetch.Start(first, first + (to - from), side_by_side, pieces.stride,
              run.pool_key_bytes / 64);
}
template <class Ops>
HWY_INLINE void FetchValues(const RunContext<Ops>& run, const RunPages& pages,
                            int from, int to, Pieces side_by_side,
                            Prefetch& fetch) {
  fetch.Start(pages.v + from, pages.v + to, side_by_side, 64,
              run.pool_value_bytes / 64);
}

template <class Ops>
HWY_INLINE void AimNowhere(RunContext<Ops>& run) {
  run.score_fetch.Idle(run.pages->k[0]);
  run.value_fetch.Idle(run.pages->k[0]);
}

// A single group: while it computes scores it fetches the run's values, and
// while it adds values the next run's keys.
template <class Ops>
HWY_INLINE void AimRun(RunContext<Ops>& run) {
  AimNowhere(run);
  FetchValues(run, *run.pages, 0, run.pages->count, Pieces::kPaired,
              run.score_fetch);
  run.value_fetch.onward = KeyHead(run.pages->k, 0);
  // What a cache may hold is not worth asking for twice.
  run.score_fetch.again = run.value_fetch.again = run.from_memory;
  if (run.next == nullptr) return;
  run.value_fetch.onward = KeyHead(run.next->k, run.key_stride);
  FetchKeys(run, *run.next, 0, run.next->count, SeesAll(run, *run.next),
            Pieces::kPaired, run.value_fetch);
}

// Pieces [begin, end) of the next run: keys while scores are computed, values
// while values are added.
template <class Ops>
HWY_INLINE void AimPieces(RunContext<Ops>& run, const RunPages& next, int begin,
                          int end, Pieces pieces) {
  AimNowhere(run);
  FetchKeys(run, next, begin, end, SeesAll(run, next), pieces, run.score_fetch);
  FetchValues(run, next, begin, end, pieces, run.value_fetch);
}

// A single group where kAsksOnce: the keys and the values of the next run while
// it computes the same of this one.
template <class Ops>
HWY_INLINE void AimNext(RunContext<Ops>& run, Pieces pieces) {
  if (run.next == nullptr) {
    AimNowhere(run);
    run.value_fetch.onward = KeyHead(run.pages->k, 0);
  } else {
    AimPieces(run, *run.next, 0, run.next->count, pieces);
    run.value_fetch.onward = KeyHead(run.next->k, run.key_stride);
  }
  run.score_fetch.again = run.value_fetch.again = true;
}

// What a single group of kZen5 reads: the keys or the values of a tile.
struct TileHalf {
  const RunPages* pages;  // null = nothing
  int tile;
  bool values;
  HWY_INLINE int begin() const { return tile * kGroups; }  // its first group
};

// The keys of a tile in blocks of more than 16 tokens: where pieces go
// together, row by row. Not inlined beside loops that have no use for it.
template <class Ops>
HWY_NOINLINE void FetchTileOfBlocks(RunContext<Ops>& run, TileHalf next,
                                    Pieces side_by_side, Prefetch& fetch) {
  const RunPages& pages = *next.pages;
  const int from = next.begin();
  const int key = next.tile * kKeyTile;
  const bool whole = side_by_side == Pieces::kAlone &&
                     SeesBlocks(run, pages, key, key + kKeyTile);
  FetchKeys(run, pages, from, from + kGroups, whole, side_by_side, fetch);
}

// So `fetch` brings `next` while what is read before it is computed. Called,
// twice a tile: it is as long as all that stands around its calls.
template <class Ops>
HWY_NOINLINE void AimTile(RunContext<Ops>& run, TileHalf next, Pieces pieces,
                          Prefetch& fetch) {
  fetch.Idle(run.pages->k[0]);
  if (next.pages == nullptr) return;
  const int from = next.begin();
  if (next.values) {
    FetchValues(run, *next.pages, from, from + kGroups, pieces, fetch);
  } else if (HWY_LIKELY(run.pool_key_stride == run.pool_key_part)) {
    const std::byte* const* k = next.pages->k + from;
    fetch.Start(k, k + kGroups, pieces, 64, run.pool_key_bytes / 64);
  } else {
    FetchTileOfBlocks(run, next, pieces, fetch);
  }
}

// Several: the next run is dealt out over them; this one is `turn` of `turns`,
// the only one where they take turns at each tile.
template <class Ops>
HWY_INLINE void AimFar(RunContext<Ops>& run, int turn, int turns,
                       Pieces pieces) {
  const int pairs = run.next->count / 2;
  AimPieces(run, *run.next, pairs * turn / turns * 2,
            pairs * (turn + 1) / turns * 2, pieces);
}

// q of a row that is packed soon.
template <class Ops>
HWY_INLINE void FetchQuery(const RunContext<Ops>& run, int row) {
  const AttendArgs& args = *run.args;
  const RowPlace& place = run.ws->places[row];
  FetchLines(QueryRow(args, args.q, place.token, place.head),
             static_cast<size_t>(args.head_size) * SizeOf(args.q_dtype));
}

// The first ones of what this worker does next.
template <class Ops>
HWY_INLINE void FetchNextQuery(RunContext<Ops>& run) {
  const AttendArgs& args = *run.args;
  if (args.next_q == nullptr) return;
  const size_t bytes =
      static_cast<size_t>(args.head_size) * SizeOf(args.q_dtype);
  const int rows = HWY_MIN(kMaxRows, args.next_tokens * args.group);
  for (int row = 0; row < rows; ++row) {
    run.row_fetches.Add(
        QueryRow(args, args.next_q, row / args.group, row % args.group), bytes);
  }
}

// Where rows will write, while there is arithmetic to hide it; but what goes
// past the caches is not read.
template <class Ops>
HWY_INLINE void FetchOut(RunContext<Ops>& run, int row_begin, int row_end) {
  const AttendArgs& args = *run.args;
  if (args.partials != nullptr || args.streams_out) return;
  const size_t bytes =
      static_cast<size_t>(args.v_head_size) * SizeOf(args.out_dtype);
  for (int row = row_begin; row < row_end; ++row) {
    const RowPlace& place = run.ws->places[row];
    run.row_fetches.Add(OutRow(args, place.token, place.head), bytes);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
