// What the refusal of a block id says. Layer 3.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_KV_BLOCKS_H_
#define VARLANE_ATTENTION_KV_BLOCKS_H_

#include <cstdint>
#include <string>

#include "base/strings.h"
#include "varlane/kv_layout.h"

namespace varlane {

// Why the view does not contain `block`, to stand behind "but": "the pool has
// 4096 blocks", or, where the id falls between two NUMA nodes', "node 0 of the
// pool ends at 40". `whole` says what has the blocks: "pool", "view".
inline std::string WhereBlocksEnd(const KvView& kv, int64_t block,
                                  const char* whole) noexcept {
  if (block < 0 || block >= kv.num_blocks || kv.node_blocks == nullptr) {
    return MessageCat("the ", whole, " has ", kv.num_blocks, " blocks");
  }
  return MessageCat("node ", block / kv.node_stride, " of the pool ends at ",
                    kv.node_end(block));
}

}  // namespace varlane

#endif  // VARLANE_ATTENTION_KV_BLOCKS_H_
