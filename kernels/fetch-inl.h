// What to fetch ahead: the next run, and where rows will write.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Pieces [from, to) of the pool, each one 16-token group of K resp. V.
template <class Ops>
HWY_INLINE void FetchKeys(const RunContext<Ops>& run,
                          const std::byte* const* from,
                          const std::byte* const* to, Pieces pieces,
                          Prefetch& fetch) {
  const size_t stride = HWY_MAX(run.pool_key_stride, size_t{64});
  const size_t bytes = static_cast<size_t>(run.ws->steps) * run.pool_key_stride;
  fetch.Start(from, to, pieces, stride, bytes / stride);
}
template <class Ops>
HWY_INLINE void FetchValues(const RunContext<Ops>& run,
                            const std::byte* const* from,
                            const std::byte* const* to, Pieces pieces,
                            Prefetch& fetch) {
  fetch.Start(from, to, pieces, 64, run.pool_value_bytes / 64);
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
  const auto* v = run.pages->v;
  FetchValues(run, v, v + run.pages->count, Pieces::kPaired, run.score_fetch);
  run.value_fetch.onward = KeyHead(run.pages->k, 0);
  // What a cache may hold is not worth asking for twice.
  run.score_fetch.again = run.value_fetch.again = run.several;
  if (run.next == nullptr) return;
  run.value_fetch.onward = KeyHead(run.next->k, run.key_stride);
  FetchKeys(run, run.next->k, run.next->k + run.next->count, Pieces::kPaired,
            run.value_fetch);
}

// Pieces [begin, end) of the next run: keys while scores are computed, values
// while values are added.
template <class Ops>
HWY_INLINE void AimPieces(RunContext<Ops>& run, const RunPages& next, int begin,
                          int end, Pieces pieces) {
  AimNowhere(run);
  FetchKeys(run, next.k + begin, next.k + end, pieces, run.score_fetch);
  FetchValues(run, next.v + begin, next.v + end, pieces, run.value_fetch);
}

// A single group of kIntelAvx512, at `tile`, where a unit begins: the keys and
// the values of the next one while it computes the same of this one.
template <class Ops>
HWY_INLINE void AimUnit(RunContext<Ops>& run, int tile) {
  const bool within = tile + kUnit < run.tiles;
  const RunPages* pages = within ? run.pages : run.next;
  const int begin = within ? (tile + kUnit) * kGroups : 0;
  if (pages == nullptr) {
    AimNowhere(run);
    run.value_fetch.onward = KeyHead(run.pages->k, 0);
  } else {
    const int end = HWY_MIN(begin + kUnit * kGroups, pages->count);
    AimPieces(run, *pages, begin, end, Pieces::kTogether);
    run.value_fetch.onward = KeyHead(pages->k + begin, run.key_stride);
  }
  run.score_fetch.again = run.value_fetch.again = true;
}

// A single group of kZen5, which adds a tile's values after the next one's
// scores. While scores of `tile` are computed: what is read after its keys.
template <class Ops>
HWY_INLINE void AimScores(RunContext<Ops>& run, int tile) {
  AimNowhere(run);
  run.score_fetch.again = true;
  if (tile == 0 && run.tiles > 1) {
    const auto* k = run.pages->k + kGroups;
    FetchKeys(run, k, k + kGroups, Pieces::kTogether, run.score_fetch);
  } else {
    const auto* v = run.pages->v + HWY_MAX(tile - 1, 0) * kGroups;
    FetchValues(run, v, v + kGroups, Pieces::kTogether, run.score_fetch);
  }
}

// While values of `tile` are added: what is read after those, keys two tiles
// on, the last tile's values, or the next run.
template <class Ops>
HWY_INLINE void AimValues(RunContext<Ops>& run, int tile) {
  Prefetch& fetch = run.value_fetch;
  fetch.Idle(run.pages->k[0]);
  fetch.again = run.several;
  fetch.onward = KeyHead(run.pages->k, 0);
  if (tile + 2 == run.tiles) {
    const auto* v = run.pages->v + (tile + 1) * kGroups;
    FetchValues(run, v, v + kGroups, Pieces::kTogether, fetch);
    return;
  }
  const std::byte* const* k = nullptr;
  if (tile + 2 < run.tiles) k = run.pages->k + (tile + 2) * kGroups;
  if (tile + 1 == run.tiles && run.next != nullptr) k = run.next->k;
  if (k == nullptr) return;
  FetchKeys(run, k, k + kGroups, Pieces::kTogether, fetch);
  fetch.onward = KeyHead(k, run.key_stride);
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

// q of rows that are packed next.
template <class Ops>
HWY_INLINE void FetchQuery(RunContext<Ops>& run, int row_begin, int row_end) {
  const AttendArgs& args = *run.args;
  const size_t bytes =
      static_cast<size_t>(args.head_size) * SizeOf(args.q_dtype);
  for (int row = row_begin; row < row_end; ++row) {
    const RowPlace& place = run.ws->places[row];
    run.row_fetches.Add(QueryRow(args, place.token, place.head), bytes);
  }
}

// Where rows will write, while there is arithmetic to hide it.
template <class Ops>
HWY_INLINE void FetchOut(RunContext<Ops>& run, int row_begin, int row_end) {
  const AttendArgs& args = *run.args;
  if (args.partials != nullptr) return;
  const size_t bytes =
      static_cast<size_t>(args.v_head_size) * SizeOf(args.out_dtype);
  for (int row = row_begin; row < row_end; ++row) {
    const RowPlace& place = run.ws->places[row];
    run.row_fetches.Add(OutRow(args, place.token, place.head), bytes);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
