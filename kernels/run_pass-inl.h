// A run of key tiles and all register groups of a threadgroup: each KV head in
// turn, and its groups either one after the other over the whole run or, where
// that keeps a tile in L1 for all of them, tile by tile.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// How many of a KV head's register groups, the last ones, fetch the next run.
constexpr int kMostTurns = 4;
// Where there is no FMA, memory is ahead of the arithmetic by itself.
constexpr bool kFetches = VARLANE_HAS_FMA;

// Twice as many row counts are enough to compile for whether or not the next
// run is fetched.
template <class Ops>
constexpr bool kSparesPasses = kMostOfSeveral<Ops> > kMaxRows;

template <class Ops>
HWY_INLINE int FetchTurns(const RunContext<Ops>& run, int groups) {
  const int turns = HWY_MIN(groups, kMostTurns);
  if (!kAsksOnce || run.next == nullptr) return turns;
  return HWY_MAX(HWY_MIN(turns, run.next->count / kTogether), 1);
}

// What groups of `rows` take side by side. Few fetch two lines a step, lest it
// be late: on AMD's CPUs fewer than the lines that a step reads. Of f16 those
// are two, and two groups at two lines a step would ask for nothing half of the
// time (Zen 5, in turns, from DRAM: one token of a group of 12 10% faster, of
// 16 4 to 10%; Zen 4's kernels there 2 to 15%). On Intel's there are twice as
// many steps beside half as many vectors.
template <class Ops>
HWY_INLINE Pieces FarPieces(int turns, int rows) {
  if constexpr (kAvx2) {
    return kPiecesInTurn<Ops, kFetchFar>;
  } else if constexpr (kIntelAvx512) {
    const bool few = (rows > kMaxRows ? 2 * turns : turns) <= 3;
    return few ? Pieces::kTogetherByTwo : Pieces::kTogether;
  } else {
    constexpr auto kLines = static_cast<int>(kMaxVecs * kVecBytes<Ops> / 64);
    return turns < kLines ? Pieces::kPaired : Pieces::kAlone;
  }
}

// A single register group over a run streams K/V, fetching what it needs next.
template <class Ops>
HWY_INLINE void PassSingle(RunContext<Ops>& run, const Group& group) {
  if constexpr (kFetches && kAsksOnce) {
    AimNext(run, kPiecesInTurn<Ops, kFetchNear>);
  } else if constexpr (kFetches) {
    AimRun(run);
  }
  OfRows<1, kMostRows<Ops>>(group.rows, [&](auto rows) HWY_ATTR {
    PassRows<Ops, decltype(rows)::value, kFetches ? kFetchNear : kNoFetch>(
        run, group);
  });
}

// Several bring the next run into L2 for all of them: the last ones of many, so
// that it need not stay there for long.
template <class Ops>
HWY_INLINE void PassOfSeveral(RunContext<Ops>& run, const Chunk& chunk,
                              const Group& group) {
  if constexpr (kFetches) {
    const int turns = FetchTurns(run, chunk.end - chunk.begin);
    const int turn = group.index - (chunk.end - turns);
    const bool fetches = turn >= 0 && run.next != nullptr;
    if (fetches) {
      AimFar(run, turn, turns, FarPieces<Ops>(turns, group.rows));
    } else if (kSparesPasses<Ops>) {
      AimNowhere(run);
    }
    if (fetches || kSparesPasses<Ops>) {
      PassUpToRows<Ops, kFetchFar>(run, group);
      return;
    }
  }
  if constexpr (!kSparesPasses<Ops>) PassUpToRows<Ops, kNoFetch>(run, group);
}

template <class Ops>
HWY_INLINE void PassByGroup(RunContext<Ops>& run, const RowGroups& groups,
                            const Chunk& chunk, Opening opening, int head) {
  for (int g = chunk.begin; g < chunk.end; ++g) {
    const Group group(groups, chunk, head, g);
    OpenGroup(run, groups, chunk, opening, head, group);
    if constexpr (kZen5) {
      PassOfSeveral(run, chunk, group);  // a single one by heads
    } else if (groups.count == 1) {
      PassSingle(run, group);
    } else if constexpr (!kSeveralByTile<Ops>) {
      PassOfSeveral(run, chunk, group);
    }
  }
}

// Tile by tile, and its keys before its values: each of them stays in L1 while
// all groups read it, which leaves L2 alone, on whose reads the clock falls (a
// Xeon with AMX, f32, head size 128, a loop alone: 8% less), and looks up each
// page once.
template <class Pool, class Ops>
HWY_INLINE void PassByTile(RunContext<Ops>& run, const RowGroups& groups,
                           const Chunk& chunk, Opening opening, int head) {
  constexpr bool kWidened = !std::is_same_v<Pool, Ops>;
  const RunPages& pool = *run.pages;
  RunPages wide;
  int first_turn = chunk.end;
  if (run.next != nullptr) {
    const int turns = HWY_MIN(chunk.end - chunk.begin, kMostTurns);
    first_turn = chunk.end - turns;
    AimFar(run, 0, 1, FarPieces<Ops>(turns, kMaxRows));
  }
  const bool whole = (1 << run.args->kv.block_size_log2) >= kKeyTile;
  const bool copies = CopiesValues<Pool>(groups) && !whole;
  if (copies) wide = pool;  // keys stay where they are
  if (kWidened || copies) run.pages = &wide;
  // Groups that repeat a neighbour are not read.
  run.on_end = kWidened || copies || whole;
  Unadded unadded[kChunkGroups];
  for (int tile = 0; tile < run.tiles; ++tile) {
    if constexpr (kWidened) {
      WidenKeys<Pool>(pool, tile, run.pool_key_stride, run.args->head_size,
                      run.ws->wide, wide);
    }
    for (int g = chunk.begin; g < chunk.end; ++g) {
      const Group group(groups, chunk, head, g);
      OpenTile(run, groups, chunk, opening, head, group, tile);
      unadded[group.slot] =
          g < first_turn ? WeighUpToRows<Ops, kNoFetch>(run, group, tile)
                         : WeighUpToRows<Ops, kFetchFar>(run, group, tile);
    }
    if constexpr (kCutsPanels) {
      CutPanels<Ops>(pool.v + tile * kGroups, run.ws->acc_floats,
                     reinterpret_cast<std::byte*>(run.ws->wide));
    }
    if (kWidened || copies) {
      WidenValues<Pool>(pool, tile, run.ws->acc_floats, run.ws->wide, wide);
    }
    for (int g = chunk.begin; g < chunk.end; ++g) {
      const Group group(groups, chunk, head, g);
      if (unadded[group.slot] == Unadded::kNothing) continue;
      if (g < first_turn) {
        AddUpToRows<Ops, kNoFetch>(run, group, tile, unadded[group.slot]);
      } else {
        AddUpToRows<Ops, kFetchFar>(run, group, tile, unadded[group.slot]);
      }
    }
  }
}

template <class Ops, int R>
HWY_NOINLINE bool WeighTogether(RunContext<Ops>& run, const Group& group,
                                int tile, Waiting<Ops>& waiting) {
  GroupPass<Ops, R, kFetchFar> pass(run, *run.pages, group, waiting);
  pass.BeginTurn(tile, group.slot);
  pass.PassTile(tile);
  return pass.waits();
}
template <class Ops, int R>
HWY_NOINLINE void AddTogether(RunContext<Ops>& run, const Group& group,
                              int tile, Waiting<Ops>& waiting) {
  GroupPass<Ops, R, kFetchFar> pass(run, *run.pages, group, waiting);
  pass.BeginTurn(tile, group.slot);
  pass.AddLastOfTurn(tile);
}

// A few groups, tile by tile: the scores of all of them, then their values. The
// next run is fetched all the while.
template <class Ops>
HWY_INLINE void PassTogether(RunContext<Ops>& run, const RowGroups& groups,
                             const Chunk& chunk, Opening opening, int head) {
  static_assert(RowGroups::kMany <= kRun + 1, "each has a tile's place");
  if (run.next == nullptr) {
    AimNowhere(run);
  } else {
    AimFar(run, 0, 1, FarPieces<Ops>(groups.count, kMaxRows));
    run.score_fetch.again = run.value_fetch.again = true;
  }
  Waiting<Ops> waiting;
  for (int tile = 0; tile < run.tiles; ++tile) {
    bool waits[RowGroups::kMany];
    for (int g = chunk.begin; g < chunk.end; ++g) {
      const Group group(groups, chunk, head, g);
      OpenTile(run, groups, chunk, opening, head, group, tile);
      waits[group.slot] =
          OfRowsOfSeveral<Ops>(group.rows, [&](auto rows) HWY_ATTR {
            constexpr int kRows = decltype(rows)::value;
            return WeighTogether<Ops, kRows>(run, group, tile, waiting);
          });
    }
    waiting.Finish();
    for (int g = chunk.begin; g < chunk.end; ++g) {
      const Group group(groups, chunk, head, g);
      if (!waits[group.slot]) continue;
      OfRowsOfSeveral<Ops>(group.rows, [&](auto rows) HWY_ATTR {
        AddTogether<Ops, decltype(rows)::value>(run, group, tile, waiting);
      });
    }
  }
}

// A run with every KV head in turn; `next` is read after it, null = not known.
// The pool holds what Pool reads; Ops computes, on widened tiles where it is
// another.
template <class Pool, class Ops>
HWY_INLINE void PassRun(RunContext<Ops>& run, const RowGroups& groups,
                        const Chunk& chunk, Opening opening,
                        const RunPages* pages, const RunPages* next) {
  if constexpr (kZen5 && std::is_same_v<Pool, Ops>) {
    if (groups.count == 1) {
      PassRunByHeads(run, groups, chunk, opening, pages, next);
      return;
    }
  }
  RunPages shifted[2];
  const RunPages* of_head = pages;
  for (int head = 0; head < groups.heads; ++head) {
    run.pages = of_head;
    run.next = next;
    if (head + 1 < groups.heads) {
      ShiftPages(*run.args, *pages, head + 1, shifted[head % 2]);
      run.next = &shifted[head % 2];
    }
    of_head = run.next;
    if constexpr (kSeveralByTile<Ops>) {
      if (ByTile<Ops>(groups)) {
        PassByTile<Pool>(run, groups, chunk, opening, head);
        continue;
      }
    }
    if constexpr (kZen5 && std::is_same_v<Pool, Ops>) {
      if (Together<Ops>(groups)) {
        PassTogether(run, groups, chunk, opening, head);
        continue;
      }
    }
    if constexpr (std::is_same_v<Pool, Ops>) {
      PassByGroup(run, groups, chunk, opening, head);
    }
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
