// Attention of one threadgroup: its rows against one sequence's context.
//
// Loop nest, from the outside: partition, chunk of 64 register groups, run of
// key tiles (whose K/V stay in L2), KV head, register group of kMaxRows rows,
// key tile:
//
//   scores = q k^T (SteadyTile) -> p = softmax (SoftenRows) -> acc += p v
//
// and the values once a run (ValueTile). At head size 128 in bf16, a tile's 4
// rows take 4096 bytes of K or V every 256 VDPBF16PS: 16 bytes a cycle of Zen
// 4, of the 32 that L2 gives. Interior tiles take no masks; a row at its limit
// stops its P.V there.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// How many of a KV head's register groups, the last ones, fetch the next run.
template <class Ops>
HWY_INLINE int FetchTurns(const RunContext<Ops>& run, int groups) {
  constexpr int kFetching = 4;
  const int turns = HWY_MIN(groups, kFetching);
  if (!kIntelAvx512 || run.next == nullptr) return turns;
  return HWY_MAX(HWY_MIN(turns, run.next->count / kTogether), 1);
}

// One register group over a run. A single one streams K/V, fetching what it
// needs next. Several bring the next run into L2 for all of them: few at two
// lines a step, lest it be late; the last ones of many, so that it need not
// stay there for long. A widened run leaves room for all of the next one. Where
// there is no FMA, memory is ahead of the arithmetic by itself.
template <class Ops, bool kWidened>
HWY_INLINE void PassGroup(RunContext<Ops>& run, const RowGroups& groups,
                          const Chunk& chunk, int head, int g) {
  constexpr int kFewTurns = 3;
  constexpr bool kFetches = VARLANE_HAS_FMA;
  const int row = groups.begin(g, head);
  const int rows = groups.begin(g + 1, head) - row;
  const int local = row - chunk.row_begin;
  const int of_head = chunk.end - chunk.begin;
  if (kFetches && (kWidened || (kIntelAvx512 && groups.many()))) {
    AimBetween(run, g - chunk.begin, of_head);
  } else if constexpr (kFetches && !kWidened) {
    if (groups.count == 1) {
      if constexpr (!kIntelAvx512) AimRun(run);  // else unit by unit
      PassUpToRows<Ops, kFetchNear>(run, rows, row, local);
      return;
    }
    const int turns = FetchTurns(run, of_head);
    const int turn = g - (chunk.end - turns);
    if (turn >= 0 && run.next != nullptr) {
      const bool few = turns <= kFewTurns;
      if constexpr (kIntelAvx512) {
        AimFar(run, turn, turns,
               few ? Pieces::kTogetherByTwo : Pieces::kTogether);
      } else {
        AimFar(run, turn, turns, few ? Pieces::kPaired : Pieces::kAlone);
      }
      PassUpToRows<Ops, kFetchFar>(run, rows, row, local);
      return;
    }
  }
  PassUpToRows<Ops, kNoFetch>(run, rows, row, local);
}

template <class Ops>
HWY_INLINE void PackRows(const AttendArgs& args, const Workspace<Ops>& ws,
                         int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    const RowPlace& place = ws.places[row];
    PackQuery<Ops>(
        args, QueryRow(args, place.token, place.head), ws.floats,
        ws.q + static_cast<size_t>(row) * static_cast<size_t>(ws.steps));
  }
}

// Whether a run is the first one of a partition, and of all partitions.
enum Opening : uint8_t { kNotFirst, kFirstOfPartition, kFirst };

// Before a register group meets its first keys: its q is packed, and the next
// one's asked for, which this one's arithmetic hides; where it will write, too.
template <class Ops>
HWY_INLINE void OpenGroup(RunContext<Ops>& run, const RowGroups& groups,
                          const Chunk& chunk, Opening opening, int head,
                          int g) {
  if (opening == kNotFirst) return;
  const int begin = groups.begin(g, head);
  const int end = groups.begin(g + 1, head);
  if (opening == kFirst) {
    if (g + 1 < chunk.end) {
      FetchQuery(run, end, groups.begin(g + 2, head));
    } else if (head + 1 < groups.heads) {
      FetchQuery(run, end, groups.begin(1, head + 1));
    }
    PackRows(*run.args, *run.ws, begin, end);
  }
  FetchOut(run, begin, end);
  run.row_fetches.Spread(run.tiles);
}

// A run with every KV head in turn; `next` is read after it, null = not known.
// The pool holds what Pool reads; Ops computes, on widened runs where it is
// another.
template <class Pool, class Ops>
HWY_INLINE void PassRun(RunContext<Ops>& run, const RowGroups& groups,
                        const Chunk& chunk, Opening opening,
                        const RunPages* pages, const RunPages* next) {
  constexpr bool kWidened = !std::is_same_v<Pool, Ops>;
  RunPages wide;
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
    if constexpr (kWidened) {
      WidenRun<Pool>(*run.pages, run.tiles * kGroups, run.pool_key_stride,
                     run.args->head_size, run.ws->acc_floats, run.ws->wide,
                     wide);
      run.pages = &wide;
    }
    for (int g = chunk.begin; g < chunk.end; ++g) {
      OpenGroup(run, groups, chunk, opening, head, g);
      PassGroup<Ops, kWidened>(run, groups, chunk, head, g);
    }
  }
}

template <class Pool, class Ops>
HWY_INLINE void PassPartition(const AttendArgs& args, const Workspace<Ops>& ws,
                              const RowGroups& groups, const Chunk& chunk,
                              int64_t partition) {
  const RowPlace& first_row = ws.places[chunk.row_begin];
  const RowPlace& last_row = ws.places[chunk.row_end - 1];
  for (int local = 0; local < chunk.row_end - chunk.row_begin; ++local) {
    ResetRow(ws.rows[local], ws.lanes + local * kLanes,
             ws.acc + local * ws.acc_floats, ws.acc_floats);
  }
  const int64_t low = HWY_MAX(partition * kPartition, first_row.low);
  const int64_t high = HWY_MIN((partition + 1) * kPartition, last_row.high);
  if (low >= high) return;
  const Opening first =
      partition == HWY_MAX(args.partition_begin, first_row.low / kPartition)
          ? kFirst
          : kFirstOfPartition;

  constexpr bool kWidened = !std::is_same_v<Pool, Ops>;
  RunContext<Ops> run;
  run.args = &args;
  run.ws = &ws;
  run.pool_key_stride = KeyStride<Pool>(args);
  run.pool_value_bytes =
      GroupElements(ws.acc_floats) * sizeof(typename Pool::Cache);
  run.key_stride =
      kWidened ? kGroupTokens * kLaneBytes<Ops> : run.pool_key_stride;
  const int64_t run_keys = RunKeys<Ops>(groups);
  const int64_t begin = low / run_keys * run_keys;
  // What follows this partition's last run: the next partition's first one, or
  // the next work's.
  const int64_t all = HWY_MIN(args.partition_end * kPartition, last_row.high);
  RunPages buffers[2];
  RunPages* pages = &buffers[0];
  RunPages* next = &buffers[1];
  run.several = all - begin > run_keys;
  FindPages<Pool>(args, args.kv, begin, low, all, run_keys, *pages);
  for (int64_t t = begin; t < high; t += run_keys) {
    const int64_t following = t + run_keys;
    next->count = 0;
    if (following < all) {
      FindPages<Pool>(args, args.kv, following, low, all, run_keys, *next);
    } else if (args.next.k != nullptr) {
      FindPages<Pool>(args, args.next, args.next_low / run_keys * run_keys,
                      args.next_low, args.next_high, run_keys, *next);
    }
    run.begin = t;
    run.tiles = static_cast<int>((HWY_MIN(high - t, run_keys) + kKeyTile - 1) /
                                 kKeyTile);
    PassRun<Pool>(run, groups, chunk, t == begin ? first : kNotFirst, pages,
                  next->count != 0 ? next : nullptr);
    std::swap(pages, next);
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
    const int head = ws.places[row].head / args.group;
    const int row_of_head = row - head * args.num_tokens * args.group;
    float* record = args.partials + head * args.partials_head_stride +
                    row_of_head * PartialFloats(ws.acc_floats);
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
  FinishRow<Ops>(state, args.sinks == nullptr ? nullptr : args.sinks + head,
                 args.v_head_size, args.out_dtype, OutRow(args, token, head),
                 lse);
}

template <class Pool, class Ops>
HWY_INLINE void AttendGroups(const AttendArgs& args, const RowGroups& groups) {
  Workspace<Ops> ws;
  ws.Carve(args.scratch, groups.all_rows(), args.head_size, args.v_head_size,
           !std::is_same_v<Pool, Ops>);
  PlaceRows(args, ws);
  for (int64_t p = args.partition_begin; p < args.partition_end; ++p) {
    for (int g = 0; g < groups.count; g += kChunkGroups) {
      const Chunk chunk(groups, g, HWY_MIN(g + kChunkGroups, groups.count));
      PassPartition<Pool, Ops>(args, ws, groups, chunk, p);
      for (int row = chunk.row_begin; row < chunk.row_end; ++row) {
        ClosePartition<Ops>(args, ws, row, row - chunk.row_begin, p);
      }
    }
  }
}

template <class Ops>
void AttendRows(const AttendArgs& args) {
  const ScopedFlushDenormals flush;
  const RowGroups groups(args.num_tokens * args.group, args.num_kv_heads);
  if constexpr (kWidens<Ops>) {
    if (Widens<Ops>(groups.rows, args.head_size, args.v_head_size)) {
      AttendGroups<Ops, typename WideOps<Ops>::Type>(args, groups);
      return;
    }
  }
  AttendGroups<Ops, Ops>(args, groups);
}

// Folds partial records in index order and writes the rows.
template <class Ops>
void MergePartials(const MergeArgs& args) {
  const ScopedFlushDenormals flush;
  const int acc_floats = PaddedWidth(args.v_head_size);
  for (int row = 0; row < args.num_tokens * args.group; ++row) {
    State state = {kMinusInf, 0, reinterpret_cast<float*>(args.scratch)};
    const float* record = args.partials + row * PartialFloats(acc_floats);
    for (int64_t p = 0; p < args.num_partials; ++p) {
      MergeState<Ops>(state, record[0], record[1], record + kLanes, acc_floats);
      record += args.partial_stride;
    }
    const int64_t token = row / args.group;
    const int64_t head = row % args.group;
    FinishRow<Ops>(state, args.sinks == nullptr ? nullptr : args.sinks + head,
                   args.v_head_size, args.out_dtype, OutRow(args, token, head),
                   args.lse == nullptr
                       ? nullptr
                       : args.lse + token * args.lse_token_stride + head);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
