// Runs of key tiles: how a row's keys are cut, and where they stand.
//
// A key tile is kKeyTile tokens at an absolute position; it is seen as four
// groups of 16 tokens, since 16 divides every block size: each group has its
// own address, found once through the block table. Neighbouring tiles make a
// run: their values are added in one go, so that accumulators are loaded and
// stored once a run (a 512-bit store costs Zen 4 nearly two multiply-adds).
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

constexpr int kGroupTokens = 16;
constexpr int kGroups = kKeyTile / kGroupTokens;
constexpr int kRun = 8;  // tiles
constexpr int kRunKeys = kRun * kKeyTile;
constexpr int kRunGroups = kRun * kGroups;
static_assert(kPartition % kRunKeys == 0, "runs tile partitions");

// Whether a few register groups can pass a run tile by tile, each one's softmax
// beside the next one's scores (Zen 5, in turns: 5 tokens of a group of 4, bf16
// 2 to 8% faster, f32 2%; one of a group of 8, 1 to 14% and 4%; f16, which
// converts, up to 6% slower).
template <class Ops>
constexpr bool kMayGoTogether = kZen5 && !kConverts<Ops>;

// Whether three register groups would go together from memory. They would ask
// for the next run two lines a step, then for nothing: as four they ask for one
// line a step (one token of a group of 16, in turns, while memory is slow and
// while it is quick: bf16 14 and 8% faster, f32 7 and 9%). Not of keys that L1
// does not hold, which each group reads anew (16/1/576/512: 10% faster and 9%
// slower).
template <class Ops>
HWY_INLINE constexpr bool WouldBeThree(int rows, int head_size) {
  constexpr int kL1Bytes = 48 << 10;
  constexpr int kElement = static_cast<int>(sizeof(typename Ops::Cache));
  return kMayGoTogether<Ops> && rows > 2 * kMaxRows && rows <= 3 * kMaxRows &&
         kKeyTile * head_size * kElement <= kL1Bytes;
}

// Rows of a register tile on Zen 5, at most. A single group takes more than
// several do; of bf16 more than 8 only from a cache (9 to 12 rows, in turns: 9
// to 13% faster, from DRAM even to 2% slower), nor from DRAM more than 6 at
// head sizes up to 64 (while memory is slow 4 to 9% faster, while it is quick 5
// to 6% slower; from a cache 17 to 27% faster).
template <class Ops>
HWY_INLINE constexpr int TileRowsOfZen5(int rows, int head_size,
                                        bool from_memory) {
  if (from_memory && WouldBeThree<Ops>(rows, head_size)) return (rows + 3) / 4;
  int most = kMostRows<Ops>;
  if (Ops::kPack == 2 && from_memory) most = head_size <= 64 ? kMaxRows : 8;
  return rows <= most ? most : kMaxRows;
}

// Rows of a register tile, at most, where a threadgroup has `rows` of a KV
// head, `group` of them one token's. On Zen 4 rows that end at different keys
// do so one by one, so f32 leaves groups of 4 whole (6 rows: 1 to 2% slower; on
// Zen 5 3 to 5% faster), while conversions are worth sharing (f16, 6 rows: 4 to
// 6% faster). Its dot product takes 6 only where a few groups become fewer: 5
// rows are one, 10 are two; Zen 5's always (verify 6% faster, chunk 3%).
template <class Ops>
HWY_INLINE constexpr int TileRows(int rows, int group, int head_size,
                                  bool from_memory) {
  if constexpr (kZen5) {
    return TileRowsOfZen5<Ops>(rows, head_size, from_memory);
  }
  if constexpr (kIntelAvx512 || kAvx2) {
    return rows <= kMaxRows ? kMaxRows : kMostRows<Ops>;
  }
  bool four = sizeof(typename Ops::Cache) == sizeof(float) && group % 4 == 0;
  if constexpr (Ops::kPack == 2) four = rows > 2 * kMaxRows;
  return four ? HWY_MIN(kMaxRows, 4) : kMaxRows;
}

// How the rows of each KV head are cut into register groups of 1 to `most`, as
// even as can be.
struct RowGroups {
  int rows;   // of one KV head
  int heads;  // KV heads
  int count;  // of one KV head
  int least;  // rows of a group;
  int extra;  // the first so many have one more
  HWY_INLINE constexpr RowGroups(int num_rows, int num_heads, int most)
      : rows(num_rows),
        heads(num_heads),
        count((num_rows + most - 1) / most),
        least(num_rows / HWY_MAX(count, 1)),  // an empty launch has no rows
        extra(num_rows % HWY_MAX(count, 1)) {}
  HWY_INLINE int begin(int g, int head = 0) const {
    return head * rows + g * least + HWY_MIN(g, extra);
  }
  HWY_INLINE int all_rows() const { return rows * heads; }
  // Enough that what is done once for all of them costs little.
  static constexpr int kMany = 7;
  HWY_INLINE bool many() const { return count >= kMany; }
};

// Rows of one of several register groups, at least, so that none is compiled
// for fewer.
template <class Ops>
constexpr int LeastOfSeveral() {
  int least = kMostRows<Ops>;
  const auto cut = [&](int rows, int most) {
    const RowGroups groups(rows, 1, most);
    if (groups.count > 1) least = HWY_MIN(least, groups.least);
  };
  // Those of more rows have more each.
  for (int rows = 1; rows <= 4 * kMostRows<Ops>; ++rows) {
    cut(rows, kMaxRows);  // of tiles that are widened
    for (const int group : {1, 4}) {
      for (const int head_size : {8, 72, 576}) {
        cut(rows, TileRows<Ops>(rows, group, head_size, false));
        cut(rows, TileRows<Ops>(rows, group, head_size, true));
      }
    }
  }
  return least;
}
template <class Ops>
constexpr int kLeastOfSeveral = LeastOfSeveral<Ops>();

// Keys of a run that `groups` pass, where 16 tokens take `group_bytes` of K and
// V. A single group on Intel's CPUs takes a quarter, so that all KV heads of a
// block are fetched one after the other (Emerald Rapids, in turns: 3 rows and
// more up to 2% faster, 7 to 10 of 16 bits 4 to 7%). A few groups take half:
// the L1 TLB holds 96 pages of 4 KiB, but 8 tiles and what is fetched of the
// next 8 stand on 128 of them or more (a Xeon with AMX, blocks of 16 tokens: 2
// and 3 groups 5% faster in 16 bits and 12% in f32, 4 to 7 of bf16 2 to 4%, of
// others 2 to 3% slower). Several groups on Zen 5 take a quarter: what they
// read again is in L2 for sure (verify of 5 tokens 9% faster). Many take what
// is a quarter of L2, or half of it where they are dot products: of more tiles
// most weights are computed beside the next one's scores, but what is fetched
// meanwhile is to stay there as well (in turns, against the next longer and
// shorter ones: prefill 0 to 6% and 0 to 3% faster).
template <class Ops>
HWY_INLINE int64_t RunKeys(const RowGroups& groups, size_t group_bytes) {
  if constexpr (kZen5) {
    if (groups.count == 1) return kRunKeys;
    constexpr size_t kMost = (Ops::kPack == 2 ? 512 : 256) * 1024;
    int64_t keys = groups.many() ? kRunKeys : kRunKeys / 4;
    while (keys > kRunKeys / 4 &&
           static_cast<size_t>(keys / kGroupTokens) * group_bytes > kMost) {
      keys /= 2;
    }
    return keys;
  }
  if (kIntelAvx512 && groups.count == 1) return kRunKeys / 4;
  constexpr int kFew = Ops::kPack == 2 ? 7 : 3;
  const bool halves = kIntelAvx512 && groups.count > 1 && groups.count <= kFew;
  return halves ? kRunKeys / 2 : kRunKeys;
}
static_assert(kPartition % (kRunKeys / 4) == 0, "parts of it tile partitions");

// The same on Zen 3: a tile, two of f32 for a single group. Pages stand
// anywhere in 512 KiB of L2, and what is fetched meanwhile is to stay there (in
// turns, against twice as much: decode in 16 bits 3 to 8%, verify 1 to 6%
// faster; four times as much: decode 12% slower still). But for a single group
// it is a block where those are larger, which else would be read a part of each
// row at a time (blocks of 128 tokens, decode of 2 and 4 rows: 16 bits 6 to 16%
// faster, f32 even; of 256, 16 bits 0 to 13%, f32 12 to 17%).
template <class Ops>
HWY_INLINE int64_t RunKeysOfZen3(const RowGroups& groups, size_t group_bytes,
                                 int block_size) {
  if (groups.count > 1) return kKeyTile;
  constexpr size_t kMostBytes = 256 * 1024;
  constexpr bool kIsF32 = sizeof(typename Ops::Cache) == sizeof(float);
  constexpr int kLeast = kIsF32 ? 2 * kKeyTile : kKeyTile;
  int keys = HWY_MIN(block_size, 4 * kKeyTile);
  while (keys > kLeast &&
         static_cast<size_t>(keys / kGroupTokens) * group_bytes > kMostBytes) {
    keys /= 2;
  }
  return HWY_MAX(keys, kLeast);
}

// Register groups [begin, end) of every KV head, whose states are at hand
// together: some of one head's, or all of several heads'.
struct Chunk {
  int begin;
  int end;
  int row_begin;
  int row_end;
  HWY_INLINE Chunk(const RowGroups& groups, int from, int to)
      : begin(from),
        end(to),
        row_begin(groups.begin(from)),
        row_end(groups.begin(to, groups.heads - 1)) {}
};

// Register group `index` of a KV head.
struct Group {
  int index;
  int slot;  // the same, from the chunk's first on
  int rows;
  int row;    // its first one in the threadgroup,
  int local;  // in the chunk
  HWY_INLINE Group(const RowGroups& groups, const Chunk& chunk, int head,
                   int which)
      : index(which),
        slot(which - chunk.begin),
        rows(groups.begin(which + 1, head) - groups.begin(which, head)),
        row(groups.begin(which, head)),
        local(row - chunk.row_begin) {}

  // The same of another KV head, so many rows on.
  HWY_INLINE void Shift(int by) {
    row += by;
    local += by;
  }
};

// Whether the register groups pass a run tile by tile, all of them one tile
// before any the next one, and so find it in L1; else each passes the whole run
// before the next one does. Of 16-bit caches it is done with tiles that are
// widened; 4 groups that convert for themselves are 7% slower by tile, since
// accumulators are loaded and stored more often (a Xeon with AMX, bf16). On
// Zen 3 all are, for the sake of panels (panel-inl.h).
constexpr bool kPassesByTile = kIntelAvx512 || kAvx2;
template <class Ops>
constexpr bool kSeveralByTile = kAvx2 ||
                                (kIntelAvx512 &&
                                 sizeof(typename Ops::Cache) == sizeof(float));
template <class Ops>
HWY_INLINE bool ByTile(const RowGroups& groups) {
  return kSeveralByTile<Ops> && groups.count > 1;
}

// Whether these do; of many, bf16 would be 2 to 4% slower.
template <class Ops>
HWY_INLINE bool Together(const RowGroups& groups) {
  return kMayGoTogether<Ops> && groups.count > 1 && !groups.many();
}

// Where the 16-token groups of a run of key tiles stand, `count` of them. Those
// before the first visible token repeat it and are never read.
struct RunPages {
  HWY_INLINE RunPages() = default;  // see passes-inl.h

  int count = 0;
  int low = 0;   // of the run's keys those from here on
  int high = 0;  // and before here are seen
  const std::byte* k[kRunGroups];
  const std::byte* v[kRunGroups];
};

// Steps of P.V in a key tile, and in a run of them.
template <class Ops>
constexpr int kTileSteps = kKeyTile / Ops::kPack;
template <class Ops>
constexpr int kRunSteps = kRun* kTileSteps<Ops>;

// Bytes from one step of P.V to the next within a 16-token group.
template <class Ops>
HWY_INLINE size_t ValueStride(int acc_floats) {
  return static_cast<size_t>(acc_floats) * kLaneBytes<Ops>;
}

}  // namespace VARLANE_NS
}  // namespace varlane
