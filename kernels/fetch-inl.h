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
                          const std::byte* const* to, bool paired,
                          Prefetch& fetch) {
  const size_t stride = HWY_MAX(run.pool_key_stride, size_t{64});
  const size_t bytes = static_cast<size_t>(run.ws->steps) * run.pool_key_stride;
  fetch.Start(from, to, paired, stride, bytes / stride);
}
template <class Ops>
HWY_INLINE void FetchValues(const RunContext<Ops>& run,
                            const std::byte* const* from,
                            const std::byte* const* to, bool paired,
                            Prefetch& fetch) {
  fetch.Start(from, to, paired, 64, run.pool_value_bytes / 64);
}

// A single group: while it computes scores it fetches the run's values, and
// while it adds values the next run's keys.
template <class Ops>
HWY_INLINE void AimNear(RunContext<Ops>& run, const RunPages* next) {
  run.score_fetch.Idle(run.pages->k[0]);
  run.value_fetch.Idle(run.pages->k[0]);
  if constexpr (Fetcher<Ops, kFetchNear>::kOn) {
    const auto* v = run.pages->v;
    FetchValues(run, v, v + run.pages->count, true, run.score_fetch);
  }
  run.value_fetch.onward = KeyHead(run.pages->k, 0);
  // What a cache may hold is not worth asking for twice.
  run.score_fetch.again = run.value_fetch.again = kPlainAvx512 || run.several;
  if (next == nullptr) return;
  run.value_fetch.onward = KeyHead(next->k, run.key_stride);
  if constexpr (Fetcher<Ops, kFetchNear>::kOn) {
    FetchKeys(run, next->k, next->k + next->count, true, run.value_fetch);
  }
}

// Pieces [begin, end) of the next run: keys while scores are computed, values
// while values are added.
template <class Ops>
HWY_INLINE void AimPieces(RunContext<Ops>& run, const RunPages& next, int begin,
                          int end, bool paired) {
  run.score_fetch.Idle(run.pages->k[0]);
  run.value_fetch.Idle(run.pages->k[0]);
  FetchKeys(run, next.k + begin, next.k + end, paired, run.score_fetch);
  FetchValues(run, next.v + begin, next.v + end, paired, run.value_fetch);
}

// Several: the next run is dealt out over them; this one is `turn` of `turns`.
template <class Ops>
HWY_INLINE void AimFar(RunContext<Ops>& run, const RunPages& next, int turn,
                       int turns, bool paired) {
  const int pairs = next.count / 2;
  AimPieces(run, next, pairs * turn / turns * 2, pairs * (turn + 1) / turns * 2,
            paired);
}

// Many: the same over all of them, a few lines before each tile.
template <class Ops>
HWY_INLINE void AimBetween(RunContext<Ops>& run, const RunPages* next, int turn,
                           int turns) {
  run.lines_between = 0;
  if (next == nullptr) return;
  const int begin = next->count * turn / turns;
  const int end = next->count * (turn + 1) / turns;
  AimPieces(run, *next, begin, end, false);
  const size_t most = HWY_MAX(run.score_fetch.lines, run.value_fetch.lines);
  run.lines_between =
      (static_cast<int>(most) * (end - begin) + run.tiles - 1) / run.tiles;
}

// q of rows that are packed next.
template <class Ops>
HWY_INLINE void FetchQuery(const AttendArgs& args, const Workspace<Ops>& ws,
                           int row_begin, int row_end, RowFetches& fetches) {
  const size_t bytes =
      static_cast<size_t>(args.head_size) * SizeOf(args.q_dtype);
  for (int row = row_begin; row < row_end; ++row) {
    const RowPlace& place = ws.places[row];
    fetches.Add(QueryRow(args, place.token, place.head), bytes);
  }
}

// Where rows will write, while there is arithmetic to hide it.
template <class Ops>
HWY_INLINE void FetchOut(const AttendArgs& args, const Workspace<Ops>& ws,
                         int row_begin, int row_end, RowFetches& fetches) {
  if (args.partials != nullptr) return;
  const size_t bytes =
      static_cast<size_t>(args.v_head_size) * SizeOf(args.out_dtype);
  for (int row = row_begin; row < row_end; ++row) {
    const RowPlace& place = ws.places[row];
    fetches.Add(OutRow(args, place.token, place.head), bytes);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
