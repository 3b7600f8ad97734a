// What the pool's bookkeeping costs: a block taken and given back, a token
// appended, a long sequence forked.
//
// SPDX-License-Identifier: Apache-2.0

#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "memory/block_allocator.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

// Shuffled means blocks come in a random order, as they do in a pool that has
// run for a while.
std::unique_ptr<BlockAllocator> MakeAllocator(int64_t num_blocks,
                                              bool shuffle) {
  auto allocator = std::make_unique<BlockAllocator>(
      BlockAllocator::Options{.num_nodes = 1,
                              .blocks_per_node = num_blocks,
                              .shuffle = shuffle,
                              .seed = 1});
  (void)allocator->Grow(0, num_blocks);
  return allocator;
}

// Takes every block, then gives all back in the order taken.
void BM_AllocateAndFreeAllBlocks(benchmark::State& state) {
  const int64_t num_blocks = state.range(0);
  const auto allocator = MakeAllocator(num_blocks, state.range(1) != 0);
  std::vector<BlockId> blocks(static_cast<size_t>(num_blocks));
  for (auto _ : state) {
    for (BlockId& block : blocks) block = allocator->Allocate();
    for (const BlockId block : blocks) {
      benchmark::DoNotOptimize(allocator->Release(block));
    }
  }
  if (!allocator->CheckInvariants().ok() ||
      allocator->free_blocks() != num_blocks) {
    state.SkipWithError("the allocator is not whole again");
  }
  state.SetItemsProcessed(state.iterations() * num_blocks);
}
BENCHMARK(BM_AllocateAndFreeAllBlocks)
    ->ArgNames({"blocks", "shuffle"})
    ->ArgsProduct({{4096, 262144}, {0, 1}});

// One block back and forth in an otherwise full pool: the common case of a
// pool under pressure.
void BM_AllocateAndFreeTheLastBlock(benchmark::State& state) {
  const int64_t num_blocks = state.range(0);
  const auto allocator = MakeAllocator(num_blocks, false);
  for (int64_t i = 1; i < num_blocks; ++i) (void)allocator->Allocate();
  for (auto _ : state) {
    benchmark::DoNotOptimize(allocator->Release(allocator->Allocate()));
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_AllocateAndFreeTheLastBlock)
    ->ArgNames({"blocks"})
    ->Arg(4096)
    ->Arg(262144);

constexpr int kBlockSize = 16;

struct PoolOnRuntime {
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<KvPool> pool;
};

// Null pool where the machine refuses; 4 KiB blocks keep it to tens of MiB.
PoolOnRuntime MakePool(int64_t num_blocks) {
  PoolOnRuntime out;
  Result<std::unique_ptr<Runtime>> runtime = Runtime::Create({});
  if (!runtime.ok()) return out;
  out.runtime = *std::move(runtime);
  Result<std::unique_ptr<KvPool>> pool =
      KvPool::Create({.layout = {.dtype = DType::kF32,
                                 .num_layers = 1,
                                 .num_kv_heads = 1,
                                 .head_size = 32,
                                 .v_head_size = 32,
                                 .block_size = kBlockSize},
                      .num_blocks = num_blocks},
                     out.runtime.get());
  if (pool.ok()) out.pool = *std::move(pool);
  return out;
}

void BM_ForkAndFreeSequence(benchmark::State& state) {
  const int64_t blocks = state.range(0);
  const PoolOnRuntime made = MakePool(blocks);
  if (made.pool == nullptr) return state.SkipWithError("no pool");
  const SeqId seq = made.pool->CreateSequence();
  if (!made.pool->Append(seq, blocks * kBlockSize).ok()) {
    return state.SkipWithError("append");
  }
  for (auto _ : state) {
    const Result<SeqId> fork = made.pool->Fork(seq);
    if (!fork.ok() || !made.pool->Free(*fork).ok()) {
      return state.SkipWithError("fork");
    }
  }
  if (made.pool->stats().references != blocks) {
    state.SkipWithError("references are left");
  }
  state.SetItemsProcessed(state.iterations() * blocks);
}
BENCHMARK(BM_ForkAndFreeSequence)->ArgNames({"blocks"})->Arg(64)->Arg(4096);

// A decode step's part: one token for each of many sequences.
void BM_AppendToken(benchmark::State& state) {
  const int64_t num_seqs = state.range(0);
  const int64_t tokens = 256;
  const PoolOnRuntime made = MakePool(num_seqs * tokens / kBlockSize);
  if (made.pool == nullptr) return state.SkipWithError("no pool");
  std::vector<SeqId> seqs(static_cast<size_t>(num_seqs));
  for (SeqId& seq : seqs) seq = made.pool->CreateSequence();
  int64_t length = 0;
  for (auto _ : state) {
    if (length == tokens) {
      state.PauseTiming();
      for (const SeqId seq : seqs) (void)made.pool->Truncate(seq, 0);
      length = 0;
      state.ResumeTiming();
    }
    ++length;
    for (const SeqId seq : seqs) {
      const Result<Admission> admission = made.pool->Append(seq, 1);
      if (!admission.ok() || !admission->admitted()) {
        return state.SkipWithError("append");
      }
    }
  }
  state.SetItemsProcessed(state.iterations() * num_seqs);
}
BENCHMARK(BM_AppendToken)->ArgNames({"seqs"})->Arg(256);

}  // namespace
}  // namespace varlane

BENCHMARK_MAIN();
