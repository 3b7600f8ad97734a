// A pool with sharded KV heads, from the write to the output: what is computed
// over it has the bits of a pool without shards.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/pools.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/graph.h"
#include "varlane/kv_ops.h"
#include "varlane/kv_pool.h"

namespace varlane::testing {
namespace {

constexpr KvLayout kLayout = {.dtype = DType::kBF16,
                              .num_layers = 2,
                              .num_kv_heads = 4,
                              .head_size = 64,
                              .v_head_size = 48,
                              .block_size = 16};
constexpr int kQueryHeads = 8;

// Two sequences, a prefill and then decode steps, of all layers.
class Service {
 public:
  Service(Engine engine, bool shard_heads) : engine_(std::move(engine)) {
    pool_ = MakePool({.layout = kLayout,
                      .num_blocks = 100,
                      .huge_pages = HugePages::kOff,
                      .shard_heads = shard_heads},
                     engine_.runtime.get());
    if (pool_ == nullptr) return;
    for (SeqId& seq : seqs_) seq = pool_->CreateSequence();
  }

  KvPool& pool() { return *pool_; }
  Runtime* runtime() { return engine_.runtime.get(); }
  const Attention& attention() { return *engine_.attention; }
  SeqId seq(int i) const { return seqs_[size_t(i)]; }
  std::vector<int32_t> TableOf(SeqId seq) const {
    std::vector<int32_t> table(40);
    EXPECT_TRUE(IsOk(pool_->CopyBlockTable(seq, table)));
    return table;
  }

  // Feeds `count` tokens to each sequence: writes, then attends, layer by
  // layer, as one graph or launch by launch. Returns what came out.
  std::vector<float> Step(int count, bool as_graph) {
    Prepare(count);
    LaunchGraph graph;
    std::vector<GraphNode> after;
    for (int layer = 0; layer < kLayout.num_layers; ++layer) {
      if (as_graph) {
        AddLayer(layer, &graph, &after);
      } else {
        RunLayer(layer);
      }
    }
    if (as_graph) {
      EXPECT_TRUE(IsOk(graph.Build()));
      EXPECT_TRUE(IsOk(engine_.runtime->Run(graph)));
    }
    return out_;
  }

 private:
  struct Tensors {
    std::vector<float> q, k, v;
  };

  void Prepare(int count) {
    cu_seqlens_q_ = {0};
    seq_lens_.clear();
    tables_.clear();
    slots_.clear();
    for (const SeqId seq : seqs_) {
      const int64_t begin = *pool_->Length(seq);
      EXPECT_TRUE((*pool_->Append(seq, count)).admitted());
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + count);
      seq_lens_.push_back(int32_t(begin + count));
      const std::vector<int32_t> table = TableOf(seq);
      tables_.insert(tables_.end(), table.begin(), table.end());
      slots_.resize(slots_.size() + size_t(count));
      EXPECT_TRUE(IsOk(pool_->CopySlotMapping(
          seq, begin, std::span(slots_).last(size_t(count)))));
    }
    const int64_t total = std::ssize(slots_);
    inputs_.clear();
    for (int layer = 0; layer < kLayout.num_layers; ++layer) {
      const uint64_t seed = uint64_t(total * 10 + layer);
      inputs_.push_back({RandomRows(seed, total, kQueryHeads * 64),
                         RandomRows(seed + 1000, total, 4 * 64),
                         RandomRows(seed + 2000, total, 4 * 48)});
    }
    out_.assign(size_t(kLayout.num_layers * total * kQueryHeads * 48), -1);
    AttentionShape shape;
    shape.num_q_heads = kQueryHeads;
    EXPECT_TRUE(IsOk(attention().Plan({cu_seqlens_q_, seq_lens_, tables_, 40},
                                      shape, pool_->view(), {}, &plan_)));
  }
  AttentionTensors TensorsOf(int layer) {
    const size_t size = out_.size() / size_t(kLayout.num_layers);
    return {.q = {inputs_[size_t(layer)].q.data()},
            .out = {out_.data() + size_t(layer) * size}};
  }
  void RunLayer(int layer) {
    const Tensors& in = inputs_[size_t(layer)];
    EXPECT_TRUE(IsOk(attention().WriteKv(pool_->view(), layer, {in.k.data()},
                                         {in.v.data()}, slots_)));
    EXPECT_TRUE(
        IsOk(attention().Run(&plan_, pool_->view(), layer, TensorsOf(layer))));
  }
  void AddLayer(int layer, LaunchGraph* graph, std::vector<GraphNode>* after) {
    const auto write = attention().AddWriteKv(
        graph, "write",
        [this, layer](void*) {
          const Tensors& in = inputs_[size_t(layer)];
          return WriteKvNodeArgs{
              pool_->view(), layer, {in.k.data()}, {in.v.data()}, slots_};
        },
        *after);
    EXPECT_TRUE(IsOk(write));
    const std::vector<GraphNode> written = {*write};
    const auto run = attention().AddRun(
        graph, "run",
        [this, layer](void*) {
          AttentionNodeArgs args;
          args.plan = &plan_;
          args.kv = pool_->view();
          args.layer = layer;
          args.tensors = TensorsOf(layer);
          return args;
        },
        written);
    EXPECT_TRUE(IsOk(run));
    *after = {*run};
  }

  Engine engine_;
  std::unique_ptr<KvPool> pool_;
  std::array<SeqId, 2> seqs_ = {};
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<int32_t> seq_lens_;
  std::vector<int32_t> tables_;
  std::vector<int64_t> slots_;
  std::vector<Tensors> inputs_;  // [layers]
  std::vector<float> out_;       // [layers, tokens, Hq, Dv]
  AttentionPlan plan_;
};

void ExpectSameBytes(const std::vector<float>& a, const std::vector<float>& b,
                     const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0)
      << what;
}

TEST(ShardedPoolTest, StepsHaveTheBitsOfAPoolWithoutShards) {
  for (const int num_nodes : {2, 4}) {
    for (const bool as_graph : {false, true}) {
      SCOPED_TRACE(std::to_string(num_nodes) + " nodes");
      Service plain(MakeEngine(1), false);
      Service sharded(MakeNodes(num_nodes), true);
      ASSERT_EQ(sharded.pool().num_shards(), num_nodes);
      for (const int count : {90, 1, 1, 40, 1}) {
        ExpectSameBytes(plain.Step(count, false), sharded.Step(count, as_graph),
                        "step of " + std::to_string(count));
      }
    }
  }
}

// An arena of every L3 is what a node is elsewhere.
TEST(ShardedPoolTest, ArenasOfAnL3EachHaveTheirHeadsToo) {
  Service plain(MakeEngine(1), false);
  Service sharded(MakeL3Arenas(2), true);
  ASSERT_EQ(sharded.pool().num_shards(), 4);
  for (const int count : {90, 1, 40}) {
    ExpectSameBytes(plain.Step(count, false), sharded.Step(count, false),
                    "step of " + std::to_string(count));
  }
}

TEST(ShardedPoolTest, CopiedAndGatheredBlocksAreThoseOfAPoolWithoutShards) {
  for (const int num_nodes : {2, 4}) {
    Service plain(MakeEngine(1), false);
    Service sharded(MakeNodes(num_nodes), true);
    std::vector<std::vector<float>> found;
    for (Service* const service : {&plain, &sharded}) {
      (void)service->Step(100, false);
      const std::vector<int32_t> from = service->TableOf(service->seq(0));
      // Into blocks that nobody has.
      std::vector<BlockCopy> copies;
      std::vector<int32_t> to;
      for (int i = 0; i < 7; ++i) {
        to.push_back(60 + 5 * i);
        copies.push_back({from[size_t(i)], to.back()});
      }
      VARLANE_ASSERT_OK(
          CopyBlocks(service->runtime(), service->pool().view(), copies));
      std::vector<float> rows(size_t{100} * 4 * (64 + 48), -1);
      float* const v = rows.data() + size_t{100} * 4 * 64;
      VARLANE_ASSERT_OK(GatherKv(service->runtime(), service->pool().view(),
                                 {to, 1, 0, 100}, {rows.data()}, {v}));
      found.push_back(rows);
    }
    ExpectSameBytes(found[0], found[1], std::to_string(num_nodes) + " nodes");
  }
}

}  // namespace
}  // namespace varlane::testing
