// What a register group needs before its first keys: its rows' q, packed, and
// the lines where they will be written.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Whether a run is the first one of a partition, and of all partitions.
enum Opening : uint8_t { kNotFirst, kFirstOfPartition, kFirst };

// The end of the rows that are packed after this group's, which they follow;
// itself where those are another threadgroup's.
HWY_INLINE int NextRowsEnd(const RowGroups& groups, const Chunk& chunk,
                           int head, const Group& group) {
  if (group.index + 1 < chunk.end) return groups.begin(group.index + 2, head);
  if (head + 1 < groups.heads) return groups.begin(1, head + 1);
  return group.row + group.rows;
}

// Before a register group meets its first keys: its q is packed, and the next
// one's asked for, which this one's arithmetic hides. Between the rows: while
// keys pass L1 Zen 5 drops what is asked for (8x512 in bf16, MHA at head size
// 64, asked for tile by tile: 3 to 4% slower), and all at once would keep keys
// waiting.
template <class Ops>
HWY_INLINE void PackGroup(RunContext<Ops>& run, const RowGroups& groups,
                          const Chunk& chunk, int head, const Group& group) {
  const int end = group.row + group.rows;
  const int next_end = NextRowsEnd(groups, chunk, head, group);
  if (next_end == end) FetchNextQuery(run);
  const Workspace<Ops>& ws = *run.ws;
  int next = end;
  for (int row = group.row; row < end; ++row) {
    const RowPlace& place = ws.places[row];
    PackQuery<Ops>(
        *run.args, QueryRow(*run.args, run.args->q, place.token, place.head),
        ws.floats,
        ws.q + static_cast<size_t>(row) * static_cast<size_t>(ws.steps));
    if (next < next_end) FetchQuery(run, next++);
  }
  while (next < next_end) FetchQuery(run, next++);
}

// The same of a group that passes all of a run before another does, and where
// it will write, by and by. Called: it is long, and has no row count as a
// constant.
template <class Ops>
HWY_NOINLINE void OpenFirst(RunContext<Ops>& run, const RowGroups& groups,
                            const Chunk& chunk, Opening opening, int head,
                            const Group& group) {
  if (opening == kFirst) PackGroup(run, groups, chunk, head, group);
  FetchOut(run, group.row, group.row + group.rows);
  run.row_fetches.Spread(run.tiles);
}
template <class Ops>
HWY_INLINE void OpenGroup(RunContext<Ops>& run, const RowGroups& groups,
                          const Chunk& chunk, Opening opening, int head,
                          const Group& group) {
  if (opening == kNotFirst) return;
  OpenFirst(run, groups, chunk, opening, head, group);
}

// Of one that takes turns with others at each of the run's tiles, a part of it
// at each.
template <class Ops>
HWY_NOINLINE void OpenFirstTile(RunContext<Ops>& run, const RowGroups& groups,
                                const Chunk& chunk, Opening opening, int head,
                                const Group& group, int tile) {
  if (tile == 0) {
    if (opening == kFirst) PackGroup(run, groups, chunk, head, group);
    ZeroFloats(run.ws->acc + group.local * run.ws->acc_floats,
               group.rows * run.ws->acc_floats);
  }
  FetchOut(run, group.row + group.rows * tile / run.tiles,
           group.row + group.rows * (tile + 1) / run.tiles);
  run.row_fetches.Spread(1);
  run.row_fetches.Finish();
}
template <class Ops>
HWY_INLINE void OpenTile(RunContext<Ops>& run, const RowGroups& groups,
                         const Chunk& chunk, Opening opening, int head,
                         const Group& group, int tile) {
  if (opening == kNotFirst) return;
  OpenFirstTile(run, groups, chunk, opening, head, group, tile);
}

}  // namespace VARLANE_NS
}  // namespace varlane
