// KvPool: creation, and the public face of what stands in its other files.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "memory/kv_pool_impl.h"

namespace varlane {

Status NoSuchSequence(SeqId seq) {
  return {StatusCode::kNotFound,
          MessageCat("seq = ", seq, ", but the pool has no such sequence")};
}

Status NoHeapFor(const char* what) {
  return {StatusCode::kResourceExhausted,
          MessageCat("no memory for ", what, " (not KV: the process's heap)")};
}

namespace {

Status Validate(const KvPoolOptions& options, const Runtime* runtime) {
  constexpr int64_t kMost = std::numeric_limits<BlockId>::max();
  VARLANE_REQUIRE_ARG(runtime != nullptr, "runtime is null");
  VARLANE_RETURN_IF_ERROR(options.layout.Validate());
  VARLANE_REQUIRE_ARG(
      !options.shard_heads ||
          options.layout.num_kv_heads % runtime->num_nodes() == 0,
      "num_kv_heads = ", options.layout.num_kv_heads,
      ", but with shard_heads it must be a multiple of the runtime's ",
      runtime->num_nodes(), " NUMA nodes");
  VARLANE_REQUIRE_ARG(options.num_blocks >= 1 && options.num_blocks <= kMost,
                      "num_blocks = ", options.num_blocks, ", must be in [1, ",
                      kMost, "]");
  VARLANE_REQUIRE_ARG(
      options.max_blocks == 0 || (options.max_blocks >= options.num_blocks &&
                                  options.max_blocks <= kMost),
      "max_blocks = ", options.max_blocks,
      ", must be 0 or in [num_blocks = ", options.num_blocks, ", ", kMost, "]");
  VARLANE_REQUIRE_ARG(options.watermark_blocks >= 0 &&
                          options.watermark_blocks < options.num_blocks,
                      "watermark_blocks = ", options.watermark_blocks,
                      ", must be in [0, num_blocks = ", options.num_blocks,
                      ")");
  return {};
}

void LogMempolicy(int error) noexcept {
  Log(LogLevel::kWarning, "pool_mempolicy_refused",
      "mbind was refused: first touch alone places the KV pool's pages",
      {{"errno", int64_t{error}}});
}

// Tells of one change of capacity, when it is over and no lock is held: others
// may have changed it too meanwhile.
template <typename Pool>
class ResizeLog {
 public:
  explicit ResizeLog(const Pool& pool)
      : pool_(pool),
        before_(pool.capacity()),
        mempolicy_before_(pool.mempolicy_error()) {}

  Status Tell(Status status) const noexcept {
    TellOf(status);
    return status;
  }
  Result<KvResize> Tell(Result<KvResize> result) const noexcept {
    TellOf(result.status());
    return result;
  }

 private:
  void TellOf(const Status& status) const noexcept {
    const int64_t now = pool_.capacity();
    const int mempolicy = pool_.mempolicy_error();
    if (mempolicy_before_ == 0 && mempolicy != 0) LogMempolicy(mempolicy);
    if (!status.ok() && status.code() != StatusCode::kInvalidArgument) {
      Log(LogLevel::kWarning, "pool_resize_failed", status.message(),
          {{"code", StatusCodeName(status.code())}, {"blocks", now}});
    }
    if (now == before_ || !IsLogged(LogLevel::kInfo)) return;
    const bool has_grown = now > before_;
    Log(LogLevel::kInfo, has_grown ? "pool_grown" : "pool_shrunk",
        has_grown ? "the KV pool has more blocks"
                  : "the KV pool gave blocks back",
        {{"blocks_before", before_},
         {"blocks", now},
         {"committed_bytes", pool_.stats().committed_bytes}});
  }

  const Pool& pool_;
  int64_t before_;
  int mempolicy_before_;
};

}  // namespace

KvPool::Impl::Impl(const KvPoolOptions& options, const PrefixHashKey& key,
                   std::unique_ptr<BlockMemory> memory)
    : options_(options),
      block_bytes_(options.layout.block_bytes()),
      max_blocks_(options.max_blocks == 0 ? options.num_blocks
                                          : options.max_blocks),
      poison_(options.poison_freed),
      memory_(std::move(memory)),
      limit_bytes_(memory_->stats().reserved_bytes),
      allocator_({.num_nodes = memory_->num_nodes(),
                  .blocks_per_node = memory_->blocks_per_node(),
                  .shuffle = options.shuffle,
                  .seed = options.seed}),
      charged_to_(static_cast<size_t>(allocator_.max_blocks())),
      published_node_bytes_(static_cast<size_t>(num_nodes())),
      published_limit_(limit_bytes_) {
  for (int node = 0; node < num_nodes(); ++node) {
    const int64_t share = options.num_blocks / num_nodes() +
                          (node < options.num_blocks % num_nodes() ? 1 : 0);
    const bool grown = allocator_.Grow(node, share);
    VARLANE_DCHECK(grown);
    (void)grown;
  }
  if (options.prefix_cache) {
    prefixes_ = std::make_unique<PoolPrefixes>(
        PrefixCacheOptions{.block_size = options.layout.block_size,
                           .max_blocks = allocator_.max_blocks(),
                           .key = key},
        &allocator_);
  }
  PublishMemory();
}

// The address range may be somebody else's next.
KvPool::Impl::~Impl() {
  for (int node = 0; node < num_nodes(); ++node) {
    AllowBlocks(allocator_.FirstBlockOf(node), allocator_.capacity(node));
  }
}

void KvPool::Impl::AllowBlocks(BlockId first, int64_t count) const noexcept {
  for (int shard = 0; shard < num_shards(); ++shard) {
    BlockPoison::Allow(memory_->BlockPart(first, shard),
                       count * memory_->part_bytes());
  }
}

void KvPool::Impl::ForbidBlock(BlockId block) const noexcept {
  for (int shard = 0; shard < num_shards(); ++shard) {
    poison_.Forbid(memory_->BlockPart(block, shard), memory_->part_bytes());
  }
}

void KvPool::Impl::CopyBlock(BlockId from, BlockId to) const noexcept {
  for (int shard = 0; shard < num_shards(); ++shard) {
    std::memcpy(memory_->BlockPart(to, shard), memory_->BlockPart(from, shard),
                static_cast<size_t>(memory_->part_bytes()));
  }
}

KvView KvPool::Impl::view() const noexcept {
  KvView view = {.base = memory_->base(), .layout = options_.layout};
  const int last = num_nodes() - 1;
  view.num_blocks = allocator_.FirstBlockOf(last) + allocator_.capacity(last);
  for (int node = 0; node < last; ++node) {
    // Where the last nodes have no block at all.
    if (allocator_.capacity(node) == 0) continue;
    view.num_blocks = std::max(view.num_blocks, allocator_.FirstBlockOf(node) +
                                                    allocator_.capacity(node));
  }
  if (last > 0) {
    view.node_blocks = allocator_.capacities();
    view.node_stride = allocator_.blocks_per_node();
  }
  view.num_shards = num_shards();
  view.shard_stride = memory_->shard_stride();
  view.generation = generation_.load(std::memory_order_acquire);
  return view;
}

int64_t KvPool::Impl::available_blocks() const noexcept {
  return allocator_.free_blocks() + evictable_blocks();
}

int KvPool::Impl::NodeOfBlock(BlockId block) const noexcept {
  return allocator_.IsBlock(block) ? allocator_.NodeOf(block) : 0;
}

// --- the public face ---------------------------------------------------------

Result<std::unique_ptr<KvPool>> KvPool::Create(const KvPoolOptions& options,
                                               Runtime* runtime) try {
  VARLANE_RETURN_IF_ERROR(Validate(options, runtime));
  PrefixHashKey key = {.k0 = options.prefix_key, .k1 = ~options.prefix_key};
  if (options.prefix_cache && options.prefix_key == 0) {
    const Result<PrefixHashKey> random = PrefixHashKey::Random();
    VARLANE_RETURN_IF_ERROR(random.status());
    key = *random;
  }
  const int64_t max_blocks =
      options.max_blocks == 0 ? options.num_blocks : options.max_blocks;
  Result<std::unique_ptr<BlockMemory>> memory =
      BlockMemory::Create({.block_bytes = options.layout.block_bytes(),
                           .max_blocks = max_blocks,
                           .huge_pages = options.huge_pages,
                           .backing = options.backing,
                           .lock = options.lock,
                           .shard_blocks = options.shard_heads,
                           .check_limits = options.check_limits},
                          runtime);
  VARLANE_RETURN_IF_ERROR(memory.status());
  VARLANE_RETURN_IF_ERROR((*memory)->Commit(options.num_blocks));
  std::unique_ptr<KvPool> pool(
      new KvPool(std::make_unique<Impl>(options, key, *std::move(memory))));
  Log(LogLevel::kInfo, "pool_created", "the KV pool is ready",
      {{"blocks", options.num_blocks},
       {"max_blocks", max_blocks},
       {"block_bytes", options.layout.block_bytes()},
       {"committed_bytes", pool->stats().committed_bytes}});
  const int mempolicy = pool->impl_->mempolicy_error();
  if (mempolicy != 0) LogMempolicy(mempolicy);
  return pool;
} catch (const std::bad_alloc&) {
  return NoHeapFor("the pool's bookkeeping");
}

KvPool::KvPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvPool::~KvPool() = default;

const KvLayout& KvPool::layout() const noexcept { return impl_->layout(); }
KvView KvPool::view() const noexcept { return impl_->view(); }
int64_t KvPool::capacity_blocks() const noexcept { return impl_->capacity(); }
int64_t KvPool::free_blocks() const { return impl_->available_blocks(); }
KvPoolStats KvPool::stats() const { return impl_->stats(); }
int KvPool::num_nodes() const noexcept { return impl_->memory_nodes(); }
int KvPool::num_shards() const noexcept { return impl_->num_shards(); }
KvNodeStats KvPool::node_stats(int node) const {
  return impl_->node_stats(node);
}
KvPlacement KvPool::MeasurePlacement(int node) const {
  return impl_->MeasurePlacement(node);
}
int KvPool::memory_fd() const noexcept { return impl_->memory_fd(); }
int KvPool::NodeOfBlock(BlockId block) const noexcept {
  return impl_->NodeOfBlock(block);
}
Status KvPool::Grow(int64_t num_blocks) {
  const ResizeLog log(*impl_);
  return log.Tell(impl_->Grow(num_blocks));
}
Result<KvResize> KvPool::Shrink(int64_t num_blocks) {
  const ResizeLog log(*impl_);
  return log.Tell(impl_->Shrink(num_blocks));
}
Result<KvResize> KvPool::SetLimit(int64_t bytes) {
  const ResizeLog log(*impl_);
  return log.Tell(impl_->SetLimit(bytes));
}
int64_t KvPool::MinLimitBytes() const { return impl_->MinLimitBytes(); }
Result<KvResize> KvPool::Compact(int64_t max_moves) {
  return impl_->Compact(max_moves);
}
int64_t KvPool::EvictCached(int64_t num_blocks) {
  return impl_->EvictCached(num_blocks);
}
Result<KvResize> KvPool::GiveBack(const GiveBackOptions& options) {
  return impl_->GiveBack(options);
}
Result<KvResize> KvPool::TakeBack(int64_t bytes) {
  return impl_->TakeBack(bytes);
}
int64_t KvPool::lent_blocks() const noexcept { return impl_->lent_blocks(); }
void KvPool::AllowGrowth(bool allowed) noexcept { impl_->AllowGrowth(allowed); }
void KvPool::BeginStep() { impl_->BeginStep(); }
void KvPool::EndStep() { impl_->EndStep(); }
Status KvPool::SetTenantQuota(TenantId tenant, int64_t max_blocks) {
  return impl_->SetTenantQuota(tenant, max_blocks);
}
KvTenantStats KvPool::tenant_stats(TenantId tenant) const {
  return impl_->tenant_stats(tenant);
}
std::vector<KvTenant> KvPool::tenants() const { return impl_->tenants(); }
SeqId KvPool::CreateSequence(const SequenceOptions& options) {
  return impl_->CreateSequence(options);
}
Result<Admission> KvPool::Append(SeqId seq, int64_t num_tokens) {
  return impl_->Append(seq, num_tokens);
}
Result<Admission> KvPool::CanAppend(SeqId seq, int64_t num_tokens) const {
  return impl_->CanAppend(seq, num_tokens);
}
Result<SeqId> KvPool::Fork(SeqId seq) { return impl_->Fork(seq); }
Status KvPool::Truncate(SeqId seq, int64_t length) {
  return impl_->Truncate(seq, length);
}
Status KvPool::Free(SeqId seq) { return impl_->Free(seq); }
Result<PrefixMatch> KvPool::MatchPrefix(const SequenceOptions& options,
                                        std::span<const int32_t> prompt) {
  return impl_->MatchPrefix(options, prompt);
}
Result<PrefixMatch> KvPool::FindPrefix(TenantId tenant,
                                       std::span<const int32_t> prompt) const {
  return impl_->FindPrefix(tenant, prompt);
}
Status KvPool::CommitTokens(SeqId seq, int64_t begin,
                            std::span<const int32_t> tokens) {
  return impl_->CommitTokens(seq, begin, tokens);
}
Result<PrefixPin> KvPool::PinPrefix(TenantId tenant,
                                    std::span<const int32_t> prompt) {
  return impl_->PinPrefix(tenant, prompt);
}
Status KvPool::UnpinPrefix(int64_t pin) { return impl_->UnpinPrefix(pin); }
PrefixCacheStats KvPool::prefix_stats() const { return impl_->prefix_stats(); }
Result<int64_t> KvPool::Length(SeqId seq) const { return impl_->Length(seq); }
Result<int64_t> KvPool::CopyBlockTable(SeqId seq,
                                       std::span<int32_t> out) const {
  return impl_->CopyBlockTable(seq, out);
}
Status KvPool::CopySlotMapping(SeqId seq, int64_t begin,
                               std::span<int64_t> out) const {
  return impl_->CopySlotMapping(seq, begin, out);
}
Status KvPool::CheckInvariants() const { return impl_->CheckInvariants(); }

}  // namespace varlane
