// The two micro-kernels: scores of a key tile, and P.V of a run of key tiles.
//
// Both are one loop of the same shape: a vector of the cache (tokens resp. dims
// in its lanes) times a broadcast operand (q resp. p) into R x NV register
// accumulators. Nothing is ever summed across lanes.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Work beside the scores of a tile: none. What does not multiply hides behind
// what does only in small portions, however far the CPU looks ahead.
struct NoSide {
  struct Of {};
  static constexpr int kPortions = 0;
  explicit HWY_INLINE NoSide(Of) {}
};

// Steps of a micro-kernel's loop at a time, but on Zen 3. Plain AVX-512 is
// short of what its decoders deliver while the core's other thread runs. On Zen
// 5 softmax fits better beside multiply-adds the fewer other instructions there
// are (prefill in bf16 2 to 5% faster), as do requests for what a cache holds
// (contexts of 128 in L3: 4%); loops that fetch from memory gain nothing or
// lose 1 to 3%.
template <class Ops, FetchMode kFetch>
constexpr int kStepUnroll = kVecBytes<Ops> == 2 * sizeof(V) ? 1
                            : kIntelAvx512                  ? 2
                            : kZen5&& kFetch <= kFetchNear  ? 4
                                                            : 1;

// Takes step() until x is at `end`, by rounds of `fetcher`; what is left over
// fetches nothing. `kUnit`: X's of a step.
template <size_t kUnit, class Fetcher, class X, class Step>
HWY_INLINE void RepeatRounds(Fetcher& fetcher, const X* const& x, const X* end,
                             const Step& step) {
  constexpr size_t kRound = Fetcher::kRound * kUnit;
  const X* const last = x + static_cast<size_t>(end - x) / kRound * kRound;
  while (x != last) {
    const auto steps = [&]<size_t... kStep>(std::index_sequence<kStep...>)
        HWY_ATTR __attribute__((always_inline)) {
      ((fetcher.template BeginStep<kStep>(), step()), ...);
    };
    steps(std::make_index_sequence<Fetcher::kRound>());
    fetcher.EndRound();
  }
  HWY_UNROLL(1) while (x != end) step();
}

// Takes step() until x is at `end`. Of a widened pair it is long enough alone
// (a Xeon with AMX: prefill in bf16 3% faster).
template <class Ops, FetchMode kFetch, class Fetcher, class X, class Step>
HWY_INLINE void RepeatStep(Fetcher& fetcher, const X* const& x, const X* end,
                           const Step& step) {
  // A pragma takes no template's constant.
  if constexpr (kAvx2) {
    constexpr size_t kUnit = sizeof(typename Ops::Operand) / sizeof(X);
    RepeatRounds<kUnit>(fetcher, x, end, step);
  } else if constexpr (kStepUnroll<Ops, kFetch> == 4) {
    HWY_UNROLL(4) while (x != end) step();
  } else if constexpr (kStepUnroll<Ops, kFetch> == 2) {
    HWY_UNROLL(2) while (x != end) step();
  } else {
    HWY_UNROLL(1) while (x != end) step();
  }
}

// Where operands of up to 12 rows stand, `stride` bytes apart. In registers: a
// loop whose loads carry distances of 4 bytes each lowers the clock of a Xeon
// with AMX by 6%.
class RowOffsets {
 public:
  explicit HWY_INLINE RowOffsets(size_t stride)
      : stride_(stride), third_(3 * stride), fifth_(5 * stride) {}
  // That of `row`, the first one's at `first`.
  HWY_INLINE const std::byte* Of(const std::byte* first, int row) const {
    if (row >= 6) {
      first += 2 * third_;
      row -= 6;
    }
    return first + (row == 3   ? third_
                    : row == 5 ? fifth_
                               : static_cast<size_t>(row) * stride_);
  }

 private:
  size_t stride_;
  size_t third_;
  size_t fifth_;
};

// acc[r][v] = q_r . k, one FMA chain per (row, token) in head order.
//
// q       [R][steps] operands
// k       NV addresses of the first step's lanes
// stride  bytes from one step to the next
// side    is worked on meanwhile
template <class Ops, int R, int NV, FetchMode kFetch, class Side>
HWY_INLINE void MultiplyKeys(const typename Ops::Operand* HWY_RESTRICT q,
                             const std::byte* const* HWY_RESTRICT k,
                             size_t stride, size_t steps, const Side& side,
                             V (&acc)[R][NV], Prefetch& fetch) {
  // Few registers: a pointer for all rows, an offset for all lanes.
  static_assert(R <= 12);
  const auto* x = reinterpret_cast<const std::byte*>(q);
  const size_t row_bytes = steps * sizeof(typename Ops::Operand);
  const RowOffsets row_at(row_bytes);
  const std::byte* lane[NV];
  HWY_UNROLL(16) for (int v = 0; v < NV; ++v) lane[v] = k[v];
  size_t at = 0;
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int v = 0; v < NV; ++v) acc[r][v] = Zero();
  }
  Fetcher<Ops, kFetch, kVecsBeside<R>> fetcher(fetch);
  constexpr size_t kAheadSteps = kAheadBytes<Ops> / (NV * kVecBytes<Ops>);
  Ahead<kFetch, NV, NV == 4 && kVecBytes<Ops> == 32> ahead(fetch);
  ahead.Follow(k, stride, kAheadSteps);
  constexpr bool kSwitches = decltype(ahead)::kOn;  // to what comes after
  const auto steps_to = [&](const std::byte* stop) HWY_ATTR
      __attribute__((always_inline)) {
    RepeatStep<Ops, kFetch>(
        fetcher, x, stop, [&]() HWY_ATTR __attribute__((always_inline)) {
          fetcher.Step(lane[NV - 1] + at);
          ahead.Step();
          const auto from = [&](int v) HWY_ATTR { return lane[v] + at; };
          const auto by = [&](int r) HWY_ATTR {
            return reinterpret_cast<const typename Ops::Operand*>(
                row_at.Of(x, r));
          };
          MultiplyStep<Ops, R, NV>(from, by, acc);
          x += sizeof(*q);
          at += stride;
        });
  };
  const std::byte* const end = x + row_bytes;
  if constexpr (Side::kPortions != 0) {
    typename Side::State state;
    side.Start(state);
    size_t part = steps / (Side::kPortions + 1);
    if constexpr (kStepUnroll<Ops, kFetch> == 4) {
      // Whole fours (4 rows of bf16 from L3, in turns: 3% faster).
      const size_t fours = (part + 1) / 4 * 4;
      if (fours != 0 && fours * Side::kPortions <= steps) part = fours;
    }
    size_t later = kAheadSteps;
    const auto steps_of_part = [&]() HWY_ATTR __attribute__((always_inline)) {
      if constexpr (kSwitches) {
        if (later >= steps) ahead.Follow(fetch.onward, later - steps);
        later += part;
      }
      steps_to(x + part * sizeof(*q));
    };
    HWY_UNROLL(1) for (int i = 0; i < Side::kPortions; i += 2) {
      steps_of_part();
      side.template Portion<0>(state);
      steps_of_part();
      side.template Portion<1>(state);
    }
    if constexpr (kSwitches) {
      if (later >= steps) ahead.Follow(fetch.onward, later - steps);
    }
  } else if constexpr (kSwitches) {
    const size_t first = steps > kAheadSteps ? steps - kAheadSteps : 0;
    steps_to(x + first * sizeof(*q));
    ahead.Follow(fetch.onward, first + kAheadSteps - steps);
  }
  steps_to(end);
}

template <int R, int NV>
HWY_INLINE void ZeroRows(V (&rows)[R][NV]) {
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int i = 0; i < NV; ++i) rows[r][i] = Zero();
  }
}

// The rows of a register tile in memory, `stride` floats apart.
template <int R, int NV>
HWY_INLINE void LoadRows(const float* from, size_t stride, V (&rows)[R][NV]) {
  HWY_UNROLL(16) for (int r = 0; r < R; ++r, from += stride) {
    HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
      rows[r][i] = LoadF(from + i * static_cast<int>(kN));
    }
  }
}
template <int R, int NV>
HWY_INLINE void StoreRows(const V (&rows)[R][NV], float* to, size_t stride) {
  HWY_UNROLL(16) for (int r = 0; r < R; ++r, to += stride) {
    HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
      StoreF(rows[r][i], to + i * static_cast<int>(kN));
    }
  }
}

// Where `fresh`, nothing stands there yet.
template <int R, int NV>
HWY_INLINE void BeginSums(const float* acc, size_t acc_stride, bool fresh,
                          V (&sums)[R][NV]) {
  if (fresh) {
    ZeroRows(sums);
  } else {
    LoadRows(acc, acc_stride, sums);
  }
}

// Stored: scores[r][NV * kN].
template <class Ops, int R, int NV, FetchMode kFetch>
HWY_NOINLINE void ScoreTile(const typename Ops::Operand* HWY_RESTRICT q,
                            const std::byte* const* HWY_RESTRICT k,
                            size_t stride, size_t steps,
                            float* HWY_RESTRICT scores, Prefetch& fetch) {
  V acc[R][NV];
  MultiplyKeys<Ops, R, NV, kFetch>(q, k, stride, steps, NoSide({}), acc, fetch);
  StoreRows(acc, scores, kKeyTile);
}

// Where vector `vec` of the keys of a tile begins whose groups stand at
// `groups`.
template <class Ops>
HWY_INLINE const std::byte* KeyLane(const std::byte* const* groups, int vec) {
  constexpr int kGroupVecs = kGroupTokens / static_cast<int>(kN);
  return groups[vec / kGroupVecs] + VecOffset<Ops>(vec % kGroupVecs);
}

// A whole tile's scores, stored too, beside work on `side_of`, and whether all
// of them stay below their rows' thresholds.
template <class Ops, int R, FetchMode kFetch, class Side>
HWY_NOINLINE bool SteadyTile(const typename Ops::Operand* HWY_RESTRICT q,
                             const std::byte* const* HWY_RESTRICT groups,
                             size_t stride, size_t steps,
                             const typename Side::Of& side_of,
                             const RowState* HWY_RESTRICT rows, float* scores,
                             Prefetch& fetch) {
  constexpr int NV = HWY_MIN(kVecsBeside<R>, kTileVecs);
  static_assert(NV == kTileVecs || Side::kPortions == 0, "beside all of it");
  const Side side(side_of);
  auto steady = hn::FirstN(D(), kN);
  const StreamHead onward = fetch.onward;
  HWY_UNROLL(1) for (int part = 0; part < kTileVecs; part += NV) {
    if constexpr (NV < kTileVecs && Ahead<kFetch, NV, false>::kOn) {
      fetch.onward = part + NV < kTileVecs
                         ? KeyHead<NV>(groups + part + NV, stride)
                         : onward;
    }
    const std::byte* k[NV];
    HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
      k[i] = KeyLane<Ops>(groups, part + i);
    }
    V acc[R][NV];
    MultiplyKeys<Ops, R, NV, kFetch>(q, k, stride, steps, side, acc, fetch);
    HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
      V high = acc[r][0];
      HWY_UNROLL(16) for (int v = 1; v < NV; ++v) {
        high = hn::Max(high, acc[r][v]);
      }
      steady = hn::And(steady, hn::Le(high, Broadcast(rows[r].threshold)));
    }
    StoreRows(acc, scores + part * static_cast<int>(kN), kKeyTile);
  }
  return hn::AllTrue(D(), steady);
}

// acc[r][NV * kN] += p_r . v over lane steps [begin, end) of the run, in token
// order. A step is kPack tokens.
//
// p        operands of step `begin`, rows p_stride apart
// v        group addresses, already advanced to the first dim
// stride   bytes from one step of a group to the next
// on_end   from one group to the next too (never where IsNear)
// acc      rows acc_stride floats apart; `fresh`: nothing stands there yet
//
// kFetches  a step's steps of fetching
// kPanel    of a panel (panel-inl.h), whose offset, stride, on_end and begin
//           are known: left to GCC they are or are not (5 rows of bf16: 5% more
//           instructions without)
template <class Ops, int R, int NV, FetchMode kFetch, int kFetches = 1,
          bool kPanel = false>
HWY_NOINLINE void ValueTile(const typename Ops::Operand* HWY_RESTRICT p,
                            size_t p_stride,
                            const std::byte* const* HWY_RESTRICT v,
                            size_t offset, size_t stride, bool on_end,
                            int begin, int end, float* HWY_RESTRICT acc,
                            size_t acc_stride, bool fresh, Prefetch& fetch) {
  using Operand = typename Ops::Operand;
  constexpr size_t kSteps = kGroupTokens / Ops::kPack;  // of one group
  if constexpr (kPanel) {
    offset = 0;
    stride = NV * kVecBytes<Ops>;
    on_end = true;
    begin = 0;
  }
  V sum[R][NV];
  BeginSums(acc, acc_stride, fresh, sum);
  // Where streams are fetched registers are short, and p_stride is known.
  constexpr bool kKnown = !kPassesByTile || IsNear(kFetch);
  const RowOffsets row_at((kKnown ? size_t{kRunSteps<Ops>} : p_stride) *
                          sizeof(Operand));
  constexpr int kLines = static_cast<int>((NV * kVecBytes<Ops> + 63) / 64);
  constexpr size_t kAheadGroups =
      HWY_MAX(kAheadBytes<Ops> / (kLines * 64 * kSteps), size_t{1});
  Fetcher<Ops, kFetch, kVecsBeside<R>> fetcher(fetch);
  Ahead<kFetch, kLines, false> ahead(fetch);
  constexpr bool kSoon = FetchesValuesSoon<Ops>(kFetch);
  const Operand* x = p;
  const Operand* const p_end = p + (end - begin);
  size_t step = static_cast<size_t>(begin) % kSteps;  // of its group
  for (v += static_cast<size_t>(begin) / kSteps; x != p_end; ++v, step = 0) {
    if constexpr (AsksSoon(kFetch)) {
      const auto left = static_cast<size_t>(p_end - x);
      if (left > kAheadGroups * kSteps) {
        ahead.FollowRow(v[kAheadGroups] + offset, stride, step);
      } else {
        ahead.Follow(fetch.onward, kAheadGroups * kSteps - left);
      }
    }
    const std::byte* lane = *v + offset + step * stride;
    ptrdiff_t to_next = 0;
    if constexpr (kSoon) {
      const bool last = static_cast<size_t>(p_end - x) <= kSteps;
      to_next = last ? fetch.onward.line[0] - lane : v[1] - v[0];
    }
    const Operand* x_end = HWY_MIN(x + (kSteps - step), p_end);
    if constexpr (kPassesByTile && !IsNear(kFetch)) {
      if (on_end) x_end = p_end;
    }
    RepeatStep<Ops, kFetch>(
        fetcher, x, x_end, [&]() HWY_ATTR __attribute__((always_inline)) {
          HWY_UNROLL(2) for (int i = 0; i < kFetches; ++i) fetcher.Step(lane);
          ahead.Step();
          if constexpr (kSoon) {
            HWY_UNROLL(8) for (int i = 0; i < kLines; ++i) {
              FetchSoon(lane + to_next + i * 64);
            }
          }
          const auto from = [&](int i) HWY_ATTR {
            return lane + static_cast<size_t>(i) * kVecBytes<Ops>;
          };
          const auto by = [&](int r) HWY_ATTR {
            return reinterpret_cast<const Operand*>(
                row_at.Of(reinterpret_cast<const std::byte*>(x), r));
          };
          MultiplyStep<Ops, R, NV>(from, by, sum);
          lane += stride;
          ++x;
        });
  }
  StoreRows(sum, acc, acc_stride);
}

// Keys [begin, end) of a tile that one row sees; empty where end == begin.
struct Span {
  int begin;
  int end;
};

// acc[r][NV * kN] += p_r . v of R rows over steps [begin, end) of a tile, of
// each row what its span has of them. A token that it does not see may be NaN,
// so it is dropped, not multiplied by a zero weight.
//
// p       the weights of the tile's first step, rows p_stride apart
// groups  the tile's
// acc     as ValueTile has it
template <class Ops, int R, int NV>
HWY_NOINLINE void EdgeValues(const typename Ops::Operand* HWY_RESTRICT p,
                             size_t p_stride,
                             const std::byte* const* HWY_RESTRICT groups,
                             size_t offset, size_t stride,
                             const Span* HWY_RESTRICT spans, int begin, int end,
                             float* HWY_RESTRICT acc, size_t acc_stride,
                             bool fresh) {
  constexpr int kPack = Ops::kPack;
  constexpr int kSteps = kGroupTokens / kPack;
  V sum[R][NV];
  BeginSums(acc, acc_stride, fresh, sum);
  HWY_UNROLL(1) for (int step = begin; step < end; ++step) {
    const std::byte* lane = groups[step / kSteps] + offset +
                            static_cast<size_t>(step % kSteps) * stride;
    const int token = step * kPack;
    const typename Ops::Operand* x = p + step;
    HWY_UNROLL(16) for (int r = 0; r < R; ++r, x += p_stride) {
      const auto [first, last] = spans[r];
      if (token >= last || token + kPack <= first) continue;
      typename Ops::Raw part[NV];
      HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
        part[i] = Ops::Load(lane + i * kVecBytes<Ops>);
      }
      if constexpr (kPack == 2) {
        if (token + 1 == last) {
          for (auto& raw : part) raw = Ops::DropOdd(raw);
        } else if (token < first) {
          for (auto& raw : part) raw = Ops::DropEven(raw);
        }
      }
      HWY_UNROLL(16) for (int i = 0; i < NV; ++i) {
        sum[r][i] = Ops::MulAdd(sum[r][i], part[i], *x);
      }
    }
  }
  StoreRows(sum, acc, acc_stride);
}

}  // namespace VARLANE_NS
}  // namespace varlane
