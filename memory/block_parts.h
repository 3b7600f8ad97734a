// A block as one range of bytes, in KvLayout's order, whatever its view is
// sharded into: what leaves a pool (sessions, swap) and comes back to another.
//
// Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_BLOCK_PARTS_H_
#define VARLANE_MEMORY_BLOCK_PARTS_H_

#include <cstddef>
#include <cstdint>

#include "varlane/kv_layout.h"

namespace varlane {

// Copy a block to and from view.layout.block_bytes() bytes.
// Requires: an id of the view. Threads: safe on different blocks.
void PackBlock(const KvView& view, int64_t block, std::byte* to) noexcept;
void UnpackBlock(const std::byte* from, const KvView& view,
                 int64_t block) noexcept;

}  // namespace varlane

#endif  // VARLANE_MEMORY_BLOCK_PARTS_H_
