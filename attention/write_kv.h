// Writing a step's K/V into the cache by slot mapping.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_WRITE_KV_H_
#define VARLANE_ATTENTION_WRITE_KV_H_

#include <cstdint>
#include <span>

#include "kernels/kernel_table.h"
#include "varlane/attention.h"
#include "varlane/runtime.h"

namespace varlane {

// One write: Begin, then the body for each threadgroup.
class KvWrite {
 public:
  // Errors: as Attention::WriteKv. `slot_mapping` stays the caller's.
  Status Begin(const KernelTable& table, const KvView& kv, int layer,
               const ConstTensor& k, const ConstTensor& v,
               std::span<const int64_t> slot_mapping);
  int64_t num_threadgroups() const noexcept;
  void operator()(const Threadgroup& group) const;

 private:
  void WriteToken(int64_t token, int head) const;

  const KvKernels* kernels_ = nullptr;
  KvView kv_;
  int layer_ = 0;
  ConstTensor k_;
  ConstTensor v_;
  std::span<const int64_t> slot_mapping_;
};

// Errors: as Attention::WriteKv.
Status WriteKvTokens(Runtime* runtime, const KernelTable& table,
                     const KvView& kv, int layer, const ConstTensor& k,
                     const ConstTensor& v,
                     std::span<const int64_t> slot_mapping);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_WRITE_KV_H_
