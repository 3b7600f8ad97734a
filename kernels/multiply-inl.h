// One step of a register tile: vectors of lanes by a broadcast operand a row.
//
// Included once per pass by pass-inl.h and limits.cc, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// acc[r][v] += lanes(v) * operand(r).
template <int R, int NV, class Lanes, class Operand>
HWY_INLINE void MultiplyLanes(const Lanes& lanes, const Operand& operand,
                              V (&acc)[R][NV]) {
  V raw[NV];
  HWY_UNROLL(16) for (int v = 0; v < NV; ++v) raw[v] = lanes(v);
  HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
    const V x = operand(r);
    HWY_UNROLL(16) for (int v = 0; v < NV; ++v) {
      FmaInto(acc[r][v], raw[v], x);
    }
  }
}

// One step: acc[r][v] = MulAdd(acc[r][v], what stands at from(v), *by(r)). Of a
// pair in two vectors all odd products come before all even ones, so that only
// one of the two takes registers at a time.
template <class Ops, int R, int NV, class From, class By>
HWY_INLINE void MultiplyStep(const From& from, const By& by, V (&acc)[R][NV]) {
  if constexpr (sizeof(typename Ops::Raw) == 2 * sizeof(V)) {
    MultiplyLanes<R, NV>(
        [&](int v) HWY_ATTR { return LoadOdd<Ops, R * NV == 12>(from(v)); },
        [&](int r) HWY_ATTR { return Broadcast(by(r)->odd); }, acc);
    MultiplyLanes<R, NV>(
        [&](int v) HWY_ATTR { return Ops::Load(from(v)).even; },
        [&](int r) HWY_ATTR { return Broadcast(by(r)->even); }, acc);
  } else if constexpr (kAvx2) {
    MultiplyLanes<R, NV>([&](int v) HWY_ATTR { return Ops::Load(from(v)); },
                         [&](int r) HWY_ATTR { return Broadcast(*by(r)); },
                         acc);
  } else {
    typename Ops::Raw raw[NV];
    HWY_UNROLL(16) for (int v = 0; v < NV; ++v) raw[v] = Ops::Load(from(v));
    HWY_UNROLL(16) for (int r = 0; r < R; ++r) {
      const typename Ops::Operand x = *by(r);
      HWY_UNROLL(16) for (int v = 0; v < NV; ++v) {
        acc[r][v] = Ops::MulAdd(acc[r][v], raw[v], x);
      }
    }
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
