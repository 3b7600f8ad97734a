// Read loops and multiply loops of the limits, for the target in force.
//
// Included once per pass by limits.cc after multiply-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

constexpr size_t kLine = 64;
constexpr size_t kLineVecs = kLine / (kN * sizeof(uint32_t));

// kStreams chunks side by side, a line of each in turn; `next` is fetched into
// level kLevel.
template <int kStreams, int kLevel>
HWY_INLINE hn::Vec<DU> ReadChunks(const std::byte* const* chunks,
                                  const std::byte* const* next, size_t bytes) {
  const DU du;
  hn::Vec<DU> sums[kStreams];
  for (auto& sum : sums) sum = hn::Zero(du);
  for (size_t line = 0; line < bytes; line += kLine) {
    for (int s = 0; s < kStreams; ++s) {
      if constexpr (kLevel != 0) {
        __builtin_prefetch(next[s] + line, 0, kLevel == 1 ? 3 : 2);
      }
      for (size_t v = 0; v < kLineVecs; ++v) {
        const auto* p = reinterpret_cast<const uint32_t*>(chunks[s] + line);
        sums[s] = hn::Xor(sums[s], hn::Load(du, p + v * kN));
      }
    }
  }
  for (int s = 1; s < kStreams; ++s) sums[0] = hn::Xor(sums[0], sums[s]);
  return sums[0];
}

template <int kStreams, int kLevel>
HWY_INLINE hn::Vec<DU> ReadAll(const ReadArgs& args) {
  const auto bytes = static_cast<size_t>(args.chunk_bytes);
  hn::Vec<DU> sum = hn::Zero(DU());
  int64_t i = 0;
  for (; i + kStreams <= args.num_chunks; i += kStreams) {
    const bool more = i + 2 * kStreams <= args.num_chunks;
    const std::byte* const* chunks = args.chunks + i;
    const std::byte* const* next = more ? chunks + kStreams : chunks;
    sum = hn::Xor(sum, ReadChunks<kStreams, kLevel>(chunks, next, bytes));
  }
  for (; i < args.num_chunks; ++i) {
    sum = hn::Xor(sum, ReadChunks<1, 0>(args.chunks + i, nullptr, bytes));
  }
  return sum;
}

template <int kLevel>
HWY_INLINE hn::Vec<DU> ReadStreams(const ReadArgs& args) {
  return args.streams == 8   ? ReadAll<8, kLevel>(args)
         : args.streams == 4 ? ReadAll<4, kLevel>(args)
         : args.streams == 2 ? ReadAll<2, kLevel>(args)
                             : ReadAll<1, kLevel>(args);
}

inline uint32_t ReadLimit(const ReadArgs& args) {
  const hn::Vec<DU> sum = args.prefetch == 0   ? ReadStreams<0>(args)
                          : args.prefetch == 1 ? ReadStreams<1>(args)
                                               : ReadStreams<2>(args);
  alignas(64) uint32_t lanes[kLanes] = {};
  hn::Store(sum, DU(), lanes);
  uint32_t all = 0;
  for (const uint32_t lane : lanes) all ^= lane;
  return all;
}

// Enough chains to hide the latency of the multiply-add (6 cycles at two a
// cycle for VDPBF16PS), few enough to leave registers for the operands. Twice
// as many where there is room: 12 leave Zen 5's dot product at 0.93 of what a
// loop of 16 chains reaches that loads what it multiplies.
constexpr int kChains = kMaxVecs == 4 ? 24 : 12;
static_assert(kChains <= 2 * kLanes,
              "each chain begins with a number of its own");

// What the target has, rounded once or twice.
struct MultiplyF32 {
  static constexpr int64_t kFlops = 2;
  V a;
  V b;
  explicit HWY_INLINE MultiplyF32(const float* from)
      : a(LoadF(from)), b(LoadF(from + kLanes)) {}
  HWY_INLINE V operator()(V acc) const { return hn::MulAdd(a, b, acc); }
};

#if VARLANE_NATIVE_BF16
struct MultiplyBf16 {
  static constexpr int64_t kFlops = 4;
  __m512bh a;
  __m512bh b;
  explicit HWY_INLINE MultiplyBf16(const float* from)
      : a(reinterpret_cast<__m512bh>(_mm512_loadu_si512(from))),
        b(reinterpret_cast<__m512bh>(_mm512_loadu_si512(from + kLanes))) {}
  HWY_INLINE V operator()(V acc) const {
    return V{_mm512_dpbf16_ps(acc.raw, a, b)};
  }
};
#else
struct MultiplyBf16 {
  static constexpr int64_t kFlops = 4;
  V a;
  V b;
  explicit HWY_INLINE MultiplyBf16(const float* from)
      : a(LoadF(from)), b(LoadF(from + kLanes)) {}
  // Odd product first, then the even one, as OpsBf16 has it.
  HWY_INLINE V operator()(V acc) const {
    return hn::MulAdd(b, a, hn::MulAdd(a, b, acc));
  }
};
#endif

// So that no compiler takes a loop's sums for unused.
HWY_INLINE void AddTo(float* sink, V sum) {
  alignas(64) float lanes[kLanes] = {};
  StoreF(sum, lanes);
  *sink += SumLanes(lanes);
}

// Each chain's sum has a register. Where there are 32 no compiler unrolls so
// much by itself; without vectors it does better when left alone.
template <class Chain>
HWY_INLINE void ForChains(const Chain& chain) {
  if constexpr (kMaxVecs == 4) {
    HWY_UNROLL(32) for (int c = 0; c < kChains; ++c) chain(c);
  } else {
    for (int c = 0; c < kChains; ++c) chain(c);
  }
}

template <class Multiply>
int64_t MultiplyLimit(int64_t steps, float* sink) {
  // Operands that no compiler can know, tiny so that nothing overflows.
  alignas(64) volatile float seed[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) seed[i] = 1e-6f * static_cast<float>(i);
  alignas(64) float operands[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) operands[i] = seed[i];
  const Multiply multiply(operands);
  V acc[kChains];
  ForChains([&](int c) HWY_ATTR { acc[c] = Broadcast(operands[c]); });
  for (int64_t step = 0; step < steps; ++step) {
    ForChains([&](int c) HWY_ATTR { acc[c] = multiply(acc[c]); });
  }
  V sum = Zero();
  ForChains([&](int c) HWY_ATTR { sum = hn::Add(sum, acc[c]); });
  AddTo(sink, sum);
  return steps * kChains * static_cast<int64_t>(kN) * Multiply::kFlops;
}

#if VARLANE_NATIVE_BF16
using FedBf16 = OpsBf16;
#else
using FedBf16 = OpsF32;  // two of its multiply-adds stand for a pair
#endif

// Sums become weights, which are stored and summed up in their place.
template <int kExpDegree, int R, int NV>
HWY_INLINE void WeighSums(V scale, float* weights, V (&acc)[R][NV], V& total) {
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    HWY_UNROLL(16) for (int v = 0; v < NV; ++v) {
      const V weight = Exp2<kExpDegree>(hn::Mul(acc[r][v], scale));
      StoreF(weight, weights + (r * NV + v) * static_cast<int>(kN));
      total = hn::Add(total, weight);
      acc[r][v] = Zero();
    }
  }
}

// The steps of a matrix product whose register tile is as the kernels have it:
// kMaxVecs vectors by one operand of each of kMaxRows rows, over and over
// again those of one block that L1 holds. After every `weigh_steps` of them,
// where that is not 0, the sums become weights as scores do.
template <class Ops, int kExpDegree>
int64_t FedLimit(int64_t steps, int64_t weigh_steps, float* sink) {
  using Operand = typename Ops::Operand;
  constexpr int64_t kBlockSteps = 64;
  constexpr size_t kStepBytes = kMaxVecs * kVecBytes<Ops>;
  alignas(64) std::byte lanes[kBlockSteps * kStepBytes];
  alignas(64) Operand rows[kBlockSteps][kMaxRows];  // short distances
  alignas(64) float weights[kMaxRows * kMaxVecs * kN];
  // 0.01 in fp32 and in bf16; no compiler can know.
  const volatile int seed = 0x3c;
  std::memset(lanes, seed, sizeof(lanes));
  std::memset(rows, seed, sizeof(rows));
  const volatile float scale = 1.0f;
  V acc[kMaxRows][kMaxVecs];
  for (auto& row : acc) {
    for (V& sum : row) sum = Zero();
  }
  V total = Zero();
  const int64_t tile_steps = weigh_steps > 0 ? weigh_steps : steps;
  int64_t done = 0;
  for (; done < steps; done += tile_steps) {
    for (int64_t left = tile_steps; left > 0; left -= kBlockSteps) {
      const std::byte* lane = lanes;
      const Operand(*row)[kMaxRows] = rows;
      const Operand(*const end)[kMaxRows] = rows + HWY_MIN(left, kBlockSteps);
      HWY_UNROLL(2) for (; row != end; ++row) {
        const auto from = [&](int v) HWY_ATTR {
          return lane + static_cast<size_t>(v) * kVecBytes<Ops>;
        };
        const auto by = [&](int r) HWY_ATTR { return &(*row)[r]; };
        MultiplyStep<Ops, kMaxRows, kMaxVecs>(from, by, acc);
        lane += kStepBytes;
      }
    }
    if (weigh_steps > 0) {
      WeighSums<kExpDegree>(Broadcast(scale), weights, acc, total);
    }
  }
  for (const auto& row : acc) {
    for (const V& part : row) total = hn::Add(total, part);
  }
  AddTo(sink, total);
  return done * kMaxRows * kMaxVecs * static_cast<int64_t>(kN) * 2 * Ops::kPack;
}

}  // namespace VARLANE_NS
}  // namespace varlane
