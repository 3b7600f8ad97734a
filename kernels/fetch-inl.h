// What to fetch ahead: the next tile, what rows will write, later rows' q.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// The lines of one 16-token group of K resp. V.
template <class Ops>
HWY_INLINE Prefetch KeyLines(const TileContext<Ops>& tile) {
  Prefetch fetch;
  const size_t bytes = static_cast<size_t>(tile.ws->steps) * tile.key_stride;
  fetch.stride = HWY_MAX(tile.key_stride, size_t{64});
  fetch.lines = bytes / fetch.stride;
  return fetch;
}
template <class Ops>
HWY_INLINE Prefetch ValueLines(const TileContext<Ops>& tile) {
  Prefetch fetch;
  fetch.stride = 64;
  fetch.lines = static_cast<size_t>(tile.ws->acc_floats) * kGroupTokens *
                sizeof(typename Ops::Cache) / 64;
  return fetch;
}

// What group `g` of `groups` fetches. Near: the first group this tile's values
// before it needs them, the last one the next tile's keys. Far: the eight
// 16-token pieces of the next tile are dealt out over groups and phases.
template <class Ops, FetchMode kFetch>
HWY_INLINE void AimFetch(TileContext<Ops>& tile, const TilePages& next,
                         bool has_next, int g, int groups) {
  if constexpr (kFetch == kFetchNear) {
    tile.fetch[0] = ValueLines(tile);
    tile.fetch[1] = KeyLines(tile);
    for (int i = 0; i < kGroups; ++i) {
      tile.fetch[0].stream[i] = tile.pages->v[i];
      tile.fetch[1].stream[i] = next.k[i];
    }
    if (g != 0) tile.fetch[0].lines = 0;
    if (g != groups - 1 || !has_next) tile.fetch[1].lines = 0;
  } else if constexpr (kFetch == kFetchFar) {
    for (int phase = 0; phase < 2; ++phase) {
      const int piece = g + phase * groups;
      const bool keys = piece < kGroups;
      tile.fetch[phase] = keys ? KeyLines(tile) : ValueLines(tile);
      tile.fetch[phase].stream[0] =
          keys ? next.k[piece] : next.v[piece % kGroups];
      if (piece >= 2 * kGroups || !has_next) tile.fetch[phase].lines = 0;
    }
  }
}

// Fetches what a group's rows will write, and the q rows one chunk later, while
// there is arithmetic to hide it: a large batch's q and out come from DRAM.
template <class Ops>
HWY_INLINE void FetchRows(const AttendArgs& args, const Workspace<Ops>& ws,
                          int row_begin, int row_end) {
  const int rows = args.num_tokens * args.group;
  for (int row = row_begin; row < row_end; ++row) {
    if (args.partials == nullptr) {
      const RowPlace& place = ws.places[row];
      const auto* out = static_cast<const std::byte*>(
          RowAt(static_cast<const void*>(args.out), args.out_dtype,
                place.token * args.out_token_stride +
                    place.head * args.out_head_stride));
      const size_t bytes =
          static_cast<size_t>(args.v_head_size) * SizeOf(args.out_dtype);
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(out + i, 1, 3);
    }
    if (row + kChunkRows < rows) {
      const RowPlace& place = ws.places[row + kChunkRows];
      const auto* q = static_cast<const std::byte*>(RowAt(
          args.q, args.q_dtype,
          place.token * args.q_token_stride + place.head * args.q_head_stride));
      const size_t bytes =
          static_cast<size_t>(args.head_size) * SizeOf(args.q_dtype);
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(q + i, 0, 3);
    }
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
