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

// Errors: as Attention::WriteKv.
Status WriteKvTokens(Runtime* runtime, const KernelTable& table,
                     const KvView& kv, int layer, const ConstTensor& k,
                     const ConstTensor& v,
                     std::span<const int64_t> slot_mapping);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_WRITE_KV_H_
