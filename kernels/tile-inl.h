// The two micro-kernels: scores of a key tile, and P.V of a key tile.
//
// Both are one loop of the same shape: a vector of the cache (tokens resp. dims
// in its lanes) times a broadcast operand (q resp. p) into R x NV register
// accumulators. Nothing is ever summed across lanes.
//
// A key tile is kKeyTile tokens at an absolute position; it is seen as four
// groups of 16 tokens, since 16 divides every block size: each group has its
// own address, found once through the block table. Included once per pass by
// pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

constexpr int kGroupTokens = 16;
constexpr int kGroups = kKeyTile / kGroupTokens;
constexpr int kMaxRows = 4;  // of a register tile

// Where the 16-token groups of one key tile stand. Groups without a visible
// token repeat a neighbour and are never read.
struct TilePages {
  const std::byte* k[kGroups];
  const std::byte* v[kGroups];
};

// How a micro-kernel fetches ahead while it computes.
//
//   kNoFetch    what it reads is in L1 or L2 already
//   kFetchNear  one line of each of four groups a step, into L1: few rows,
//   whose
//               next keys or values are needed half a tile later
//   kFetchFar   one line a step, into L2: many rows share the tile, so the next
//               one is spread over all of them
enum FetchMode : int { kNoFetch, kFetchNear, kFetchFar };

// The lines to fetch: `lines` of each stream, `stride` bytes apart. kFetchFar
// has one stream.
struct Prefetch {
  const std::byte* stream[kGroups] = {};
  size_t stride = 0;
  size_t lines = 0;  // 0 = nothing to fetch
};

template <FetchMode kMode>
HWY_INLINE void FetchStep(const Prefetch& fetch, size_t step) {
  // Past the end the first line is asked for again, which costs nothing.
  const size_t at = (step < fetch.lines ? step : 0) * fetch.stride;
  if constexpr (kMode == kFetchNear) {
    for (const std::byte* stream : fetch.stream) {
      __builtin_prefetch(stream + at, 0, 3);
    }
  } else if constexpr (kMode == kFetchFar) {
    __builtin_prefetch(fetch.stream[0] + at, 0, 2);
  }
}

// scores[r][NV * kN] = q_r . k, one FMA chain per (row, token) in head order.
//
// q      [R][steps] operands
// k      NV addresses of the first step's lanes
// stride bytes from one step to the next
template <class Ops, int R, int NV, FetchMode kFetch>
HWY_NOINLINE void ScoreTile(const typename Ops::Operand* HWY_RESTRICT q,
                            const std::byte* const* HWY_RESTRICT k,
                            size_t stride, size_t steps,
                            float* HWY_RESTRICT scores, const Prefetch& fetch) {
  V acc[R][NV];
  const std::byte* lane[NV];
  HWY_UNROLL(16) for (int v = 0; v < NV; ++v) lane[v] = k[v];
  const typename Ops::Operand* row[R];
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    row[r] = q + static_cast<size_t>(r) * steps;
  }
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int v = 0; v < NV; ++v) acc[r][v] = Zero();
  }
  for (size_t step = 0; step < steps; ++step) {
    FetchStep<kFetch>(fetch, step);
    typename Ops::Raw raw[NV];
    HWY_UNROLL(16) for (int v = 0; v < NV; ++v) {
      raw[v] = Ops::Load(lane[v] + step * stride);
    }
    HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
      const typename Ops::Operand x = row[r][step];
      HWY_UNROLL(16) for (int v = 0; v < NV; ++v) {
        acc[r][v] = Ops::MulAdd(acc[r][v], raw[v], x);
      }
    }
  }
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int v = 0; v < NV; ++v) {
      StoreF(acc[r][v], scores + r * kKeyTile + v * static_cast<int>(kN));
    }
  }
}

// acc[r][NV * kN] += p_r . v over lane steps [begin, end) of the tile, in token
// order. A step is kPack tokens.
//
// p        [R][kKeyTile / kPack] operands
// v        group addresses, already advanced to the first dim
// stride   bytes from one step of a group to the next
// acc      rows acc_stride floats apart
template <class Ops, int R, int NV, FetchMode kFetch>
HWY_NOINLINE void ValueTile(const typename Ops::Operand* HWY_RESTRICT p,
                            const std::byte* const* HWY_RESTRICT v,
                            size_t offset, size_t stride, int begin, int end,
                            float* HWY_RESTRICT acc, size_t acc_stride,
                            const Prefetch& fetch) {
  constexpr int kSteps = kGroupTokens / Ops::kPack;  // of one group
  constexpr int kRowSteps = kKeyTile / Ops::kPack;
  V sum[R][NV];
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
      sum[r][i] = LoadF(acc + static_cast<size_t>(r) * acc_stride +
                        i * static_cast<int>(kN));
    }
  }
  for (int step = begin; step < end;) {
    const std::byte* base = v[step / kSteps] + offset;
    const int group_end = HWY_MIN(end, (step / kSteps + 1) * kSteps);
    const std::byte* lane = base + static_cast<size_t>(step % kSteps) * stride;
    for (; step < group_end; ++step, lane += stride) {
      FetchStep<kFetch>(fetch, static_cast<size_t>(step));
      typename Ops::Raw raw[NV];
      HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
        raw[i] =
            Ops::Load(lane + i * kN * Ops::kPack * sizeof(typename Ops::Cache));
      }
      HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
        const typename Ops::Operand x = p[r * kRowSteps + step];
        HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
          sum[r][i] = Ops::MulAdd(sum[r][i], raw[i], x);
        }
      }
    }
  }
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
      StoreF(sum[r][i], acc + static_cast<size_t>(r) * acc_stride +
                            i * static_cast<int>(kN));
    }
  }
}

// A step of which a row sees one token only, the even or the odd one: the
// other's V may be NaN, so it is dropped, not multiplied by a zero weight.
template <class Ops, bool kEven>
HWY_NOINLINE void ValueHalfStep(const typename Ops::Operand* HWY_RESTRICT p,
                                const std::byte* HWY_RESTRICT lane,
                                int num_vecs, float* HWY_RESTRICT acc) {
  for (int i = 0; i < num_vecs; ++i) {
    const auto pair =
        Ops::Load(lane + i * kN * Ops::kPack * sizeof(typename Ops::Cache));
    const auto raw = kEven ? Ops::DropOdd(pair) : Ops::DropEven(pair);
    float* to = acc + i * static_cast<int>(kN);
    StoreF(Ops::MulAdd(LoadF(to), raw, *p), to);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
