// SPDX-License-Identifier: Apache-2.0

#include "varlane/merge_states.h"

#include <algorithm>
#include <new>
#include <vector>

#include "attention/kernels_of.h"
#include "base/check.h"
#include "base/math.h"
#include "kernels/kernel_table.h"
#include "varlane/kv_layout.h"

namespace varlane {
namespace {

// Rows of a threadgroup: small enough to share out, large enough to pay.
constexpr int64_t kRowsPerGroup = 32;

bool IsKnown(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

Status ValidateRows(const std::string& name, const void* out, DType dtype,
                    int64_t row_stride, int64_t num_rows, int v_head_size) {
  VARLANE_REQUIRE_ARG(IsKnown(dtype), name,
                      ".dtype = ", static_cast<int>(dtype),
                      ", must be f32, bf16 or f16");
  VARLANE_REQUIRE_ARG(row_stride == 0 || row_stride >= v_head_size, name,
                      ".row_stride = ", row_stride,
                      ", must be 0 or at least v_head_size = ", v_head_size);
  VARLANE_REQUIRE_ARG(num_rows == 0 || out != nullptr, name, ".out is null");
  return {};
}

Status Validate(Runtime* runtime, std::span<const AttentionState> states,
                int64_t num_rows, int v_head_size, const MergedState& merged) {
  VARLANE_REQUIRE_ARG(runtime != nullptr, "runtime is null");
  VARLANE_REQUIRE_ARG(!states.empty(), "states is empty, must have at least 1");
  VARLANE_REQUIRE_ARG(num_rows >= 0, "num_rows = ", num_rows,
                      ", must not be negative");
  VARLANE_REQUIRE_ARG(v_head_size >= 1 && v_head_size <= kMaxHeadSize,
                      "v_head_size = ", v_head_size, ", must be in [1, ",
                      kMaxHeadSize, "]");
  for (size_t i = 0; i < states.size(); ++i) {
    const AttentionState& state = states[i];
    VARLANE_RETURN_IF_ERROR(ValidateRows(StrCat("states[", i, "]"), state.out,
                                         state.dtype, state.row_stride,
                                         num_rows, v_head_size));
    VARLANE_REQUIRE_ARG(num_rows == 0 || state.lse != nullptr, "states[", i,
                        "].lse is null");
  }
  return ValidateRows("merged", merged.out, merged.dtype, merged.row_stride,
                      num_rows, v_head_size);
}

}  // namespace

Status MergeStates(Runtime* runtime, std::span<const AttentionState> states,
                   int64_t num_rows, int v_head_size,
                   const MergedState& merged) {
  VARLANE_RETURN_IF_ERROR(
      Validate(runtime, states, num_rows, v_head_size, merged));
  const Result<const KernelTable*> table = KernelsOf(*runtime);
  if (!table.ok()) return table.status();
  const KvKernels& kernels = *table.value()->f32;

  std::vector<StateRows> rows;
  try {
    rows.reserve(states.size());
  } catch (const std::bad_alloc&) {
    return {StatusCode::kResourceExhausted,
            StrCat("no memory to merge ", states.size(), " states")};
  }
  const auto stride = [v_head_size](int64_t given) {
    return given != 0 ? given : int64_t{v_head_size};
  };
  for (const AttentionState& state : states) {
    rows.push_back(
        {state.out, state.dtype, stride(state.row_stride), state.lse});
  }
  const auto body = [&](const Threadgroup& tg) {
    MergeStatesArgs args;
    args.states = rows.data();
    args.num_states = static_cast<int64_t>(rows.size());
    args.row_begin = tg.index() * kRowsPerGroup;
    args.row_end = std::min(num_rows, args.row_begin + kRowsPerGroup);
    args.v_head_size = v_head_size;
    args.out = merged.out;
    args.out_dtype = merged.dtype;
    args.out_stride = stride(merged.row_stride);
    args.lse = merged.lse;
    args.scratch = tg.scratch().data();
    kernels.merge_states(args);
  };
  LaunchOptions options;
  options.scratch_bytes = MergeStatesScratchBytes(v_head_size);
  return runtime->Launch(Grid{DivCeil(num_rows, kRowsPerGroup)}, body, options);
}

}  // namespace varlane
