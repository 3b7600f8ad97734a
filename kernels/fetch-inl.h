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
  run.score_fetch.again = run.value_fetch.again = run.from_memory;
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
  const std::byte* const* groups;  // null = nothing
  bool values;
};

// So `fetch` brings `next` while what is read before it is computed.
template <class Ops>
HWY_INLINE void AimTile(RunContext<Ops>& run, TileHalf next, Pieces pieces,
                        Prefetch& fetch) {
  fetch.Idle(run.pages->k[0]);
  if (next.groups == nullptr) return;
  if (next.values) {
    FetchValues(run, next.groups, next.groups + kGroups, pieces, fetch);
  } else {
    FetchKeys(run, next.groups, next.groups + kGroups, pieces, fetch);
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
