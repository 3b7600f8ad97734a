// Every system call and every allocation of a pool's life fails once.
//
// Whatever fails must change nothing, succeed when it is tried again, and leak
// neither heap, address space nor descriptors.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "base/os_calls.h"
#include "tests/testing/fault_injection.h"
#include "tests/testing/process_use.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

using testing::ProcessUse;

// 64 KiB a block, 32 blocks a slab.
constexpr KvLayout kLayout{DType::kBF16, 1, 8, 128, 128, 16};

// One life of a pool.
class PoolScenario : public testing::FaultScenario {
 public:
  using FaultScenario::FaultScenario;

  void Run() override {
    Try("Create", [&] { return Create(); });
    Try("CreateSequence", [&] { return NewSequence(&a_); });
    Try("Append", [&] { return Append(a_, 16 * 20 + 5); });
    Fill(a_, 7);
    Try("Grow", [&] { return pool_->Grow(60); });
    Try("Fork", [&] { return Fork(); });
    Try("append to a shared tail", [&] { return Append(b_, 16 * 30); });
    Try("CreateSequence again", [&] { return NewSequence(&c_); });
    Try("Append to it", [&] { return Append(c_, 16 * 9); });
    Try("a refused Append", [&] { return RefusedAppend(); });
    Try("Truncate", [&] { return pool_->Truncate(a_, 16 * 4 + 1); });
    Try("no such sequence", [&] { return Expect(StatusCode::kNotFound); });
    Try("Free", [&] { return pool_->Free(c_); });
    Try("Grow to the end", [&] { return pool_->Grow(28); });
    Try("Free the fork's source", [&] { return pool_->Free(a_); });
    CheckFilled(b_, 7);
    last_state_ = State();
    injector_->Resume();
    pool_.reset();
    injector_->Pause();
  }

 private:
  Status Create() {
    Result<std::unique_ptr<KvPool>> pool = KvPool::Create(
        {.layout = kLayout, .num_blocks = 40, .max_blocks = 128}, runtime_);
    if (!pool.ok()) return pool.status();
    pool_ = std::move(pool).value();
    return {};
  }
  Status NewSequence(SeqId* seq) {
    *seq = pool_->CreateSequence();
    if (*seq >= 0) return {};
    return {StatusCode::kResourceExhausted, ""};
  }
  Status Append(SeqId seq, int64_t tokens) {
    const Result<Admission> answer = pool_->Append(seq, tokens);
    if (!answer.ok()) return answer.status();
    EXPECT_TRUE(answer->admitted());
    return {};
  }
  Status RefusedAppend() {
    const Result<Admission> answer = pool_->Append(c_, 16 * 90);
    if (!answer.ok()) return answer.status();
    EXPECT_EQ(answer->kind, Admission::Kind::kWait);
    return {};
  }
  Status Fork() {
    const Result<SeqId> fork = pool_->Fork(a_);
    if (!fork.ok()) return fork.status();
    b_ = *fork;
    return {};
  }
  // An error keeps its code where there is no memory to say more.
  Status Expect(StatusCode code) {
    EXPECT_EQ(pool_->Free(12345).code(), code);
    EXPECT_EQ(pool_->Truncate(12345, 0).code(), code);
    EXPECT_EQ(pool_->Length(12345).status().code(), code);
    EXPECT_EQ(pool_->Append(12345, 1).status().code(), code);
    EXPECT_EQ(pool_->Fork(12345).status().code(), code);
    return {};
  }

  std::vector<int32_t> Table(SeqId seq) const {
    const Result<int64_t> length = pool_->Length(seq);
    if (!length.ok()) return {};
    std::vector<int32_t> table(static_cast<size_t>(*length) / 16 + 1);
    const Result<int64_t> blocks = pool_->CopyBlockTable(seq, table);
    EXPECT_TRUE(testing::IsOk(blocks));
    table.resize(static_cast<size_t>(*blocks));
    return table;
  }
  std::byte* Block(int32_t block) const {
    return pool_->view().base + block * kLayout.block_bytes();
  }
  void Fill(SeqId seq, int value) {
    num_filled_ = 0;
    for (const int32_t block : Table(seq)) {
      std::memset(Block(block), value, size_t(kLayout.block_bytes()));
      ++num_filled_;
    }
  }
  void CheckFilled(SeqId seq, int value) {
    const std::vector<int32_t> table = Table(seq);
    ASSERT_GT(num_filled_, 0);
    for (int i = 0; i < num_filled_; ++i) {
      EXPECT_EQ(*Block(table[size_t(i)]), std::byte(value)) << i;
    }
  }

  std::string State() const override {
    if (pool_ == nullptr) return "no pool";
    const KvPoolStats stats = pool_->stats();
    std::ostringstream out;
    out << stats.capacity_blocks << " " << stats.free_blocks << " "
        << stats.referenced_blocks << " " << stats.references << " "
        << stats.sequences << " " << stats.cow_copies << " "
        << stats.committed_bytes << " " << stats.num_slabs;
    for (const SeqId seq : {a_, b_, c_}) {
      const Result<int64_t> length = pool_->Length(seq);
      out << " | " << (length.ok() ? *length : -1) << ":";
      for (const int32_t block : Table(seq)) out << " " << block;
    }
    return out.str();
  }

  Status CheckInvariants() const override { return pool_->CheckInvariants(); }

  std::unique_ptr<KvPool> pool_;
  SeqId a_ = -1;
  SeqId b_ = -1;
  SeqId c_ = -1;
  int num_filled_ = 0;
};

using MemoryFaultsTest = testing::FaultTest;

TEST_F(MemoryFaultsTest, EverySystemCallMayFail) {
  for (const int error : {ENOMEM, EIO, EINTR, EMFILE}) {
    SCOPED_TRACE(std::generic_category().message(error));
    testing::FailingCalls calls(error);
    EXPECT_GT(FailEach<PoolScenario>(&calls), 100)
        << "the scenario makes no such calls";
  }
}

TEST_F(MemoryFaultsTest, EveryAllocationMayFail) {
  testing::FailingAllocations allocations;
  EXPECT_GT(FailEach<PoolScenario>(&allocations), 100);
}

// Nothing works any more from some call on: errors, never a crash or a leak of
// memory; and all is well once the system recovers.
TEST_F(MemoryFaultsTest, EveryCallFromSomeOneOnMayFail) {
  const ProcessUse use = ProcessUse::Now();
  const auto create = [&] {
    return KvPool::Create(
        {.layout = kLayout, .num_blocks = 40, .max_blocks = 128},
        runtime_.get());
  };
  int refused = 0;
  for (int64_t first = 0;; ++first) {
    ASSERT_LT(first, 10'000);
    OsFaults::FailAfter(first, ENOMEM, /*count=*/1'000'000);
    Result<std::unique_ptr<KvPool>> pool = create();
    const bool failed = OsFaults::failed() > 0;
    OsFaults::Disarm();
    refused += pool.ok() ? 0 : 1;
    if (pool.ok()) {
      VARLANE_EXPECT_OK((*pool)->CheckInvariants());
    }
    if (!failed) break;
  }
  EXPECT_GT(refused, 100);
  // Where even munmap fails address space may stay, but no more.
  VARLANE_EXPECT_OK(create());
  EXPECT_EQ(ProcessUse::Now().files, use.files);
}

}  // namespace
}  // namespace varlane
