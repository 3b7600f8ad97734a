// What one threadgroup works with: its rows, its scratch, and where keys stand.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

constexpr int kChunkGroups = 64;
constexpr int kChunkRows = kChunkGroups * kMaxRows;
static_assert(kMostRowsTogether <= kChunkRows, "several heads are one chunk");

// Where a row belongs and which keys it sees, worked out once a threadgroup:
// divisions and masks stay out of the tile loop.
struct RowPlace {
  int64_t low;  // keys [low, high)
  int64_t high;
  int32_t token;
  int32_t head;  // from head 0 of the first group on
};

// The scratch of one threadgroup, carved once.
template <class Ops>
struct Workspace {
  using Operand = typename Ops::Operand;
  int acc_floats;    // Dv padded
  int steps;         // of a dot product
  Operand* q;        // [rows][steps]
  float* running;    // [rows][acc_floats] merged over partitions
  State* states;     // [rows]
  float* acc;        // [chunk][acc_floats]
  float* lanes;      // [chunk][kLanes]
  RowState* rows;    // [chunk] of at most kChunkRows
  RowPlace* places;  // [rows]
  float* scores;     // [kMostRows][kKeyTile]
  Operand* p;        // weights of a run: [kMostRows][p_stride]; or, where they
  int p_stride;      // wait, of all groups' tiles: [chunk][kMostRows][p_stride]
  float* floats;     // [head_size]
  float* wide;       // a tile's keys, then its values, as they are multiplied;
                     // or its values in panels

  // Carves from `base`, or only counts where that is null; returns the bytes.
  HWY_INLINE size_t Carve(std::byte* base, const RowGroups& groups,
                          int head_size, int v_head_size, bool holds_tile) {
    const int num_rows = groups.all_rows();
    acc_floats = PaddedWidth(v_head_size);
    steps = head_size / Ops::kPack;
    size_t used = 0;
    const auto take = [&](auto*& pointer, size_t count) HWY_ATTR {
      using T = std::remove_reference_t<decltype(*pointer)>;
      if (base != nullptr) pointer = reinterpret_cast<T*>(base + used);
      used += (count * sizeof(T) + 63) / 64 * 64;
    };
    const auto n = static_cast<size_t>(num_rows);
    const auto width = static_cast<size_t>(acc_floats);
    const auto chunk = static_cast<size_t>(HWY_MIN(num_rows, kChunkRows));
    // Packing stores whole vectors, which may overhang the last row.
    take(q, n * static_cast<size_t>(steps) + 2 * kLanes);
    take(acc, chunk * width);
    take(lanes, chunk * kLanes);
    take(rows, chunk);
    take(scores, size_t{kMostRows<Ops>} * kKeyTile);
    const bool by_tile = ByTile<Ops>(groups);
    p_stride = by_tile ? kTileSteps<Ops> : kRunSteps<Ops>;
    // At least as much as a run's: the same scratch serves fewer rows.
    const int waiting = by_tile ? HWY_MIN(groups.count, kChunkGroups) : 1;
    take(p, static_cast<size_t>(HWY_MAX(waiting, kRun) * kMostRows<Ops> *
                                kTileSteps<Ops>));
    take(floats, static_cast<size_t>(head_size) + 2 * kLanes);
    take(states, n);
    take(places, n);
    take(running, n * width);
    if (holds_tile) {
      take(wide, GroupElements(HWY_MAX(head_size, acc_floats)) * kGroups);
    }
    return used;
  }
};

template <class Ops>
size_t AttendScratchBytes(int rows, int head_size, int v_head_size) {
  // Only where groups always have as many rows does it matter how many.
  const RowGroups groups(rows, 1, kMaxRows);
  Workspace<Ops> ws;
  const size_t bytes =
      ws.Carve(nullptr, groups, head_size, v_head_size, HoldsTile<Ops>(groups));
  if (!Widens<Ops>(groups)) return bytes;
  // Fewer rows than all of them may pass tiles as they are.
  Workspace<typename WideOps<Ops>::Type> wide;
  return HWY_MAX(bytes,
                 wide.Carve(nullptr, groups, head_size, v_head_size, true));
}

template <class Ops>
HWY_INLINE void PlaceRows(const AttendArgs& args, const Workspace<Ops>& ws) {
  RowPlace* place = ws.places;
  for (int token = 0; token < args.num_tokens; ++token) {
    const int64_t low = args.mask.low(token);
    const int64_t high = args.mask.high(token);
    for (int head = 0; head < args.group; ++head) {
      *place++ = {low, high, token, head};
    }
  }
  const int rows = args.num_tokens * args.group;
  for (int row = rows; row < rows * args.num_kv_heads; ++row) {
    ws.places[row] = ws.places[row - rows];
    ws.places[row].head += args.group;
  }
}

// Addresses of the 16-token groups of the run of `run_keys` at `begin` that
// hold keys of [low, high), whole tiles; groups without one repeat a neighbour,
// so that their table entries are never read and a fetch of them is harmless.
template <class Ops>
HWY_INLINE void FindPages(const AttendArgs& args, const KvPages& kv,
                          int64_t begin, int64_t low, int64_t high,
                          int64_t run_keys, RunPages& pages) {
  constexpr auto kLane = static_cast<int64_t>(kLaneBytes<Ops>);
  constexpr int64_t kElem = sizeof(typename Ops::Cache);
  const int64_t mask = (int64_t{1} << kv.block_size_log2) - 1;
  const int64_t dv = PaddedWidth(args.v_head_size);
  const int64_t first = low / kGroupTokens * kGroupTokens;
  const int64_t last = (high - 1) / kGroupTokens * kGroupTokens;
  const int64_t keys = HWY_MIN(high - begin, run_keys);
  pages.count = static_cast<int>((keys + kKeyTile - 1) / kKeyTile) * kGroups;
  pages.low = static_cast<int>(HWY_MAX(low - begin, int64_t{0}));
  pages.high = static_cast<int>(keys);
  for (int g = 0; g < pages.count; ++g) {
    const int64_t token =
        HWY_MIN(HWY_MAX(begin + g * kGroupTokens, first), last);
    const int64_t block = kv.block_table[token >> kv.block_size_log2];
    const int64_t base = block * kv.block_bytes;
    const int64_t within = token & mask;
    pages.k[g] = kv.k + base + within * kLane;
    pages.v[g] = kv.v + base + within * dv * kElem;
  }
}

// The same groups of another KV head, so many after the one of `from`.
HWY_INLINE void ShiftPages(const AttendArgs& args, const RunPages& from,
                           int heads, RunPages& to) {
  to.count = from.count;
  to.low = from.low;
  to.high = from.high;
  for (int g = 0; g < from.count; ++g) {
    to.k[g] = from.k[g] + heads * args.k_head_bytes;
    to.v[g] = from.v[g] + heads * args.v_head_bytes;
  }
}

template <class Ops>
HWY_INLINE size_t KeyStride(const AttendArgs& args) {
  return kLaneBytes<Ops> << args.kv.block_size_log2;
}

// What the groups of a chunk share while they pass a run of key tiles.
template <class Ops>
struct RunContext {
  HWY_INLINE RunContext() = default;  // see passes-inl.h

  const AttendArgs* args;
  const Workspace<Ops>* ws;
  const RunPages* pages;
  const RunPages* next;  // what is read after it; null = not known
  int64_t begin;         // first key of the run
  int tiles;             // 1 to kRun: nobody sees the later ones
  size_t key_stride;
  size_t pool_key_stride;   // the same where its tiles are not widened,
  size_t pool_key_part;     // of which a 16-token group has so many
  size_t pool_key_bytes;    // of a 16-token group
  size_t pool_value_bytes;  // the same
  bool from_memory;         // passed as what comes from there
  Pieces near_pieces;       // side by side, where not (Zen 5)
  bool fresh;               // the first run of a partition
  bool on_end = false;      // passed by tile, whose groups stand on end
  Prefetch score_fetch;     // while a group's scores
  Prefetch value_fetch;     // and its values are computed
  RowFetches<2 * kMostRows<Ops>> row_fetches;  // one group's q, one's out
  // What score_fetch and value_fetch take in place of groups, see fetch-inl.h.
  const std::byte* shifted[2][kRunGroups];
};

}  // namespace VARLANE_NS
}  // namespace varlane
