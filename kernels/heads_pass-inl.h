// A run of key tiles and a single register group of each KV head, as Zen 5
// streams them.
//
// From memory, tile by tile the keys of all heads, then their values, in the
// order in which they stand there, no faster than they come: in turns with each
// head passing the whole run 3 to 6% faster (2048 tokens, bf16).
//
// From a cache head by head, each tile's values after the next one's scores,
// beside which its weights are computed: what is fetched is read soon, and
// fetching never pauses for long.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Whose weights wait side by side: as many as a run has tiles.
constexpr int kMostHeads = kRun;

// KV heads [first, first + count) and where the run's keys of each stand.
struct Heads {
  HWY_INLINE Heads() = default;  // see passes-inl.h

  int first;
  int count;
  RunPages pages[kMostHeads];
};

// The first keys of what is read after the run, if that is known.
template <class Ops>
HWY_INLINE TileHalf NextRun(const RunContext<Ops>& run) {
  return {run.next == nullptr ? nullptr : run.next->k, false};
}

// What comes from memory after the keys resp. the values of a tile of head `i`.
template <class Ops>
HWY_INLINE TileHalf PacedAfter(const RunContext<Ops>& run, const Heads& heads,
                               int i, int tile, bool values) {
  if (i + 1 < heads.count) {
    const RunPages& pages = heads.pages[i + 1];
    return {(values ? pages.v : pages.k) + tile * kGroups, values};
  }
  const RunPages& pages = heads.pages[0];
  if (!values) return {pages.v + tile * kGroups, true};
  if (tile + 1 < run.tiles) return {pages.k + (tile + 1) * kGroups, false};
  return NextRun(run);
}

template <class Ops>
HWY_INLINE void AimPaced(RunContext<Ops>& run, TileHalf next, const Pace& pace,
                         Prefetch& fetch) {
  AimTile(run, next, Pieces::kTogether, fetch);
  fetch.onward = next.groups == nullptr ? KeyHead(run.pages->k, 0)
                 : next.values
                     ? ValueHead<Ops>(next.groups[0], 0, run.ws->acc_floats)
                     : KeyHead(next.groups, run.key_stride);
  fetch.again = pace.again();
  fetch.wait = WaitOf(pace.delay());
}

template <class Ops, int R>
HWY_NOINLINE void PassHeadsPaced(RunContext<Ops>& run, const RowGroups& groups,
                                 const Chunk& chunk, Opening opening,
                                 const Heads& heads) {
  using Pass = GroupPass<Ops, R, kFetchPaced>;
  Waiting<Ops> waiting;
  AimNowhere(run);
  Pace& pace = PaceOfThread();
  pace.Begin(Ticks());
  const auto bytes = static_cast<float>(
      heads.count * kKeyTile * (run.args->head_size + run.ws->acc_floats) *
      static_cast<int>(sizeof(typename Ops::Cache)));
  bool more = true;
  for (int tile = 0; more && tile < run.tiles; ++tile) {
    bool waits[kMostHeads];
    Group group(groups, chunk, heads.first, 0);
    for (int i = 0; i < heads.count; ++i, group.Shift(R)) {
      AimPaced(run, PacedAfter(run, heads, i, tile, false), pace,
               run.score_fetch);
      OpenTile(run, groups, chunk, opening, heads.first + i, group, tile);
      Pass pass(run, heads.pages[i], group, waiting);
      more = pass.WeighBeside(tile, i);  // the same for all of them
      waits[i] = pass.waits();
    }
    waiting.Finish();
    group.Shift(-R * heads.count);
    for (int i = 0; i < heads.count; ++i, group.Shift(R)) {
      if (!waits[i]) continue;
      AimPaced(run, PacedAfter(run, heads, i, tile, true), pace,
               run.value_fetch);
      Pass(run, heads.pages[i], group, waiting).AddBeside(tile, i);
    }
    if (tile == 0 && opening != kNotFirst) {
      pace.Begin(Ticks());  // that one had more to do than others
    } else if (more) {
      pace.Next(Ticks(), bytes);
    }
  }
}

// From a cache, the keys or the values of the `at`th tile, counted through all
// heads.
template <class Ops>
HWY_INLINE TileHalf NearHalf(const RunContext<Ops>& run, const Heads& heads,
                             int at, bool values) {
  const RunPages& pages = heads.pages[at / run.tiles];
  return {(values ? pages.v : pages.k) + at % run.tiles * kGroups, values};
}

// The keys of that one, or of the next run.
template <class Ops>
HWY_INLINE TileHalf NearKeys(const RunContext<Ops>& run, const Heads& heads,
                             int at) {
  if (at < heads.count * run.tiles) return NearHalf(run, heads, at, false);
  return NextRun(run);
}

// While its scores are computed, what is read after its keys: values of the one
// before that `waits`, its own where they are added at `once`, or the next
// one's keys.
template <class Ops>
HWY_INLINE void AimNearScores(RunContext<Ops>& run, const Heads& heads, int at,
                              bool waits, bool once) {
  const bool last = at + 1 == heads.count * run.tiles;
  const TileHalf next = waits          ? NearHalf(run, heads, at - 1, true)
                        : once || last ? NearHalf(run, heads, at, true)
                                       : NearHalf(run, heads, at + 1, false);
  AimTile(run, next, run.near_pieces, run.score_fetch);
  if (!once) return;
  AimTile(run, NearKeys(run, heads, at + 1), run.near_pieces, run.value_fetch);
}

// While its values are added: what is read after those, keys two tiles on, the
// last tile's values, or the next run.
template <class Ops>
HWY_INLINE void AimNearValues(RunContext<Ops>& run, const Heads& heads,
                              int at) {
  const TileHalf next = at + 2 == heads.count * run.tiles
                            ? NearHalf(run, heads, at + 1, true)
                            : NearKeys(run, heads, at + 2);
  AimTile(run, next, run.near_pieces, run.value_fetch);
}

// The values of the last tile of head `i`.
template <class Ops, int R>
HWY_INLINE void AddLastNear(RunContext<Ops>& run, const Heads& heads, int i,
                            const Group& group, Waiting<Ops>& waiting) {
  AimNearValues(run, heads, (i + 1) * run.tiles - 1);
  GroupPass<Ops, R, kFetchNear>(run, heads.pages[i], group, waiting)
      .AddLast(i % 2 != 0);
}

template <class Ops, int R>
HWY_NOINLINE void PassHeadsNear(RunContext<Ops>& run, const RowGroups& groups,
                                const Chunk& chunk, Opening opening,
                                const Heads& heads) {
  Waiting<Ops> waiting;
  Group group(groups, chunk, heads.first, 0);
  Group before = group;
  for (int i = 0; i < heads.count; ++i, before = group, group.Shift(R)) {
    OpenGroup(run, groups, chunk, opening, heads.first + i, group);
    GroupPass<Ops, R, kFetchNear> pass(run, heads.pages[i], group, waiting);
    pass.BeginInTurn(i % 2 != 0);
    bool more = true;
    for (int tile = 0; more && tile < run.tiles; ++tile) {
      const int at = i * run.tiles + tile;
      const bool waits = waiting.any();
      AimNearScores(run, heads, at, waits, pass.EndsEarly(tile));
      run.row_fetches.Step();
      more = pass.PassTile(tile);
      if (!waits) continue;
      if (tile == 0) {
        AddLastNear<Ops, R>(run, heads, i - 1, before, waiting);
      } else {
        AimNearValues(run, heads, at - 1);
        pass.AddBefore(tile);
      }
    }
    run.row_fetches.Finish();
  }
  if (!waiting.any()) return;
  waiting.Finish();
  AddLastNear<Ops, R>(run, heads, heads.count - 1, before, waiting);
}

// All heads, kMostHeads of them at a time.
template <class Ops>
HWY_INLINE void PassRunByHeads(RunContext<Ops>& run, const RowGroups& groups,
                               const Chunk& chunk, Opening opening,
                               const RunPages* pages, const RunPages* next) {
  Heads heads;
  RunPages after;
  for (int first = 0; first < groups.heads; first += kMostHeads) {
    heads.first = first;
    heads.count = HWY_MIN(groups.heads - first, kMostHeads);
    for (int i = 0; i < heads.count; ++i) {
      ShiftPages(*run.args, *pages, first + i, heads.pages[i]);
    }
    run.pages = heads.pages;
    run.next = next;
    if (first + heads.count < groups.heads) {
      ShiftPages(*run.args, *pages, first + heads.count, after);
      run.next = &after;
    }
    OfRows<kMostRows<Ops>>(groups.rows, [&](auto r) HWY_ATTR {
      constexpr int kRows = decltype(r)::value;
      if (run.from_memory) {
        PassHeadsPaced<Ops, kRows>(run, groups, chunk, opening, heads);
      } else {
        PassHeadsNear<Ops, kRows>(run, groups, chunk, opening, heads);
      }
    });
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
