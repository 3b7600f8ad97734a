// The only door to the kernels: tables of function pointers, one per target.
//
// No Highway here, so everybody may include it. Tables are constant data: no
// per-target function runs before the CPU was asked.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KERNELS_KERNEL_TABLE_H_
#define VARLANE_KERNELS_KERNEL_TABLE_H_

#include <cstddef>
#include <span>
#include <string_view>

#include "kernels/args.h"
#include "kernels/limits.h"
#include "varlane/dtype.h"

namespace varlane {

// Kernels of one KV dtype. All noexcept in effect: they cannot fail.
struct KvKernels {
  // Any number of rows over a range of partitions. Few rows (decode) stream
  // K/V once and fetch close ahead; many keep a partition in L2.
  void (*attend)(const AttendArgs& args);
  void (*merge)(const MergeArgs& args);
  void (*write)(const WriteArgs& args);
  // Bytes of AttendArgs::scratch for that many rows.
  size_t (*attend_scratch_bytes)(int rows, int head_size, int v_head_size);
  // Finished rows of disjoint key sets; does not depend on the cache's dtype.
  void (*merge_states)(const MergeStatesArgs& args);
};

// All tables give the same bits.
struct KernelTable {
  const char* name;  // "AVX3_ZEN5", "AVX3_BF16", "AVX3", "AVX2", "SSE4", ...
  const KvKernels* f32;
  const KvKernels* bf16;
  const KvKernels* f16;
  const LimitKernels* limits;

  const KvKernels& For(DType dtype) const {
    return dtype == DType::kF32 ? *f32 : dtype == DType::kBF16 ? *bf16 : *f16;
  }
};

// Compiled in and runnable on this CPU, best first but for what comes last,
// tables of other CPUs: AVX3_ZEN5, AVX3_BF16 where its dot product is no gain,
// AVX3_ZEN4 where there is none; never empty. Thread-safe.
std::span<const KernelTable* const> SupportedKernels();

// The best for "", else the one of that name; null where there is none.
const KernelTable* FindKernels(std::string_view name);

}  // namespace varlane

#endif  // VARLANE_KERNELS_KERNEL_TABLE_H_
