// SPDX-License-Identifier: Apache-2.0

#include "memory/block_parts.h"

#include <cstring>

namespace varlane {
namespace {

// Calls body(place, at, bytes) for every run of bytes that stand together both
// in the view, at `place`, and in a packed block, `at` bytes from its begin.
template <typename Body>
void ForRuns(const KvView& view, int64_t block, const Body& body) {
  const KvLayout& layout = view.layout;
  if (view.num_shards == 1) {
    body(view.part(block, 0), int64_t{0}, layout.block_bytes());
    return;
  }
  const int heads = view.shard_heads();
  for (int layer = 0; layer < layout.num_layers; ++layer) {
    const int64_t k = layer * layout.layer_bytes();
    const int64_t v = k + layout.num_kv_heads * layout.k_head_bytes();
    for (int head = 0; head < layout.num_kv_heads; head += heads) {
      body(view.k(block, layer, head), k + head * layout.k_head_bytes(),
           heads * layout.k_head_bytes());
      body(view.v(block, layer, head), v + head * layout.v_head_bytes(),
           heads * layout.v_head_bytes());
    }
  }
}

}  // namespace

void PackBlock(const KvView& view, int64_t block, std::byte* to) noexcept {
  ForRuns(view, block, [to](const std::byte* place, int64_t at, int64_t bytes) {
    std::memcpy(to + at, place, static_cast<size_t>(bytes));
  });
}

void UnpackBlock(const std::byte* from, const KvView& view,
                 int64_t block) noexcept {
  ForRuns(view, block, [from](std::byte* place, int64_t at, int64_t bytes) {
    std::memcpy(place, from + at, static_cast<size_t>(bytes));
  });
}

}  // namespace varlane
