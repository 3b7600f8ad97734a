// The two micro-kernels: scores of a key tile, and P.V of a key tile.
//
// Both are one loop of the same shape: a vector of the cache (tokens resp. dims
// in its lanes) times a broadcast operand (q resp. p) into R x NV register
// accumulators. Nothing is ever summed across lanes.
//
// A key tile is kKeyTile tokens at an absolute position; it is seen as four
// groups of 16 tokens, since 16 divides every block size: each group has its
// own address, found once through the block table. Two neighbouring tiles make
// a pair: their values are added in one go, which loads and stores the
// accumulators half as often. Included once per pass by pass-inl.h, hence no
// guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

constexpr int kGroupTokens = 16;
constexpr int kGroups = kKeyTile / kGroupTokens;
constexpr int kPair = 2;     // tiles
constexpr int kMaxRows = 4;  // of a register tile
static_assert(kPartition % (kPair * kKeyTile) == 0, "pairs tile partitions");

// Where the 16-token groups of a pair of key tiles stand. Groups without a
// visible token repeat a neighbour and are never read.
struct PairPages {
  const std::byte* k[kPair * kGroups];
  const std::byte* v[kPair * kGroups];
};

// How a micro-kernel fetches ahead while it computes; always into L2, which
// takes nearly twice as many misses at a time as L1 does (Zen 4: 27 against 16
// GB/s a core over random 4 KiB pieces).
//
//   kNoFetch    what it reads is in L2 already
//   kFetchNear  a line of each of four streams a step: few rows, whose next
//               keys or values are needed half a pair later
//   kFetchFar   a line of each of two streams a step: many rows share the
//               pair, so the next one is spread over all of them
enum FetchMode : int { kNoFetch, kFetchNear, kFetchFar };

// The pieces to fetch, `left` lines each, `stride` bytes apart: those of
// `stream` side by side, then those of `then`. Advanced by what fetches. Past
// the end the last lines are asked for again, which costs less than a branch
// around it; so every stream stands at some line that is mapped.
struct Prefetch {
  const std::byte* stream[kGroups] = {};
  const std::byte* then[kGroups] = {};  // [0] null = none
  size_t stride = 0;
  size_t left = 0;   // 0 = nothing to fetch
  size_t lines = 0;  // of each of `then`

  // Fetches nothing, standing at `line`.
  HWY_INLINE void Idle(const std::byte* line) {
    for (const std::byte*& at : stream) at = line;
    then[0] = nullptr;
    stride = left = 0;
  }
};

// Steps through a Prefetch with its pointers in registers.
template <FetchMode kMode>
class Fetcher {
 public:
  explicit HWY_INLINE Fetcher(Prefetch& fetch)
      : fetch_(fetch), stride_(fetch.stride), left_(fetch.left) {
    for (int i = 0; i < kStreams; ++i) at_[i] = fetch.stream[i];
  }
  HWY_INLINE ~Fetcher() {
    if constexpr (kStreams != 0) {
      for (int i = 0; i < kStreams; ++i) fetch_.stream[i] = at_[i];
      fetch_.left = left_;
      fetch_.stride = stride_;
    }
  }
  Fetcher(const Fetcher&) = delete;
  Fetcher& operator=(const Fetcher&) = delete;

  HWY_INLINE void Step() {
    if constexpr (kStreams != 0) {
      HWY_UNROLL(4) for (int i = 0; i < kStreams; ++i) {
        __builtin_prefetch(at_[i], 0, 2);
        at_[i] += stride_;
      }
      if (HWY_UNLIKELY(--left_ == 0)) EndPiece();  // of none it wraps
    }
  }

 private:
  static constexpr int kStreams = kMode == kFetchNear  ? kGroups
                                  : kMode == kFetchFar ? 2
                                                       : 0;

  HWY_INLINE void EndPiece() {
    if (fetch_.then[0] == nullptr) {
      for (int i = 0; i < kStreams; ++i) at_[i] -= stride_;
      stride_ = 0;
      return;
    }
    for (int i = 0; i < kStreams; ++i) at_[i] = fetch_.then[i];
    fetch_.then[0] = nullptr;
    left_ = fetch_.lines;
  }

  Prefetch& fetch_;
  const std::byte* at_[kStreams == 0 ? 1 : kStreams];
  size_t stride_;
  size_t left_;
};

// Steps of P.V in a key tile, and in a pair of them.
template <class Ops>
constexpr int kTileSteps = kKeyTile / Ops::kPack;
template <class Ops>
constexpr int kPairSteps = kPair* kTileSteps<Ops>;

// scores[r][NV * kN] = q_r . k, one FMA chain per (row, token) in head order.
//
// q      [R][steps] operands
// k      NV addresses of the first step's lanes
// stride bytes from one step to the next
template <class Ops, int R, int NV, FetchMode kFetch>
HWY_NOINLINE void ScoreTile(const typename Ops::Operand* HWY_RESTRICT q,
                            const std::byte* const* HWY_RESTRICT k,
                            size_t stride, size_t steps,
                            float* HWY_RESTRICT scores, Prefetch& fetch) {
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
  Fetcher<kFetch> fetcher(fetch);
  for (size_t step = 0; step < steps; ++step) {
    fetcher.Step();
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

// acc[r][NV * kN] += p_r . v over lane steps [begin, end) of the pair, in token
// order. A step is kPack tokens.
//
// p        [R][kPairSteps] operands
// v        group addresses, already advanced to the first dim
// stride   bytes from one step of a group to the next
// acc      rows acc_stride floats apart
template <class Ops, int R, int NV, FetchMode kFetch>
HWY_NOINLINE void ValueTile(const typename Ops::Operand* HWY_RESTRICT p,
                            const std::byte* const* HWY_RESTRICT v,
                            size_t offset, size_t stride, int begin, int end,
                            float* HWY_RESTRICT acc, size_t acc_stride,
                            Prefetch& fetch) {
  constexpr int kSteps = kGroupTokens / Ops::kPack;  // of one group
  V sum[R][NV];
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
      sum[r][i] = LoadF(acc + static_cast<size_t>(r) * acc_stride +
                        i * static_cast<int>(kN));
    }
  }
  Fetcher<kFetch> fetcher(fetch);
  for (int step = begin; step < end;) {
    const std::byte* base = v[step / kSteps] + offset;
    const int group_end = HWY_MIN(end, (step / kSteps + 1) * kSteps);
    const std::byte* lane = base + static_cast<size_t>(step % kSteps) * stride;
    for (; step < group_end; ++step, lane += stride) {
      fetcher.Step();
      typename Ops::Raw raw[NV];
      HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
        raw[i] =
            Ops::Load(lane + i * kN * Ops::kPack * sizeof(typename Ops::Cache));
      }
      HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
        const typename Ops::Operand x = p[r * kPairSteps<Ops> + step];
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
