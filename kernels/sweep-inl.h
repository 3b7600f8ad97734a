// The micro-kernels over all they have to do: scores of the keys that are seen
// of a tile, values over all dims.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Calls tile(integral_constant<int, width>): the width of a register tile as a
// constant. `width` in [1, kMost].
template <int kMost = kMaxVecs, class Tile>
HWY_INLINE void OfWidth(int width, const Tile& tile) {
  if constexpr (kMost == 4) {
    if (width == 4) return tile(std::integral_constant<int, 4>());
  }
  if constexpr (kMost >= 3) {
    if (width == 3) return tile(std::integral_constant<int, 3>());
  }
  if (width == 2) return tile(std::integral_constant<int, 2>());
  tile(std::integral_constant<int, 1>());
}

// Scores of R rows for the vectors of keys that hold [begin, end) of the tile
// whose groups stand at `groups`: not all of it where one sweep would do.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void Scores(const typename Ops::Operand* q,
                       const std::byte* const* groups, size_t stride,
                       size_t steps, int begin, int end, float* scores,
                       Prefetch& fetch) {
  const int vecs = (end + static_cast<int>(kN) - 1) / static_cast<int>(kN);
  constexpr int kVecs = kVecsBeside<R>;
  for (int v = begin / static_cast<int>(kN); v < vecs; v += kVecs) {
    const int width = HWY_MIN(kVecs, vecs - v);
    const std::byte* k[kVecs];
    for (int i = 0; i < width; ++i) {
      k[i] = KeyLane<Ops>(groups, v + i);
    }
    OfWidth<HWY_MIN(kVecs, kTileVecs - 1)>(width, [&](auto vectors) HWY_ATTR {
      ScoreTile<Ops, R, decltype(vectors)::value, kFetch>(
          q, k, stride, steps, scores + v * static_cast<int>(kN), fetch);
    });
  }
}

// acc += p v of R rows, lane steps [begin, end) of the groups, all dims, pass
// by pass, `p` the weights from `begin` on, rows p_stride apart; then comes
// what `onward` names. `on_end` as ValueTile has it.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void ValuesByPass(const typename Ops::Operand* p, int p_stride,
                             const std::byte* const* groups, bool on_end,
                             int begin, int end, float* acc, int acc_floats,
                             bool fresh, Prefetch& fetch) {
  const StreamHead onward = fetch.onward;
  const size_t stride = ValueStride<Ops>(acc_floats);
  const int vecs = acc_floats / static_cast<int>(kN);
  constexpr int kVecs = kVecsBeside<R>;
  const int passes = (vecs + kVecs - 1) / kVecs;
  for (int i = 0; i < passes; ++i) {
    const int first = vecs * i / passes;
    const int next = vecs * (i + 1) / passes;
    const int width = next - first;
    constexpr int kSteps = kGroupTokens / Ops::kPack;
    const std::byte* const* group = groups + begin / kSteps;
    if constexpr (AsksSoon(kFetch)) {
      fetch.onward =
          i + 1 < passes ? ValueHead<Ops>(*group, next, acc_floats) : onward;
    } else if constexpr (FetchesValuesSoon<Ops>(kFetch)) {
      // After the last pass, for want of others, its own ones.
      fetch.onward.line[0] =
          *group + VecOffset<Ops>(i + 1 < passes ? next : first);
    }
    OfWidth<kVecs>(width, [&](auto vectors) HWY_ATTR {
      ValueTile<Ops, R, decltype(vectors)::value, kFetch>(
          p, static_cast<size_t>(p_stride), groups, VecOffset<Ops>(first),
          stride, on_end, begin, end, acc + first * static_cast<int>(kN),
          static_cast<size_t>(acc_floats), fresh, fetch);
    });
  }
}

// Whether Values takes all dims of two or three rows at a time instead of half
// of the dims of all: what is read stands in one go (Zen 5, head size 128, from
// DRAM: 2 to 5% faster; 4 rows from L3 slower), and two rows are twice as many
// chains (from L3 4 to 5% faster, from L2 6%; three rows 0 to 3%).
template <int R>
constexpr bool TakesWideValues(FetchMode mode) {
  return kZen5 && IsNear(mode) && (R <= 3 || (R == 4 && mode == kFetchPaced));
}

// The same as Values so. What is read once, by up to three rows, fetches twice
// as much a step. What four read twice is a group of f32, or a tile of 16 bits:
// as much as L1 holds beside what is fetched (f32, 4 rows from DRAM, in turns:
// even to 2.6% faster than a tile; 16 bits 0 to 1% slower by groups).
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void WideValues(const typename Ops::Operand* p, int p_stride,
                           const std::byte* const* groups, int begin, int end,
                           float* acc, int acc_floats, bool fresh,
                           Prefetch& fetch) {
  constexpr int kSteps = kGroupTokens / Ops::kPack;
  constexpr int kRows = R <= 3 ? R : 2;
  static_assert(R % kRows == 0);
  constexpr bool kByGroup = R > kRows && sizeof(typename Ops::Cache) == 4;
  const StreamHead onward = fetch.onward;
  for (int part_end; begin < end; begin = part_end, fresh = false) {
    part_end = kByGroup ? HWY_MIN(begin + kSteps, end) : end;
    HWY_UNROLL(1) for (int r = 0; r < R; r += kRows) {
      const int after = r + kRows < R ? begin : part_end;
      fetch.onward = after < end
                         ? ValueHead<Ops>(groups[after / kSteps], 0, acc_floats)
                         : onward;
      ValueTile<Ops, kRows, 2 * kMaxVecs, kFetch, R == kRows ? 2 : 1>(
          p + r * p_stride, static_cast<size_t>(p_stride), groups, 0,
          ValueStride<Ops>(acc_floats), false, begin, part_end,
          acc + r * acc_floats, static_cast<size_t>(acc_floats), fresh, fetch);
    }
    p += part_end - begin;
  }
}

// Whether Values takes all dims of 16 tokens before any of the next ones. A
// pass takes some dims of all tokens, so the first one would come to a tile's
// last line soon after that was asked for; by groups lines are read in the
// order in which they come (Zen 5, head size 256, from DRAM, in turns: one KV
// head 5 to 10% faster, four up to 4%, of f16 3 to 6%; from L3 10 to 13%
// slower). Beside half as many vectors a group of pairs has too few steps (8
// rows of bf16 from slow DRAM 5 to 13% slower).
template <class Ops, int R>
constexpr bool TakesGroups(FetchMode mode) {
  return kZen5 && mode == kFetchPaced &&
         (R <= kMaxRows || sizeof(typename Ops::Cache) == sizeof(float));
}

// The same so, to sums that stand there, as they do where it is paced. Called:
// it is long, and other head sizes have no use for it.
template <class Ops, int R, FetchMode kFetch>
HWY_NOINLINE void ValuesByGroup(const typename Ops::Operand* p, int p_stride,
                                const std::byte* const* groups, int begin,
                                int end, float* acc, int acc_floats,
                                Prefetch& fetch) {
  constexpr int kSteps = kGroupTokens / Ops::kPack;
  const StreamHead onward = fetch.onward;
  for (int group_end; begin < end; begin = group_end) {
    group_end = HWY_MIN((begin / kSteps + 1) * kSteps, end);
    fetch.onward = group_end < end ? ValueHead<Ops>(groups[group_end / kSteps],
                                                    0, acc_floats)
                                   : onward;
    ValuesByPass<Ops, R, kFetch>(p, p_stride, groups, false, begin, group_end,
                                 acc, acc_floats, false, fetch);
    p += group_end - begin;
  }
}

// The same as suits where it comes from.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void Values(const typename Ops::Operand* p, int p_stride,
                       const std::byte* const* groups, bool on_end, int begin,
                       int end, float* acc, int acc_floats, bool fresh,
                       Prefetch& fetch) {
  const int vecs = acc_floats / static_cast<int>(kN);
  if constexpr (TakesWideValues<R>(kFetch)) {
    if (vecs == 2 * kMaxVecs) {
      WideValues<Ops, R, kFetch>(p, p_stride, groups, begin, end, acc,
                                 acc_floats, fresh, fetch);
      return;
    }
  }
  if constexpr (TakesGroups<Ops, R>(kFetch)) {
    // Not where passes take fewer vectors than they could.
    if (vecs > kMaxVecs && vecs % kMaxVecs == 0) {
      ValuesByGroup<Ops, R, kFetch>(p, p_stride, groups, begin, end, acc,
                                    acc_floats, fetch);
      return;
    }
  }
  ValuesByPass<Ops, R, kFetch>(p, p_stride, groups, on_end, begin, end, acc,
                               acc_floats, fresh, fetch);
}

// The same over a tile's panels, lane steps [begin, end) of the tile.
template <class Ops, int R, FetchMode kFetch>
HWY_INLINE void PanelValues(const typename Ops::Operand* p, int p_stride,
                            const std::byte* panel, int begin, int end,
                            float* acc, int acc_floats, bool fresh,
                            Prefetch& fetch) {
  constexpr int kWidth = kMaxVecs * static_cast<int>(kN);
  panel += static_cast<size_t>(begin) * kPanelStride<Ops>;
  for (int i = 0; i < acc_floats; i += kWidth, panel += kPanelBytes<Ops>) {
    ValueTile<Ops, R, kMaxVecs, kFetch, 1, true>(
        p, static_cast<size_t>(p_stride), &panel, 0, kPanelStride<Ops>, true, 0,
        end - begin, acc + i, static_cast<size_t>(acc_floats), fresh, fetch);
  }
}

// What rows see of steps [begin, end) of a tile, over all dims; `p` are its
// weights from the tile's first step on.
template <class Ops, int R>
HWY_NOINLINE void ValuesOfEdge(const typename Ops::Operand* p, int p_stride,
                               const std::byte* const* groups,
                               const Span* spans, int begin, int end,
                               float* acc, int acc_floats, bool fresh) {
  constexpr int kVecs = HWY_MIN(kVecsBeside<R>, kMaxVecs);
  const int vecs = acc_floats / static_cast<int>(kN);
  for (int first = 0; first < vecs; first += kVecs) {
    OfWidth<kVecs>(HWY_MIN(kVecs, vecs - first), [&](auto vectors) HWY_ATTR {
      EdgeValues<Ops, R, decltype(vectors)::value>(
          p, static_cast<size_t>(p_stride), groups, VecOffset<Ops>(first),
          ValueStride<Ops>(acc_floats), spans, begin, end,
          acc + first * static_cast<int>(kN), static_cast<size_t>(acc_floats),
          fresh);
    });
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
