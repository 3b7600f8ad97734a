// SPDX-License-Identifier: Apache-2.0

#include "memory/block_memory.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>

#include "base/check.h"
#include "base/math.h"
#include "base/os_calls.h"
#include "base/strings.h"

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
  const int64_t num_ranges = runtime->num_nodes();
  const int64_t num_shards = options.shard_blocks ? num_ranges : 1;
  const int64_t num_nodes = num_ranges / num_shards;
  const int64_t part_bytes = options.block_bytes / num_shards;
  // A node's range starts on a huge page. Of the blocks that fill huge pages
  // without a rest a node takes a multiple.
  const int64_t unit =
      num_nodes == 1 ? 1
                     : kHugePageBytes / std::gcd(kHugePageBytes, part_bytes);
  const int64_t blocks_per_node =
      RoundUp(DivCeil(options.max_blocks, num_nodes), unit);
  const auto range_bytes = CheckedMul(part_bytes, blocks_per_node);
  const auto bytes = CheckedMul(range_bytes.value_or(0), num_ranges);
  VARLANE_REQUIRE_ARG(
      range_bytes && bytes &&
          CheckedAdd(*bytes, (num_shards + 1) * kMaxSlabBytes).has_value() &&
          blocks_per_node * num_nodes <= std::numeric_limits<BlockId>::max(),
      "max_blocks = ", options.max_blocks, " blocks of ", options.block_bytes,
      " bytes on ", num_ranges,
      " NUMA nodes overflow 64 bits, or their ids 32");
  std::unique_ptr<BlockMemory> memory(new BlockMemory(options, runtime));
  const int64_t slab_part_bytes = SlabBytesFor(*bytes / num_shards);
  memory->num_shards_ = static_cast<int>(num_shards);
  memory->slab_part_bytes_ = slab_part_bytes;
  memory->stats_.slab_bytes = slab_part_bytes * num_shards;
  memory->blocks_per_node_ = blocks_per_node;
  memory->range_bytes_ =
      num_nodes == 1 ? RoundUp(*range_bytes, slab_part_bytes) : *range_bytes;
  const int64_t reserved_bytes = memory->range_bytes_ * num_ranges;
  const auto max_slabs =
      static_cast<size_t>(DivCeil(memory->range_bytes_, slab_part_bytes));
  memory->nodes_.resize(static_cast<size_t>(num_nodes));
  for (Node& node : memory->nodes_) {
    node.pages.resize(max_slabs, HugePages::kOff);
    node.locked.resize(max_slabs, 0);
  }
  memory->before_.resize(static_cast<size_t>(num_nodes));
  memory->even_.resize(static_cast<size_t>(num_nodes));
  // Aligning to huge pages takes up to one more while mapping.
  VARLANE_RETURN_IF_ERROR(memory->CheckRoom(
      {.address = reserved_bytes + kHugePageBytes}, options.max_blocks));
  Result<std::byte*> base = ReserveAddressSpace(reserved_bytes, kHugePageBytes);
  VARLANE_RETURN_IF_ERROR(base.status());
  memory->base_ = *base;
  memory->stats_.reserved_bytes = reserved_bytes;
  if (options.backing == MemoryBacking::kMemfd) {
    const Result<int> fd = CreateMemoryFile(reserved_bytes);
    VARLANE_RETURN_IF_ERROR(fd.status());
    memory->fd_ = *fd;
  }
  return memory;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory for the KV pool's bookkeeping");
}

BlockMemory::~BlockMemory() {
  ReleaseAddressSpace(base_, stats_.reserved_bytes);
  if (fd_ >= 0) (void)os::Close(fd_);
}

// --- arithmetic --------------------------------------------------------------

BlockMemory::Range BlockMemory::SlabRange(int range, int64_t begin,
                                          int64_t end) const noexcept {
  const int64_t from = begin * slab_part_bytes_;
  const int64_t to = std::min(end * slab_part_bytes_, range_bytes_);
  return {base_ + range * range_bytes_ + from, std::max<int64_t>(0, to - from)};
}

int64_t BlockMemory::BytesOf(int node, int64_t begin,
                             int64_t end) const noexcept {
  return SlabRange(node, begin, end).bytes * num_shards_;
}

// One arena may have all of the machine's nodes, or a part of one, and that of
// a described machine is on none of this one's.
int BlockMemory::SystemNode(int range) const noexcept {
  const Topology& topology = runtime_->topology();
  const int memory = runtime_->MemoryOfNode(range);
  const bool is_placed =
      topology.is_this_machine && topology.nodes.size() > 1 && memory >= 0;
  return is_placed ? topology.nodes[static_cast<size_t>(memory)].os_index : -1;
}

PagePlacement BlockMemory::QueryPages(int memory_node,
                                      int64_t bytes) const noexcept {
  if (!runtime_->topology().is_this_machine) return {.unknown = bytes};
  return QueryPlacement(base_ + memory_node * range_bytes_, bytes,
                        SystemNode(memory_node));
}

int64_t BlockMemory::SlabsOf(int64_t num_blocks) const noexcept {
  return DivCeil(num_blocks * options_.block_bytes, stats_.slab_bytes);
}

int64_t BlockMemory::SlabBytesOf(int64_t num_blocks) const noexcept {
  return BytesOf(0, 0, SlabsOf(num_blocks));
}

int64_t BlockMemory::committed_bytes(int node) const noexcept {
  return BytesOf(node, 0, nodes_[static_cast<size_t>(node)].committed);
}

int64_t BlockMemory::committed_blocks(int node) const noexcept {
  return std::min(blocks_per_node_,
                  committed_bytes(node) / options_.block_bytes);
}

int64_t BlockMemory::total_committed_bytes() const noexcept {
  int64_t bytes = 0;
  for (int node = 0; node < num_nodes(); ++node) bytes += committed_bytes(node);
  return bytes;
}

int64_t BlockMemory::BlocksIn(int64_t bytes,
                              std::span<int64_t> num_blocks) const noexcept {
  const int64_t slabs = bytes / stats_.slab_bytes;
  int64_t left = options_.max_blocks;
  for (int node = 0; node < num_nodes(); ++node) {
    const int64_t share =
        slabs / num_nodes() + (node < slabs % num_nodes() ? 1 : 0);
    const int64_t fitting =
        std::min({left, blocks_per_node_,
                  BytesOf(node, 0, share) / options_.block_bytes});
    if (!num_blocks.empty()) num_blocks[static_cast<size_t>(node)] = fitting;
    left -= fitting;
  }
  return options_.max_blocks - left;
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
                       : total_committed_bytes() + binding_room;
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

// --- committing --------------------------------------------------------------

Status BlockMemory::Commit(int64_t num_blocks) {
  for (int node = 0; node < num_nodes(); ++node) {
    even_[static_cast<size_t>(node)] =
        num_blocks / num_nodes() + (node < num_blocks % num_nodes() ? 1 : 0);
  }
  return Commit(even_);
}

Status BlockMemory::Commit(std::span<const int64_t> num_blocks) {
  int64_t total = 0;
  int64_t bytes = 0;
  for (int node = 0; node < num_nodes(); ++node) {
    const auto at = static_cast<size_t>(node);
    VARLANE_DCHECK(num_blocks[at] <= blocks_per_node_);
    before_[at] = nodes_[at].committed;
    total += num_blocks[at];
    bytes += BytesOf(node, before_[at], SlabsOf(num_blocks[at]));
  }
  if (bytes == 0) return {};
  // Refuse at once what cannot end well, before half of it is touched. Explicit
  // huge pages come from a pool of their own that is in no limit but
  // RLIMIT_DATA; slabs that do not get any are checked one by one.
  const bool may_be_explicit = options_.huge_pages == HugePages::kExplicit &&
                               options_.backing == MemoryBacking::kAnonymous;
  const bool is_data = options_.backing == MemoryBacking::kAnonymous;
  VARLANE_RETURN_IF_ERROR(CheckRoom(
      {.data = is_data ? bytes : 0, .touched = may_be_explicit ? 0 : bytes},
      total));
  Status status;
  try {
    status = CommitSlabs(num_blocks, total);
    if (status.ok()) UpdateStats();
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kResourceExhausted,
                    "no memory left to read the limits");
  }
  has_room_ = false;  // it may have failed where there was
  if (status.ok()) return status;
  for (int node = 0; node < num_nodes(); ++node) {
    const auto at = static_cast<size_t>(node);
    // The slab whose commit failed included. Fails only for want of a map
    // entry: the pages then stay ours, unused, until the reservation ends or a
    // later growth takes them up again.
    (void)Decommit(node, before_[at], nodes_[at].committed + 1);
    nodes_[at].committed = before_[at];
  }
  return status;
}

Status BlockMemory::CommitSlabs(std::span<const int64_t> num_blocks,
                                int64_t total) {
  for (int node = 0; node < num_nodes(); ++node) {
    const auto at = static_cast<size_t>(node);
    const int64_t end = SlabsOf(num_blocks[at]);
    while (nodes_[at].committed < end) {
      VARLANE_RETURN_IF_ERROR(
          CommitSlab(node, total, nodes_[at].committed + 1 < end));
    }
  }
  return {};
}

// Commits the node's next slab. With `another` to come after it the limits for
// that are read meanwhile.
Status BlockMemory::CommitSlab(int node, int64_t num_blocks, bool another) {
  Node& owner = nodes_[static_cast<size_t>(node)];
  const int64_t slab = owner.committed;
  owner.pages[static_cast<size_t>(slab)] = HugePages::kExplicit;
  owner.locked[static_cast<size_t>(slab)] = 0;
  for (int shard = 0; shard < num_shards_; ++shard) {
    VARLANE_RETURN_IF_ERROR(
        CommitPart(node + shard, slab, num_blocks, another, &owner));
  }
  owner.committed = slab + 1;
  return {};
}

Status BlockMemory::CommitPart(int range, int64_t slab, int64_t num_blocks,
                               bool another, Node* owner) {
  const auto at = static_cast<size_t>(slab);
  const auto [data, bytes] = SlabRange(range, slab, slab + 1);
  const Result<HugePages> pages =
      fd_ >= 0 ? CommitFileMemory(data, bytes, fd_, data - base_,
                                  options_.huge_pages)
               : CommitMemory(data, bytes, options_.huge_pages);
  VARLANE_RETURN_IF_ERROR(pages.status());
  owner->pages[at] = std::min(owner->pages[at], *pages);
  if (*pages != HugePages::kExplicit && !has_room_) {
    VARLANE_RETURN_IF_ERROR(CheckRoom({.touched = bytes}, num_blocks));
  }
  has_room_ = false;
  if (const int os_node = SystemNode(range); os_node >= 0) {
    const int error = PreferNode(data, bytes, os_node);
    if (error != 0) stats_.mempolicy_error = error;
  }
  if (memory_nodes() > 1) {
    VARLANE_RETURN_IF_ERROR(PopulateOnNode(range, {data, bytes}));
  } else {
    const int64_t next =
        another ? SlabRange(range, slab + 1, slab + 2).bytes : 0;
    VARLANE_RETURN_IF_ERROR(Populate({data, bytes}, next));
  }
  return LockPart({data, bytes}, &owner->locked[at]);
}

// False also where that cannot be found out now.
bool BlockMemory::HasRoomFor(int64_t bytes) const noexcept try {
  return CheckRoom({.touched = bytes}, 0).ok();
} catch (const std::bad_alloc&) {
  return false;
}

// By one worker of the right node, since workers of others would help a launch,
// and the first touch decides.
Status BlockMemory::PopulateOnNode(int range, const Range& part) {
  Status populated;
  VARLANE_RETURN_IF_ERROR(runtime_->RunOnNode(
      range, [&] { populated = PopulateMemory(part.data, part.bytes); }));
  return populated;
}

// By all workers, piece by piece: zeroing is what a commit takes its time for.
// One of them first finds out whether there is room for `next_bytes` after it;
// what is still to be populated counts in full.
Status BlockMemory::Populate(const Range& part, int64_t next_bytes) {
  std::mutex mutex;
  Status populated;
  const int64_t checks = next_bytes > 0 && options_.check_limits ? 1 : 0;
  const auto body = [&](const Threadgroup& piece) {
    if (piece.index() < checks) {
      has_room_ = HasRoomFor(part.bytes + next_bytes);
      return;
    }
    const int64_t at = (piece.index() - checks) * kHugePageBytes;
    const Status status = PopulateMemory(
        part.data + at, std::min(kHugePageBytes, part.bytes - at));
    if (status.ok()) return;
    const std::lock_guard lock(mutex);
    populated = status;
  };
  VARLANE_RETURN_IF_ERROR(
      runtime_->Launch(Grid{checks + DivCeil(part.bytes, kHugePageBytes)}, body,
                       {.name = "populate"}));
  return populated;
}

Status BlockMemory::LockPart(const Range& part, int64_t* locked) {
  if (options_.lock == MemoryLock::kOff) return {};
  const int error = LockMemory(part.data, part.bytes);
  if (error == 0) {
    *locked += part.bytes;
    return {};
  }
  stats_.lock_error = error;
  VARLANE_REQUIRE(
      options_.lock != MemoryLock::kRequired, StatusCode::kResourceExhausted,
      "lock = required, but mlock "
      "of ",
      FormatBytes(part.bytes), " after ", FormatBytes(stats_.locked_bytes),
      " failed: ", ErrnoText(error), "; see ulimit -l (RLIMIT_MEMLOCK)");
  return {};
}

Status BlockMemory::Decommit(int node, int64_t begin, int64_t end) {
  for (int shard = 0; shard < num_shards_; ++shard) {
    const auto [data, bytes] = SlabRange(node + shard, begin, end);
    if (bytes == 0) continue;
    VARLANE_RETURN_IF_ERROR(
        fd_ >= 0 ? DecommitFileMemory(data, bytes, fd_, data - base_)
                 : DecommitMemory(data, bytes));
  }
  return {};
}

Status BlockMemory::Release(std::span<const int64_t> num_blocks) {
  Status status;
  int64_t released = 0;
  for (int node = 0; node < num_nodes() && status.ok(); ++node) {
    const auto at = static_cast<size_t>(node);
    const int64_t end = nodes_[at].committed;
    before_[at] = end;
    const int64_t begin = std::min(end, SlabsOf(num_blocks[at]));
    status = Decommit(node, begin, end);
    if (!status.ok()) {
      // The node's own slabs are all there still, unless shards before the one
      // that failed gave their parts back; what is gone is taken again.
      if (num_shards_ > 1) nodes_[at].committed = begin;
      for (int other = 0; other <= node; ++other) {
        const auto earlier = static_cast<size_t>(other);
        Status again;
        while (again.ok() && nodes_[earlier].committed < before_[earlier]) {
          again = CommitSlab(other, 0, false);
        }
      }
      released = 0;
      break;
    }
    released += end - begin;
    nodes_[at].ever = std::max(nodes_[at].ever, end);
    nodes_[at].committed = begin;
  }
  stats_.slabs_released += released;
  CountSlabs();
  stats_.huge_page_bytes =
      std::min(stats_.huge_page_bytes, stats_.committed_bytes);
  return status;
}

void BlockMemory::CountSlabs() noexcept {
  stats_.num_slabs = 0;
  stats_.locked_bytes = 0;
  stats_.committed_bytes = total_committed_bytes();
  stats_.huge_pages =
      stats_.committed_bytes == 0 ? HugePages::kOff : HugePages::kExplicit;
  for (int node = 0; node < num_nodes(); ++node) {
    const Node& owner = nodes_[static_cast<size_t>(node)];
    stats_.num_slabs += owner.committed;
    for (int64_t slab = 0; slab < owner.committed; ++slab) {
      const auto at = static_cast<size_t>(slab);
      stats_.huge_pages = std::min(stats_.huge_pages, owner.pages[at]);
      stats_.locked_bytes += owner.locked[at];
    }
  }
}

// After a commit. Asked for is not given: the kernel may have had no whole page
// at hand. Reads files and may throw, so that stands before any change.
void BlockMemory::UpdateStats() {
  int64_t huge_page_bytes = 0;
  for (int node = 0; node < num_nodes(); ++node) {
    const int64_t slabs = nodes_[static_cast<size_t>(node)].committed;
    for (int shard = 0; shard < num_shards_; ++shard) {
      const auto [data, bytes] = SlabRange(node + shard, 0, slabs);
      const Result<int64_t> given = HugePageBytes(data, bytes);
      huge_page_bytes += given.ok() ? *given : 0;
    }
  }
  stats_.huge_page_bytes = huge_page_bytes;
  for (size_t at = 0; at < nodes_.size(); ++at) {
    const int64_t known = std::min(nodes_[at].committed, nodes_[at].ever);
    stats_.slabs_regained += std::max<int64_t>(0, known - before_[at]);
  }
  CountSlabs();
}

}  // namespace varlane
