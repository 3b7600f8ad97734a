// SPDX-License-Identifier: Apache-2.0

#include "memory/block_memory.h"

#include <algorithm>
#include <bit>
#include <new>
#include <optional>

#include "base/check.h"
#include "base/math.h"
#include "base/strings.h"
#include "runtime/numa_memory.h"

namespace varlane {
namespace {

constexpr int64_t kMaxSlabBytes = int64_t{64} << 20;

}  // namespace

int64_t SlabBytesFor(int64_t pool_bytes) {
  const auto wanted = static_cast<uint64_t>(
      std::clamp(pool_bytes / 64, kHugePageBytes, kMaxSlabBytes));
  return static_cast<int64_t>(std::bit_floor(wanted));
}

int64_t UntouchedBytes(const MemoryLimit& limit) {
  return limit.reserve_bytes / 2;
}

BlockMemory::BlockMemory(const BlockMemoryOptions& options, Runtime* runtime)
    : options_(options), runtime_(runtime) {}

Result<std::unique_ptr<BlockMemory>> BlockMemory::Create(
    const BlockMemoryOptions& options, Runtime* runtime) try {
  const auto bytes = CheckedMul(options.block_bytes, options.max_blocks);
  VARLANE_REQUIRE_ARG(
      bytes && CheckedAdd(*bytes, 2 * kMaxSlabBytes).has_value(),
      "max_blocks = ", options.max_blocks, " blocks of ", options.block_bytes,
      " bytes overflow 64 bits");
  std::unique_ptr<BlockMemory> memory(new BlockMemory(options, runtime));
  const int64_t slab_bytes = SlabBytesFor(*bytes);
  const int64_t reserved_bytes = RoundUp(*bytes, slab_bytes);
  const auto max_slabs = static_cast<size_t>(reserved_bytes / slab_bytes);
  memory->node_of_slab_.resize(max_slabs, 0);
  memory->pages_of_slab_.resize(max_slabs, HugePages::kOff);
  memory->stats_.slab_bytes = slab_bytes;
  // Aligning to huge pages takes up to one more while mapping.
  VARLANE_RETURN_IF_ERROR(memory->CheckRoom(
      {.address = reserved_bytes + kHugePageBytes}, options.max_blocks));
  Result<std::byte*> base = ReserveAddressSpace(reserved_bytes, kHugePageBytes);
  VARLANE_RETURN_IF_ERROR(base.status());
  memory->base_ = *base;
  memory->stats_.reserved_bytes = reserved_bytes;
  return memory;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory for the KV pool's bookkeeping");
}

BlockMemory::~BlockMemory() {
  ReleaseAddressSpace(base_, stats_.reserved_bytes);
}

int BlockMemory::NodeOfBlock(int64_t block) const noexcept {
  const int64_t slab = block * options_.block_bytes / stats_.slab_bytes;
  return node_of_slab_[static_cast<size_t>(slab)];
}

Status BlockMemory::CheckRoom(const Need& need, int64_t num_blocks) const {
  if (!options_.check_limits) return {};
  const Result<MemoryLimits> limits = MemoryLimits::Detect();
  VARLANE_RETURN_IF_ERROR(limits.status());
  const MemoryLimit* binding = nullptr;
  int64_t binding_wanted = 0;
  int64_t binding_room = 0;
  for (const MemoryLimit& limit : limits->limits) {
    const int64_t wanted = limit.name == "RLIMIT_AS"     ? need.address
                           : limit.name == "RLIMIT_DATA" ? need.data
                                                         : need.touched;
    const int64_t room =
        std::max<int64_t>(0, limit.available_bytes - UntouchedBytes(limit));
    if (wanted <= room) continue;
    if (binding != nullptr && binding_room <= room) continue;
    binding = &limit;
    binding_wanted = wanted;
    binding_room = room;
  }
  if (binding == nullptr) return {};
  // Address space is taken for the whole pool at once, the rest by slabs.
  const int64_t fitting_bytes =
      need.address > 0 ? std::max<int64_t>(0, binding_room - kHugePageBytes)
                       : num_committed_ * stats_.slab_bytes + binding_room;
  const int64_t fitting_blocks =
      RoundDown(fitting_bytes, stats_.slab_bytes) / options_.block_bytes;
  return {
      StatusCode::kResourceExhausted,
      StrCat("the KV pool needs ", FormatBytes(binding_wanted),
             " more to have ", num_blocks, " blocks of ",
             FormatBytes(options_.block_bytes), ", but ", binding->name,
             " (limit ", FormatBytes(binding->limit_bytes), ") has ",
             FormatBytes(binding->available_bytes), " available, ",
             FormatBytes(UntouchedBytes(*binding)),
             " of it kept in reserve: ", fitting_blocks, " blocks would fit")};
}

Status BlockMemory::Commit(int64_t num_blocks) {
  VARLANE_DCHECK(num_blocks <= options_.max_blocks);
  const int64_t begin = num_committed_;
  const int64_t end =
      DivCeil(num_blocks * options_.block_bytes, stats_.slab_bytes);
  if (end <= begin) return {};
  // Refuse at once what cannot end well, before half of it is touched. Explicit
  // huge pages come from a pool of their own that is in no limit but
  // RLIMIT_DATA; slabs that do not get any are checked one by one.
  const int64_t bytes = (end - begin) * stats_.slab_bytes;
  const bool may_be_explicit = options_.huge_pages == HugePages::kExplicit;
  VARLANE_RETURN_IF_ERROR(CheckRoom(
      {.data = bytes, .touched = may_be_explicit ? 0 : bytes}, num_blocks));
  Status status;
  try {
    status = CommitSlabs(end, num_blocks);
    if (status.ok()) UpdateStats();
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kResourceExhausted,
                    "no memory left to read the limits");
  }
  if (!status.ok()) DecommitFrom(begin);
  return status;
}

// Each node's share of all slabs is the same to within one, and one range of
// what is new. Earlier calls left every node at or below its new share.
Status BlockMemory::CommitSlabs(int64_t end, int64_t num_blocks) {
  const int num_nodes = runtime_->num_nodes();
  const int64_t begin = num_committed_;
  for (int node = 0; node < num_nodes; ++node) {
    const auto share = [&](int64_t slabs) {
      return slabs / num_nodes + (node < slabs % num_nodes ? 1 : 0);
    };
    for (int64_t n = share(end) - share(begin); n > 0; --n) {
      VARLANE_RETURN_IF_ERROR(CommitSlab(num_committed_, node, num_blocks));
    }
  }
  VARLANE_ENSURE(num_committed_ == end, "committed ", num_committed_,
                 " slabs of ", end);
  return {};
}

Status BlockMemory::CommitSlab(int64_t slab, int node, int64_t num_blocks) {
  const int64_t bytes = stats_.slab_bytes;
  std::byte* const data = base_ + slab * bytes;
  const Result<HugePages> pages =
      CommitMemory(data, bytes, options_.huge_pages);
  VARLANE_RETURN_IF_ERROR(pages.status());
  pages_of_slab_[static_cast<size_t>(slab)] = *pages;
  node_of_slab_[static_cast<size_t>(slab)] = node;
  if (*pages != HugePages::kExplicit) {
    VARLANE_RETURN_IF_ERROR(CheckRoom({.touched = bytes}, num_blocks));
  }
  Status populated;
  VARLANE_RETURN_IF_ERROR(runtime_->RunOnNode(
      node, [&] { populated = PopulateMemory(data, bytes); }));
  VARLANE_RETURN_IF_ERROR(populated);
  num_committed_ = slab + 1;
  return {};
}

// Gives back the slabs from `slab` on, the one whose commit failed included.
void BlockMemory::DecommitFrom(int64_t slab) noexcept {
  const int64_t begin = slab * stats_.slab_bytes;
  const int64_t end =
      std::min((num_committed_ + 1) * stats_.slab_bytes, stats_.reserved_bytes);
  // Fails only for want of a map entry. The pages then stay ours, unused, until
  // the reservation ends or a later growth takes them up again.
  if (begin < end) (void)DecommitMemory(base_ + begin, end - begin);
  num_committed_ = slab;
}

void BlockMemory::UpdateStats() {
  const int64_t bytes = num_committed_ * stats_.slab_bytes;
  // Asked for is not given: the kernel may have had no whole page at hand. This
  // reads files and may throw, so it stands before any change.
  const Result<int64_t> given = HugePageBytes(base_, bytes);
  stats_.huge_page_bytes = given.ok() ? *given : 0;
  stats_.committed_bytes = bytes;
  stats_.num_slabs = num_committed_;
  stats_.huge_pages = *std::min_element(
      pages_of_slab_.begin(), pages_of_slab_.begin() + num_committed_);
}

}  // namespace varlane
