// The pass of a register group for as many rows as it has: known where it runs,
// a constant where it is compiled.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

template <class Ops, int R, FetchMode kFetch>
HWY_NOINLINE void PassRows(RunContext<Ops>& run, const Group& group) {
  Waiting<Ops> waiting;
  GroupPass<Ops, R, kFetch>(run, *run.pages, group, waiting).Run();
}
template <class Ops, int R, FetchMode kFetch>
HWY_NOINLINE Unadded WeighRows(RunContext<Ops>& run, const Group& group,
                               int tile) {
  Waiting<Ops> waiting;
  return GroupPass<Ops, R, kFetch>(run, *run.pages, group, waiting)
      .WeighTile(tile);
}
template <class Ops, int R, FetchMode kFetch>
HWY_NOINLINE void AddRows(RunContext<Ops>& run, const Group& group, int tile,
                          Unadded unadded) {
  Waiting<Ops> waiting;
  GroupPass<Ops, R, kFetch>(run, *run.pages, group, waiting)
      .AddTile(tile, unadded);
}

// What pass(integral_constant<int, rows>) returns: a group's rows, kLeast to
// kMost of them, as a constant.
template <int kLeast, int kMost, class Pass>
HWY_INLINE auto OfRows(int rows, const Pass& pass) {
  if constexpr (kMost > kLeast) {
    if (rows < kMost) return OfRows<kLeast, kMost - 1>(rows, pass);
  }
  return pass(std::integral_constant<int, kMost>());
}
// The same of one of several groups.
template <class Ops, class Pass>
HWY_INLINE auto OfRowsOfSeveral(int rows, const Pass& pass) {
  return OfRows<kLeastOfSeveral<Ops>, kMostOfSeveral<Ops>>(rows, pass);
}

template <class Ops, FetchMode kFetch>
HWY_INLINE void PassUpToRows(RunContext<Ops>& run, const Group& group) {
  OfRowsOfSeveral<Ops>(group.rows, [&](auto rows) HWY_ATTR {
    PassRows<Ops, decltype(rows)::value, kFetch>(run, group);
  });
}
template <class Ops, FetchMode kFetch>
HWY_INLINE Unadded WeighUpToRows(RunContext<Ops>& run, const Group& group,
                                 int tile) {
  return OfRowsOfSeveral<Ops>(group.rows, [&](auto rows) HWY_ATTR {
    return WeighRows<Ops, decltype(rows)::value, kFetch>(run, group, tile);
  });
}
template <class Ops, FetchMode kFetch>
HWY_INLINE void AddUpToRows(RunContext<Ops>& run, const Group& group, int tile,
                            Unadded unadded) {
  OfRowsOfSeveral<Ops>(group.rows, [&](auto rows) HWY_ATTR {
    AddRows<Ops, decltype(rows)::value, kFetch>(run, group, tile, unadded);
  });
}

}  // namespace VARLANE_NS
}  // namespace varlane
