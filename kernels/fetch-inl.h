// What to fetch ahead: the next pair, what rows will write, later rows' q.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// A 16-token group of K resp. V as lines to fetch.
struct Piece {
  size_t stride;
  size_t lines;

  HWY_INLINE void Start(Prefetch& fetch) const {
    fetch.stride = stride;
    fetch.left = fetch.lines = lines;
  }
};
template <class Ops>
HWY_INLINE Piece KeyPiece(const PairContext<Ops>& pair) {
  const size_t stride = HWY_MAX(pair.key_stride, size_t{64});
  return {stride,
          static_cast<size_t>(pair.ws->steps) * pair.key_stride / stride};
}
template <class Ops>
HWY_INLINE Piece ValuePiece(const PairContext<Ops>& pair) {
  return {64, static_cast<size_t>(pair.ws->acc_floats) * kGroupTokens *
                  sizeof(typename Ops::Cache) / 64};
}

// Near: while the first group computes the scores of a tile it fetches that
// tile's values, and while the last one adds values the next pair's keys.
template <class Ops>
HWY_INLINE void AimNear(PairContext<Ops>& pair, const PairPages* next,
                        bool is_first, bool is_last) {
  for (int tile = 0; tile < kPair; ++tile) {
    Prefetch& fetch = pair.score_fetch[tile];
    fetch.Idle(pair.pages->k[0]);
    if (!is_first || tile >= pair.tiles) continue;
    for (int i = 0; i < kGroups; ++i) {
      fetch.stream[i] = pair.pages->v[tile * kGroups + i];
    }
    ValuePiece(pair).Start(fetch);
  }
  Prefetch& fetch = pair.value_fetch;
  fetch.Idle(pair.pages->k[0]);
  if (!is_last || next == nullptr) return;
  for (int i = 0; i < kGroups; ++i) {
    fetch.stream[i] = next->k[i];
    fetch.then[i] = next->k[kGroups + i];
  }
  KeyPiece(pair).Start(fetch);
}

// Far: the pieces of the next pair, keys first, are dealt out over the groups
// of the first chunk, two at a time over a group's three phases.
template <class Ops>
HWY_INLINE void AimFar(PairContext<Ops>& pair, const PairPages* next, int g,
                       int groups) {
  constexpr int kHalf = kPair * kGroups;  // the pieces of K, and those of V
  int piece = 2 * kHalf * g / groups;
  const int end = next == nullptr ? piece : 2 * kHalf * (g + 1) / groups;
  Prefetch* const phases[] = {&pair.score_fetch[0], &pair.score_fetch[1],
                              &pair.value_fetch};
  for (Prefetch* const fetch : phases) {
    fetch->Idle(pair.pages->k[0]);
    if (piece >= end) continue;
    const bool keys = piece < kHalf;
    const int last = keys ? HWY_MIN(end, kHalf) - 1 : end - 1;
    for (int i = 0; i < 2; ++i) {
      const int at = HWY_MIN(piece + i, last);
      fetch->stream[i] = keys ? next->k[at] : next->v[at - kHalf];
    }
    (keys ? KeyPiece(pair) : ValuePiece(pair)).Start(*fetch);
    piece = HWY_MIN(piece + 2, last + 1);
  }
}

// What group `g` of a chunk's `groups` fetches; `next` null = nothing follows.
template <class Ops, FetchMode kFetch>
HWY_INLINE void AimFetch(PairContext<Ops>& pair, const PairPages* next, int g,
                         int groups) {
  if constexpr (kFetch == kFetchNear) {
    AimNear(pair, next, g == 0, g == groups - 1);
  } else if constexpr (kFetch == kFetchFar) {
    AimFar(pair, next, g, groups);
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
