// Attention of one threadgroup: its rows against one sequence's context.
//
// Loop nest, from the outside: partition, chunk of 64 register groups, run of
// key tiles (whose K/V stay in L2), KV head, then register group of kMostRows
// rows and key tile, or the other way round (run_pass-inl.h):
//
//   scores = q k^T (SteadyTile) -> p = softmax (SoftenRows) -> acc += p v
//
// and the values once a run or tile (ValueTile). At head size 128 in bf16, a
// tile's 4 rows take 4096 bytes of K or V every 256 VDPBF16PS: 16 bytes a cycle
// of Zen 4, of the 32 that L2 gives. Interior tiles take no masks; a row at its
// limit stops its P.V there.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

HWY_INLINE void ResetRows(const Chunk& chunk, RowState* rows, float* lanes) {
  for (int local = 0; local < chunk.row_end - chunk.row_begin; ++local) {
    ResetRow(rows[local], lanes + local * kLanes);
  }
}

template <class Pool, class Ops>
HWY_INLINE void BeginRuns(const AttendArgs& args, const Workspace<Ops>& ws,
                          RunContext<Ops>& run) {
  constexpr bool kWidened = !std::is_same_v<Pool, Ops>;
  run.args = &args;
  run.ws = &ws;
  run.pool_key_stride = KeyStride<Pool>(args);
  run.pool_key_part = kGroupTokens * kLaneBytes<Pool>;
  run.pool_key_bytes = static_cast<size_t>(ws.steps) * run.pool_key_part;
  run.pool_value_bytes =
      GroupElements(ws.acc_floats) * sizeof(typename Pool::Cache);
  run.key_stride =
      kWidened ? kGroupTokens * kLaneBytes<Ops> : run.pool_key_stride;
}

// Keys [low, high) of a partition, in runs of which the first one begins at
// `begin`. `all` is where the last partition of the same rows ends.
struct RunRange {
  int64_t begin;
  int64_t low;
  int64_t high;
  int64_t all;
  int64_t run_keys;
};

// What follows the last run, the next partition's first one or the next work's,
// is known to it.
template <class Pool, class Ops>
HWY_INLINE void PassRuns(RunContext<Ops>& run, const RowGroups& groups,
                         const Chunk& chunk, Opening first,
                         const RunRange& range) {
  const AttendArgs& args = *run.args;
  const auto [begin, low, high, all, run_keys] = range;
  RunPages pages[2];  // this run's and the next one's, taking turns
  int turn = 0;
  FindPages<Pool>(args, args.kv, begin, low, all, run_keys, pages[turn]);
  for (int64_t t = begin; t < high; t += run_keys, turn = 1 - turn) {
    const int64_t following = t + run_keys;
    RunPages& next = pages[1 - turn];
    next.count = 0;
    if (following < all) {
      FindPages<Pool>(args, args.kv, following, low, all, run_keys, next);
    } else if (args.next.k != nullptr) {
      FindPages<Pool>(args, args.next, args.next_low / run_keys * run_keys,
                      args.next_low, args.next_high, run_keys, next);
    }
    run.begin = t;
    run.tiles = static_cast<int>((HWY_MIN(high - t, run_keys) + kKeyTile - 1) /
                                 kKeyTile);
    run.fresh = t == begin;
    PassRun<Pool>(run, groups, chunk, t == begin ? first : kNotFirst,
                  &pages[turn], next.count != 0 ? &next : nullptr);
  }
}

// Whether K/V may be in a cache and what streams them has a use for knowing it.
HWY_INLINE bool TriesOrigin(const AttendArgs& args, const RowGroups& groups) {
  return kZen5 && groups.count == 1 && args.cache_fit != CacheFit::kExceeds;
}

// Of a partition that took so long.
template <class Pool>
HWY_INLINE void NoteOrigin(const AttendArgs& args, const RowGroups& groups,
                           const RunRange& range, uint64_t ticks) {
  // Its start and its end take as long as a tile or so.
  const int64_t keys = range.high - range.begin + kKeyTile;
  const int64_t key_bytes = int64_t{groups.heads} *
                            (args.head_size + PaddedWidth(args.v_head_size)) *
                            static_cast<int64_t>(sizeof(typename Pool::Cache));
  OriginOfThread().Note(static_cast<float>(ticks) /
                        static_cast<float>(keys * key_bytes));
}

// Keys of its runs.
template <class Ops>
HWY_INLINE int64_t RunKeysOf(const RowGroups& groups,
                             const RunContext<Ops>& run) {
  if constexpr (kAvx2) {
    return RunKeysOfZen3<Ops>(groups, run.pool_key_bytes + run.pool_value_bytes,
                              1 << run.args->kv.block_size_log2);
  } else {
    return RunKeys<Ops>(
        groups, static_cast<size_t>(run.ws->steps) * run.pool_key_stride +
                    run.pool_value_bytes);
  }
}

template <class Pool, class Ops>
HWY_INLINE void PassPartition(const AttendArgs& args, const Workspace<Ops>& ws,
                              const RowGroups& groups, const Chunk& chunk,
                              int64_t partition) {
  const RowPlace& first_row = ws.places[chunk.row_begin];
  const RowPlace& last_row = ws.places[chunk.row_end - 1];
  ResetRows(chunk, ws.rows, ws.lanes);
  RunRange range;
  range.low = HWY_MAX(partition * kPartition, first_row.low);
  range.high = HWY_MIN((partition + 1) * kPartition, last_row.high);
  if (range.low >= range.high) return;
  const Opening first =
      partition == HWY_MAX(args.partition_begin, first_row.low / kPartition)
          ? kFirst
          : kFirstOfPartition;
  RunContext<Ops> run;
  BeginRuns<Pool>(args, ws, run);
  range.run_keys = RunKeysOf(groups, run);
  range.begin = range.low / range.run_keys * range.run_keys;
  range.all = HWY_MIN(args.partition_end * kPartition, last_row.high);
  const bool tries = TriesOrigin(args, groups);
  // Of several runs not all can have stayed in L2; what Zen 5 does not try
  // exceeds the caches, or is passed by several groups, which do not ask.
  run.from_memory = tries ? OriginOfThread().memory()
                          : kZen5 || range.all - range.begin > range.run_keys;
  run.near_pieces =
      args.cache_fit == CacheFit::kFits ? Pieces::kAlone : Pieces::kTogether;
  const uint64_t start = Ticks();
  PassRuns<Pool>(run, groups, chunk, first, range);
  if (tries) NoteOrigin<Pool>(args, groups, range, Ticks() - start);
}

// Writes a complete row to where it belongs, past the caches where they would
// not hold it.
template <class Ops>
HWY_INLINE void WriteOut(const AttendArgs& args, const RowPlace& place,
                         const State& state) {
  const void* out = OutRow(args, place.token, place.head);
  const size_t bytes =
      static_cast<size_t>(args.v_head_size) * SizeOf(args.out_dtype);
  const bool streams = args.streams_out && bytes % 64 == 0 &&
                       reinterpret_cast<uintptr_t>(out) % 64 == 0;
  FinishRow<Ops>(args, place.token, place.head, state, streams);
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
  WriteOut<Ops>(args, place, state);
}

template <class Pool, class Ops>
HWY_INLINE void AttendGroups(const AttendArgs& args, const RowGroups& groups) {
  Workspace<Ops> ws;
  ws.Carve(args.scratch, groups, args.head_size, args.v_head_size,
           HoldsTile<Pool>(groups));
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
  if (args.streams_out) hwy::FlushStream();
}

template <class Ops>
void AttendRows(const AttendArgs& args) {
  const ScopedFlushDenormals flush;
  const int rows = args.num_tokens * args.group;
  if constexpr (kWidens<Ops>) {
    const RowGroups groups(rows, args.num_kv_heads, kMaxRows);
    if (Widens<Ops>(groups)) {
      AttendGroups<Ops, typename WideOps<Ops>::Type>(args, groups);
      return;
    }
  }
  const int most = TileRows<Ops>(rows, args.group, args.head_size,
                                 args.cache_fit == CacheFit::kExceeds);
  AttendGroups<Ops, Ops>(args, RowGroups(rows, args.num_kv_heads, most));
}

// Folds partial records in index order and writes the rows. Most were written
// by other workers, and their caches are slow to give (32 partitions of 16 rows
// on Zen 5: 17 us instead of 19 asked for 2 ahead, 15 asked for 4, 14 for 8).
template <class Ops>
void MergePartials(const MergeArgs& args) {
  constexpr int64_t kAhead = 8;
  const ScopedFlushDenormals flush;
  const int acc_floats = PaddedWidth(args.v_head_size);
  for (int row = 0; row < args.num_tokens * args.group; ++row) {
    State state = {kMinusInf, 0, reinterpret_cast<float*>(args.scratch)};
    const float* record = args.partials + row * PartialFloats(acc_floats);
    for (int64_t p = 0; p < args.num_partials; ++p) {
      if (p + kAhead < args.num_partials) {
        FetchLines(
            record + kAhead * args.partial_stride,
            static_cast<size_t>(PartialFloats(acc_floats)) * sizeof(float));
      }
      MergeState<Ops>(state, record[0], record[1], record + kLanes, acc_floats);
      record += args.partial_stride;
    }
    FinishRow<Ops>(args, row / args.group, row % args.group, state, false);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
