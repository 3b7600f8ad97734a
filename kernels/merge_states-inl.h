// Merging finished rows (out, lse) of disjoint key sets.
//
// Unlike the merge of partials (rows-inl.h) its inputs are divided already, so
// a state's weight is exp(lse_i - max lse). Included once per pass by
// pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// The largest lse of a row; NaN where one is, -inf where all are empty.
HWY_INLINE float LargestLse(const MergeStatesArgs& args, int64_t row) {
  float largest = kMinusInf;
  for (int64_t i = 0; i < args.num_states; ++i) {
    const float lse = args.states[i].lse[row];
    if (lse != lse) return lse;
    if (lse > largest) largest = lse;
  }
  return largest;
}

// A state that is the only one comes out as it went in: x 2^0 / 2^0, and the
// first is not added to zero, which would make -0 a +0.
HWY_INLINE void MergeStateRow(const MergeStatesArgs& args, int64_t row,
                              float* HWY_RESTRICT acc,
                              float* HWY_RESTRICT from) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const int n = args.v_head_size;
  void* out = RowAt(args.out, args.out_dtype, row * args.out_stride);
  const float largest = LargestLse(args, row);
  if (largest == kMinusInf) {
    std::memset(out, 0, static_cast<size_t>(n) * SizeOf(args.out_dtype));
    if (args.lse != nullptr) args.lse[row] = kMinusInf;
    return;
  }
  float sum = 0;
  bool first = true;
  for (int64_t i = 0; i < args.num_states; ++i) {
    const StateRows& state = args.states[i];
    const float lse = state.lse[row];
    if (lse == kMinusInf) continue;
    const V weight = Exp2<3>(Broadcast((lse - largest) * kLog2E));
    sum += hn::GetLane(weight);
    ReadRow(RowAt(state.out, state.dtype, row * state.stride), state.dtype, n,
            from);
    for (int d = 0; d < n; d += static_cast<int>(kN)) {
      const V value = LoadF(from + d);
      StoreF(
          first ? hn::Mul(value, weight) : Fma(value, weight, LoadF(acc + d)),
          acc + d);
    }
    first = false;
  }
  for (int d = 0; d < n; d += static_cast<int>(kN)) {
    StoreF(hn::Div(LoadF(acc + d), Broadcast(sum)), acc + d);
  }
  WriteRow(acc, args.out_dtype, n, out);
  if (args.lse != nullptr) {
    args.lse[row] = static_cast<float>(static_cast<double>(largest) +
                                       std::log(static_cast<double>(sum)));
  }
}

// The same for every cache type, but Ops keeps the passes apart.
template <class Ops>
void MergeStateRows(const MergeStatesArgs& args) {
  const ScopedFlushDenormals flush;
  const int padded = PaddedWidth(args.v_head_size);
  auto* acc = reinterpret_cast<float*>(args.scratch);
  float* from = acc + padded;
  std::memset(from, 0, static_cast<size_t>(padded) * sizeof(float));
  for (int64_t row = args.row_begin; row < args.row_end; ++row) {
    MergeStateRow(args, row, acc, from);
  }
}

}  // namespace VARLANE_NS
}  // namespace varlane
