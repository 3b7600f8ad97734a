// A run of key tiles and a single register group of each KV head, as Zen 5
// streams them.
//
// From memory, tile by tile, or two tiles of a large block at a time, the keys
// of all heads, then their values, in the order in which they stand there, no
// faster than they come: in turns with each head passing the whole run 3 to 6%
// faster (2048 tokens, bf16).
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
  return {run.next, 0, false};
}

// Tiles [begin, end) of a run, which a head passes before the next one does.
struct Turn {
  int begin;
  int end;
};

// How many, at most: two of a larger block, whose keys stand side by side in
// each row (blocks of 128 tokens, in turns: bf16 8 to 18% faster, f32 4 to
// 7%; of 256 even). Of 16 tokens it would gain nothing.
template <class Ops>
HWY_INLINE int MostInTurn(const RunContext<Ops>& run) {
  return (1 << run.args->kv.block_size_log2) > kKeyTile ? 2 : 1;
}

// What comes from memory after the keys resp. the values of a tile of head `i`.
template <class Ops>
HWY_INLINE TileHalf PacedAfter(const RunContext<Ops>& run, const Heads& heads,
                               Turn turn, int i, int tile, bool values) {
  if (tile + 1 < turn.end) return {&heads.pages[i], tile + 1, values};
  if (i + 1 < heads.count) return {&heads.pages[i + 1], turn.begin, values};
  if (!values) return {heads.pages, turn.begin, true};
  if (turn.end < run.tiles) return {heads.pages, turn.end, false};
  return NextRun(run);
}

template <class Ops>
HWY_INLINE void AimPaced(RunContext<Ops>& run, TileHalf next, const Pace& pace,
                         Prefetch& fetch) {
  AimTile(run, next, Pieces::kTogether, fetch);
  fetch.onward =
      next.pages == nullptr ? KeyHead(run.pages->k, 0)
      : next.values
          ? ValueHead<Ops>(next.pages->v[next.begin()], 0, run.ws->acc_floats)
          : KeyHead(next.pages->k + next.begin(), run.key_stride);
  fetch.again = pace.again();
  fetch.wait = WaitOf(pace.delay());
}

// One register group of each of several heads in turn, from memory.
template <class Ops, int R>
class PacedPass {
 public:
  HWY_INLINE PacedPass(RunContext<Ops>& run, const RowGroups& groups,
                       const Chunk& chunk, Opening opening, const Heads& heads)
      : run_(run),
        groups_(groups),
        chunk_(chunk),
        opening_(opening),
        heads_(heads),
        pace_(PaceOfThread()) {}

  HWY_INLINE void Run() {
    AimNowhere(run_);
    pace_.Begin(Ticks());
    const auto bytes = static_cast<float>(
        heads_.count * kKeyTile * (run_.args->head_size + run_.ws->acc_floats) *
        static_cast<int>(sizeof(typename Ops::Cache)));
    bool more = true;
    while (more && turn_.end < run_.tiles) {
      NextTurn();
      more = Weigh();
      waiting_.Finish();
      Add();
      if (turn_.begin == 0 && opening_ != kNotFirst) {
        pace_.Begin(Ticks());  // that one had more to do than others
      } else if (more) {
        pace_.Next(Ticks(),
                   bytes * static_cast<float>(turn_.end - turn_.begin));
      }
    }
  }

 private:
  using Pass = GroupPass<Ops, R, kFetchPaced>;

  HWY_INLINE Group FirstGroup() const {
    return Group(groups_, chunk_, heads_.first, 0);
  }

  // The rest of a block; but of tiles that rows do not see as a whole the first
  // one ends it.
  HWY_INLINE void NextTurn() {
    const Group group = FirstGroup();
    const Pass pass(run_, heads_.pages[0], group, waiting_);
    turn_.begin = turn_.end;
    do {
      ++turn_.end;
    } while (turn_.end % most_ != 0 && turn_.end < run_.tiles &&
             pass.SeesAll(turn_.end - 1));
  }

  // Scores of all heads, each tile's weights beside the next one's scores.
  // False where nobody sees what comes after.
  HWY_INLINE bool Weigh() {
    bool more = true;
    Group group = FirstGroup();
    for (int i = 0; i < heads_.count; ++i, group.Shift(R)) {
      Pass pass(run_, heads_.pages[i], group, waiting_);
      pass.BeginTurn(turn_.begin, i * most_);
      for (int tile = turn_.begin; tile < turn_.end; ++tile) {
        Aim(i, tile, false, run_.score_fetch);
        OpenTile(run_, groups_, chunk_, opening_, heads_.first + i, group,
                 tile);
        more = pass.PassTile(tile);  // the same for all of them
      }
      added_[i] = pass.waits() ? pass.added() : kNothingWaits;
    }
    return more;
  }

  // Their values.
  HWY_INLINE void Add() {
    Group group = FirstGroup();
    for (int i = 0; i < heads_.count; ++i, group.Shift(R)) {
      if (added_[i] == kNothingWaits) continue;
      Pass pass(run_, heads_.pages[i], group, waiting_);
      pass.ResumeTurn(turn_.begin, i * most_, added_[i]);
      for (int tile = turn_.begin; tile < turn_.end; ++tile) {
        Aim(i, tile, true, run_.value_fetch);
        if (tile + 1 < turn_.end) {
          pass.AddBefore(tile + 1);
        } else {
          pass.AddLastOfTurn(tile);
        }
      }
    }
  }

  HWY_INLINE void Aim(int i, int tile, bool values, Prefetch& fetch) {
    AimPaced(run_, PacedAfter(run_, heads_, turn_, i, tile, values), pace_,
             fetch);
  }

  static constexpr int kNothingWaits = -1;

  RunContext<Ops>& run_;
  const RowGroups& groups_;
  const Chunk& chunk_;
  const Opening opening_;
  const Heads& heads_;
  Pace& pace_;
  Waiting<Ops> waiting_;
  const int most_ = MostInTurn(run_);
  Turn turn_ = {0, 0};
  int added_[kMostHeads];  // steps of each one's values
};

template <class Ops, int R>
HWY_NOINLINE void PassHeadsPaced(RunContext<Ops>& run, const RowGroups& groups,
                                 const Chunk& chunk, Opening opening,
                                 const Heads& heads) {
  PacedPass<Ops, R>(run, groups, chunk, opening, heads).Run();
}

// A tile of several heads that follow each other, and those beside it where
// each head has `tiles`.
struct HeadTile {
  HWY_INLINE HeadTile Before(int tiles) const {
    return tile == 0 ? HeadTile{head - 1, tiles - 1} : HeadTile{head, tile - 1};
  }
  HWY_INLINE HeadTile After(int tiles) const {
    return tile + 1 == tiles ? HeadTile{head + 1, 0} : HeadTile{head, tile + 1};
  }

  int head;
  int tile;
};

// From a cache, its keys or its values, or the keys of the next run.
template <class Ops>
HWY_INLINE TileHalf NearHalf(const RunContext<Ops>& run, const Heads& heads,
                             HeadTile at, bool values) {
  if (at.head >= heads.count) return NextRun(run);
  return {&heads.pages[at.head], at.tile, values};
}

// While its scores are computed, what is read after its keys: values of the one
// before that `waits`, its own where they are added at `once`, or the next
// one's keys.
template <class Ops>
HWY_INLINE void AimNearScores(RunContext<Ops>& run, const Heads& heads,
                              HeadTile at, bool waits, bool once) {
  const HeadTile after = at.After(run.tiles);
  const bool own = once || after.head == heads.count;
  const TileHalf next = waits ? NearHalf(run, heads, at.Before(run.tiles), true)
                              : NearHalf(run, heads, own ? at : after, own);
  AimTile(run, next, run.near_pieces, run.score_fetch);
  if (!once) return;
  AimTile(run, NearHalf(run, heads, after, false), run.near_pieces,
          run.value_fetch);
}

// While its values are added: what is read after those, keys two tiles on, the
// last tile's values, or the next run.
template <class Ops>
HWY_INLINE void AimNearValues(RunContext<Ops>& run, const Heads& heads,
                              HeadTile at) {
  const HeadTile after = at.After(run.tiles);
  const HeadTile second = after.After(run.tiles);
  const bool ends = after.head < heads.count && second.head == heads.count;
  AimTile(run, NearHalf(run, heads, ends ? after : second, ends),
          run.near_pieces, run.value_fetch);
}

// The values of the last tile of head `i`.
template <class Ops, int R>
HWY_NOINLINE void AddLastNear(RunContext<Ops>& run, const Heads& heads, int i,
                              const Group& group, Waiting<Ops>& waiting) {
  AimNearValues(run, heads, {i, run.tiles - 1});
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
      const HeadTile at = {i, tile};
      const bool waits = waiting.any();
      AimNearScores(run, heads, at, waits, pass.EndsEarly(tile));
      run.row_fetches.Step();
      more = pass.PassTile(tile);
      if (!waits) continue;
      if (tile == 0) {
        AddLastNear<Ops, R>(run, heads, i - 1, before, waiting);
      } else {
        AimNearValues(run, heads, {i, tile - 1});
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
  const int most = run.from_memory ? kMostHeads / MostInTurn(run) : kMostHeads;
  for (int first = 0; first < groups.heads; first += most) {
    heads.first = first;
    heads.count = HWY_MIN(groups.heads - first, most);
    for (int i = 0; i < heads.count; ++i) {
      ShiftPages(*run.args, *pages, first + i, heads.pages[i]);
    }
    run.pages = heads.pages;
    run.next = next;
    if (first + heads.count < groups.heads) {
      ShiftPages(*run.args, *pages, first + heads.count, after);
      run.next = &after;
    }
    OfRows<1, kMostRows<Ops>>(groups.rows, [&](auto r) HWY_ATTR {
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
