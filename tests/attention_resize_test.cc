// Attention over a pool that shrinks, grows and moves blocks between steps has
// the bits of one over a pool that is left alone.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/pools.h"
#include "tests/testing/random_values.h"
#include "tests/testing/testing.h"
#include "varlane/attention.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

using testing::RandomValue;

constexpr int kQHeads = 6;
constexpr int kTableEntries = 32;
constexpr int64_t kMaxBlocks = 120;

// 64 KiB a block in f32, so several slabs.
KvLayout LayoutOf(DType dtype) {
  return {.dtype = dtype,
          .num_layers = 2,
          .num_kv_heads = 2,
          .head_size = 64,
          .v_head_size = 64,
          .block_size = 32};
}

std::unique_ptr<KvPool> MakePool(Runtime* runtime, DType dtype) {
  return testing::MakePool({.layout = LayoutOf(dtype),
                            .num_blocks = kMaxBlocks,
                            .max_blocks = kMaxBlocks,
                            .check_limits = false,
                            .poison_freed = true},
                           runtime);
}

// What a sequence is fed next. Equal seeds mean equal tokens.
struct Feed {
  SeqId seq = -1;
  uint64_t seed = 0;
  int count = 1;
};

// A step of several sequences: planned once, written and attended layer by
// layer.
class Step {
 public:
  Step(const Attention* attention, KvPool* pool, std::vector<Feed> feeds)
      : attention_(attention), pool_(pool), feeds_(std::move(feeds)) {
    for (const Feed& feed : feeds_) {
      begins_.push_back(*pool->Length(feed.seq));
      const Result<Admission> admission = pool->Append(feed.seq, feed.count);
      EXPECT_TRUE(admission.ok() && admission->admitted());
      cu_seqlens_q_.push_back(cu_seqlens_q_.back() + feed.count);
      seq_lens_.push_back(static_cast<int32_t>(begins_.back() + feed.count));
    }
    Plan();
  }

  // Asks the pool where the blocks are, and plans.
  void Plan() {
    tables_.assign(feeds_.size() * kTableEntries, -1);
    slots_.resize(static_cast<size_t>(cu_seqlens_q_.back()));
    for (size_t i = 0; i < feeds_.size(); ++i) {
      VARLANE_EXPECT_OK(pool_->CopyBlockTable(
          feeds_[i].seq,
          std::span(tables_).subspan(i * kTableEntries, kTableEntries)));
      VARLANE_EXPECT_OK(pool_->CopySlotMapping(
          feeds_[i].seq, begins_[i],
          std::span(slots_).subspan(static_cast<size_t>(cu_seqlens_q_[i]),
                                    static_cast<size_t>(feeds_[i].count))));
    }
    AttentionShape shape;
    shape.num_q_heads = kQHeads;
    VARLANE_EXPECT_OK(
        attention_->Plan({cu_seqlens_q_, seq_lens_, tables_, kTableEntries},
                         shape, pool_->view(), {}, &plan_));
  }

  // Writes the step's K and V and attends, every layer.
  void Run(testing::Output* all) {
    *all = {};
    for (int layer = 0; layer < pool_->layout().num_layers; ++layer) {
      const std::vector<float> k = Rows(100, layer, Width());
      const std::vector<float> v = Rows(200, layer, Width());
      VARLANE_ASSERT_OK(attention_->WriteKv(pool_->view(), layer,
                                            {k.data(), DType::kF32},
                                            {v.data(), DType::kF32}, slots_));
      VARLANE_ASSERT_OK(Attend(layer, all));
    }
  }

  // Adds out, -7 where nothing was written, and lse of one layer.
  Status Attend(int layer, testing::Output* all) {
    const std::vector<float> q =
        Rows(0, layer, kQHeads * pool_->layout().head_size);
    std::vector<float> out(q.size(), -7);
    std::vector<float> lse(static_cast<size_t>(cu_seqlens_q_.back() * kQHeads));
    AttentionTensors tensors;
    tensors.q = {q.data(), DType::kF32};
    tensors.out = {out.data(), DType::kF32};
    tensors.lse = lse.data();
    const Status status =
        attention_->Run(&plan_, pool_->view(), layer, tensors);
    all->out.insert(all->out.end(), out.begin(), out.end());
    all->lse.insert(all->lse.end(), lse.begin(), lse.end());
    return status;
  }

 private:
  int Width() const {
    return pool_->layout().num_kv_heads * pool_->layout().head_size;
  }
  // What a model would give to one layer, all sequences' tokens.
  std::vector<float> Rows(uint64_t kind, int layer, int width) const {
    std::vector<float> rows;
    for (size_t i = 0; i < feeds_.size(); ++i) {
      const int64_t begin = begins_[i];
      for (int64_t t = begin; t < begin + feeds_[i].count; ++t) {
        for (int d = 0; d < width; ++d) {
          rows.push_back(
              float(RandomValue(feeds_[i].seed + kind, uint64_t(layer),
                                uint64_t(t), uint64_t(d), 0)));
        }
      }
    }
    return rows;
  }

  const Attention* const attention_;
  KvPool* const pool_;
  const std::vector<Feed> feeds_;
  std::vector<int64_t> begins_;
  std::vector<int32_t> cu_seqlens_q_ = {0};
  std::vector<int32_t> seq_lens_;
  std::vector<int32_t> tables_;
  std::vector<int64_t> slots_;
  AttentionPlan plan_;
};

// A pool and what has been fed to it: some long sequences between which others
// were freed, so that blocks stand everywhere and there is room to move.
class Service {
 public:
  Service(const Attention* attention, std::unique_ptr<KvPool> pool)
      : attention_(attention), pool_(std::move(pool)) {
    std::vector<SeqId> freed;
    for (const int length : {161, 32, 77, 300}) {
      freed.push_back(pool_->CreateSequence());
      VARLANE_EXPECT_OK(pool_->Append(freed.back(), 500));
      seqs_.push_back(pool_->CreateSequence());
      testing::Output output;
      Step(attention, pool_.get(),
           {{seqs_.back(), 10 + seqs_.size() - 1, length}})
          .Run(&output);
    }
    for (const SeqId seq : freed) VARLANE_EXPECT_OK(pool_->Free(seq));
    // Shares blocks, a half-filled one among them.
    seqs_.push_back(*pool_->Fork(seqs_[0]));
  }

  KvPool* pool() const { return pool_.get(); }

  std::vector<Feed> Decode() const {
    std::vector<Feed> feeds;
    for (size_t i = 0; i < seqs_.size(); ++i) {
      feeds.push_back({seqs_[i], 10 + i, i == 2 ? 40 : 1});
    }
    return feeds;
  }
  Step MakeStep() { return {attention_, pool_.get(), Decode()}; }

 private:
  const Attention* const attention_;
  std::unique_ptr<KvPool> pool_;
  std::vector<SeqId> seqs_;
};

class ResizeAttentionTest : public ::testing::TestWithParam<DType> {
 protected:
  // Each step on both; between steps only one of the pools changes.
  template <typename Change>
  void ExpectSameSteps(Runtime* runtime, const Attention& attention,
                       int num_steps, const Change& change) {
    Service calm(&attention, MakePool(runtime, GetParam()));
    Service moved(&attention, MakePool(runtime, GetParam()));
    for (int i = 0; i < num_steps; ++i) {
      ASSERT_NO_FATAL_FAILURE(change(moved.pool(), i));
      testing::Output expected, got;
      ASSERT_NO_FATAL_FAILURE(calm.MakeStep().Run(&expected));
      ASSERT_NO_FATAL_FAILURE(moved.MakeStep().Run(&got));
      testing::ExpectSameBits(expected, got, "step " + std::to_string(i));
      VARLANE_ASSERT_OK(moved.pool()->CheckInvariants());
    }
    EXPECT_EQ(calm.pool()->stats().moved_blocks, 0);
    EXPECT_GT(moved.pool()->stats().moved_blocks, 10) << "nothing has moved";
  }
};
INSTANTIATE_TEST_SUITE_P(DTypes, ResizeAttentionTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         testing::DTypeParam);

// Every way to move blocks, in turn; growth opens room again.
void Resize(KvPool* pool, int i) {
  switch (i % 5) {
    case 0:
      VARLANE_ASSERT_OK(pool->Compact(3));
      break;
    case 1:
      VARLANE_ASSERT_OK(pool->Compact());
      break;
    case 2:
      VARLANE_ASSERT_OK(pool->SetLimit(pool->MinLimitBytes()));
      break;
    case 3:
      VARLANE_ASSERT_OK(pool->SetLimit(pool->stats().reserved_bytes));
      break;
    default:
      VARLANE_ASSERT_OK(pool->Shrink(pool->free_blocks() - 10));
      break;
  }
}

TEST_P(ResizeAttentionTest, OutputsHaveTheSameBitsWhateverMoves) {
  const testing::Engine engine = testing::MakeEngine(2);
  ExpectSameSteps(engine.runtime.get(), *engine.attention, 6, Resize);
}

TEST_P(ResizeAttentionTest, OutputsHaveTheSameBitsWhenBlocksChangeTheirNode) {
  const testing::Engine engine = testing::MakeNodes(2);
  ASSERT_NE(engine.attention, nullptr);
  ExpectSameSteps(engine.runtime.get(), *engine.attention, 6, Resize);
}

TEST_P(ResizeAttentionTest, APlanOlderThanAMoveIsRefusedAndMadeAnew) {
  const testing::Engine engine = testing::MakeEngine(2);
  Service calm(engine.attention.get(),
               MakePool(engine.runtime.get(), GetParam()));
  Service moved(engine.attention.get(),
                MakePool(engine.runtime.get(), GetParam()));
  testing::Output expected, got;
  Step wanted = calm.MakeStep();
  ASSERT_NO_FATAL_FAILURE(wanted.Run(&expected));
  Step step = moved.MakeStep();
  const Result<KvResize> compacted = moved.pool()->Compact();
  VARLANE_ASSERT_OK(compacted);
  ASSERT_GT(compacted->moved_blocks, 0);
  EXPECT_EQ(step.Attend(0, &got).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::all_of(got.out.begin(), got.out.end(), [](float value) {
    return value == -7;
  })) << "something was written";
  step.Plan();
  ASSERT_NO_FATAL_FAILURE(step.Run(&got));
  testing::ExpectSameBits(expected, got, "planned anew");
}

// A table that outlives its sequence: its blocks are poison, not stale keys.
TEST_P(ResizeAttentionTest, AFreedBlockIsNeverReadUnseen) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const testing::Engine engine = testing::MakeEngine(1);
  Service service(engine.attention.get(),
                  MakePool(engine.runtime.get(), GetParam()));
  const std::vector<Feed> feeds = service.Decode();
  Step step = service.MakeStep();
  testing::Output before, after;
  ASSERT_NO_FATAL_FAILURE(step.Run(&before));
  for (const Feed& feed : feeds) {
    VARLANE_ASSERT_OK(service.pool()->Free(feed.seq));
  }
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH((void)step.Attend(0, &after), "use-after-poison");
#else
  VARLANE_ASSERT_OK(step.Attend(0, &after));
  EXPECT_TRUE(std::all_of(after.out.begin(), after.out.end(), [](float value) {
    return value != value;
  })) << "what it says is not NaN";
#endif
}

}  // namespace
}  // namespace varlane
