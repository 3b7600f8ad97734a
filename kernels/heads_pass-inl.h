// A run of key tiles and a single register group of each KV head, as Zen 5
// streams them from memory: tile by tile the keys of all heads, then their
// values, in the order in which they stand there, no faster than they come.
//
// In turns with each head passing the whole run: 3 to 6% faster (2048 tokens,
// bf16).
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

// What is read after the keys resp. the values of a tile of head `i`.
template <class Ops>
HWY_INLINE TileHalf HalfAfter(const RunContext<Ops>& run, const Heads& heads,
                              int i, int tile, bool values) {
  if (i + 1 < heads.count) {
    const RunPages& pages = heads.pages[i + 1];
    return {(values ? pages.v : pages.k) + tile * kGroups, values};
  }
  const RunPages& pages = heads.pages[0];
  if (!values) return {pages.v + tile * kGroups, true};
  if (tile + 1 < run.tiles) return {pages.k + (tile + 1) * kGroups, false};
  return {run.next == nullptr ? nullptr : run.next->k, false};
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
HWY_NOINLINE void PassHeads(RunContext<Ops>& run, const RowGroups& groups,
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
      AimPaced(run, HalfAfter(run, heads, i, tile, false), pace,
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
      AimPaced(run, HalfAfter(run, heads, i, tile, true), pace,
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
      PassHeads<Ops, decltype(r)::value>(run, groups, chunk, opening, heads);
    });
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
