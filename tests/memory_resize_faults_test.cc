// A pool that shrinks, grows, is limited, compacted and lent while one system
// call or allocation after the other fails, and under a real limit
// (RLIMIT_DATA).
//
// Whatever fails may have moved blocks, but no sequence loses a byte, capacity
// and limit are what they were, and the next attempt succeeds.
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "tests/testing/fault_injection.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "varlane/kv_pool.h"
#include "varlane/runtime.h"

namespace varlane {
namespace {

// 64 KiB a block and node, 32 blocks a slab.
constexpr KvLayout kLayout{DType::kBF16, 1, 8, 128, 128, 16};
constexpr int64_t kNodeSlabBytes = int64_t{2} << 20;
constexpr int64_t kBlockTokens = 16;
constexpr size_t kEndBytes = 64;  // at a part's either end, that are filled

// On a runtime with several nodes heads are sharded over them.
class ResizeScenario : public testing::FaultScenario {
 public:
  ResizeScenario(Runtime* runtime, testing::Injector* injector,
                 bool check_limits = true)
      : FaultScenario(runtime, injector),
        check_limits_(check_limits),
        num_shards_(runtime->num_nodes()),
        slab_bytes_(num_shards_ * kNodeSlabBytes) {}

  void Run() override {
    Try("Create", [&] { return Create(); });
    if (pool_ == nullptr) return;
    const SeqId low = Add(60);
    const SeqId high = Add(50);
    VARLANE_ASSERT_OK(pool_->Free(low));
    filled_.erase(low);
    Try("Compact some", [&] { return pool_->Compact(7).status(); });
    Try("Compact", [&] { return pool_->Compact().status(); });
    EXPECT_GE(pool_->stats().moved_blocks, 18);
    Try("Shrink", [&] { return pool_->Shrink(30).status(); });
    Try("Grow", [&] { return pool_->Grow(40); });
    const SeqId last = Add(60);
    VARLANE_ASSERT_OK(pool_->Free(high));
    filled_.erase(high);
    Try("SetLimit down", [&] { return SetLimit(2); });
    EXPECT_EQ(pool_->stats().committed_bytes, 2 * slab_bytes_);
    Try("SetLimit up", [&] { return SetLimit(8); });
    Try("GiveBack",
        [&] { return pool_->GiveBack({.bytes = 3 * slab_bytes_}).status(); });
    EXPECT_EQ(pool_->stats().committed_bytes, 5 * slab_bytes_);
    Try("TakeBack", [&] { return pool_->TakeBack(2 * slab_bytes_).status(); });
    EXPECT_EQ(pool_->stats().committed_bytes, 7 * slab_bytes_);
    Try("Shrink to what is needed",
        [&] { return pool_->Shrink(pool_->capacity_blocks() - 60).status(); });
    VARLANE_ASSERT_OK(pool_->Free(last));
    filled_.clear();
    Try("SetLimit to nothing", [&] { return SetLimit(0); });
    EXPECT_EQ(pool_->stats().committed_bytes, 0);
    Try("SetLimit from nothing", [&] { return SetLimit(3); });
    last_state_ = State();
    injector_->Resume();
    pool_.reset();
    injector_->Pause();
  }

 protected:
  // No ids: what moved before a failure has moved.
  std::string State() const override {
    if (pool_ == nullptr) return "no pool";
    const KvPoolStats stats = pool_->stats();
    std::ostringstream out;
    out << stats.capacity_blocks << " " << stats.free_blocks << " "
        << stats.referenced_blocks << " " << stats.sequences << " "
        << stats.committed_bytes << " " << stats.num_slabs << " "
        << stats.limit_bytes;
    return out.str();
  }

  Status CheckInvariants() const override {
    for (const auto& [seq, value] : filled_) ExpectFilled(seq, value);
    return pool_->CheckInvariants();
  }

 private:
  Status Create() {
    KvLayout layout = kLayout;
    layout.num_kv_heads *= num_shards_;
    Result<std::unique_ptr<KvPool>> pool =
        KvPool::Create({.layout = layout,
                        .num_blocks = 120,
                        .max_blocks = 256,
                        .shard_heads = true,
                        .check_limits = check_limits_},
                       runtime_);
    if (!pool.ok()) return pool.status();
    pool_ = std::move(pool).value();
    return {};
  }
  Status SetLimit(int64_t slabs) {
    return pool_->SetLimit(slabs * slab_bytes_).status();
  }

  // A sequence whose blocks hold a byte of its own. Nothing fails meanwhile.
  SeqId Add(int64_t blocks) {
    const SeqId seq = pool_->CreateSequence();
    const Result<Admission> admission =
        pool_->Append(seq, blocks * kBlockTokens);
    EXPECT_TRUE(admission.ok() && admission->admitted());
    filled_[seq] = static_cast<int>(filled_.size()) + 1 + int(blocks);
    for (std::byte* const end : EndsOf(seq)) {
      std::memset(end, filled_[seq], kEndBytes);
    }
    return seq;
  }
  void ExpectFilled(SeqId seq, int value) const {
    const std::vector<std::byte> wanted(kEndBytes, std::byte(value));
    const std::vector<std::byte*> ends = EndsOf(seq);
    for (size_t i = 0; i < ends.size(); ++i) {
      ASSERT_EQ(std::memcmp(ends[i], wanted.data(), kEndBytes), 0)
          << "end " << i << " of sequence " << seq;
    }
  }
  std::vector<int32_t> Table(SeqId seq) const {
    std::vector<int32_t> table(256);
    const Result<int64_t> blocks = pool_->CopyBlockTable(seq, table);
    EXPECT_TRUE(testing::IsOk(blocks));
    table.resize(blocks.ok() ? static_cast<size_t>(*blocks) : 0);
    return table;
  }
  // The first and the last bytes of its blocks, in every shard.
  std::vector<std::byte*> EndsOf(SeqId seq) const {
    const KvView view = pool_->view();
    std::vector<std::byte*> ends;
    for (const int32_t block : Table(seq)) {
      for (int shard = 0; shard < num_shards_; ++shard) {
        std::byte* const part = view.part(block, shard);
        ends.push_back(part);
        ends.push_back(part + view.part_bytes() - kEndBytes);
      }
    }
    return ends;
  }

  const bool check_limits_;
  const int num_shards_;
  const int64_t slab_bytes_;
  std::unique_ptr<KvPool> pool_;
  std::map<SeqId, int> filled_;
};

// Without the check of the limits slab by slab, whose every call fails once in
// memory_faults_test.
class UncheckedScenario : public ResizeScenario {
 public:
  UncheckedScenario(Runtime* runtime, testing::Injector* injector)
      : ResizeScenario(runtime, injector, /*check_limits=*/false) {}
};

using ResizeFaultsTest = testing::FaultTest;

TEST_F(ResizeFaultsTest, EverySystemCallMayFail) {
  for (const int error : {ENOMEM, EINTR}) {
    SCOPED_TRACE(std::generic_category().message(error));
    testing::FailingCalls calls(error);
    EXPECT_GT(FailEach<UncheckedScenario>(&calls), 30)
        << "the scenario makes no such calls";
  }
}

TEST_F(ResizeFaultsTest, EveryAllocationMayFail) {
  testing::FailingAllocations allocations;
  EXPECT_GT(FailEach<UncheckedScenario>(&allocations), 30);
}

// --- sharded heads -----------------------------------------------------------

class ShardedResizeFaultsTest : public testing::FaultTest {
 protected:
  void SetUp() override {
    runtime_ = testing::MakeRuntime(0, testing::NodesTopology(2));
    ASSERT_NE(runtime_, nullptr);
    ASSERT_EQ(runtime_->num_nodes(), 2);
  }
};

TEST_F(ShardedResizeFaultsTest, EverySystemCallMayFail) {
  testing::FailingCalls calls(ENOMEM);
  EXPECT_GT(FailEach<UncheckedScenario>(&calls), 60)
      << "as many again as of one node";
}

// --- a real limit ------------------------------------------------------------

int64_t DataBytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmData:", 0) == 0) return std::atoll(&line[7]) * 1024;
  }
  return -1;
}

// While it runs, the process may take only so much more data than it had when
// the scenario began: whatever passes that the kernel refuses, the heap's own
// growth included.
class DataLimit : public testing::Injector {
 public:
  explicit DataLimit(int64_t step_bytes) : step_bytes_(step_bytes) {
    (void)getrlimit(RLIMIT_DATA, &before_);
  }
  ~DataLimit() override { (void)setrlimit(RLIMIT_DATA, &before_); }

  void Arm(int64_t index) override {
    limit_bytes_ = DataBytes() + index * step_bytes_;
    failed_ = 0;
  }
  void Pause() override { ASSERT_EQ(setrlimit(RLIMIT_DATA, &before_), 0); }
  void Resume() override {
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(limit_bytes_);
    ASSERT_EQ(setrlimit(RLIMIT_DATA, &limit), 0);
  }
  int64_t failed() const override { return failed_; }
  void NoteFailure() override { ++failed_; }

 private:
  const int64_t step_bytes_;
  rlimit before_{};
  int64_t limit_bytes_ = 0;
  int64_t failed_ = 0;
};

TEST_F(ResizeFaultsTest, EveryStepUpToTheDataLimitMayBeRefused) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's own memory counts as data";
  }
  DataLimit kernel(int64_t{128} << 10);
  const int64_t unchecked = FailEach<UncheckedScenario>(&kernel);
  EXPECT_GT(unchecked, 40) << "16 MiB in steps of 128 KiB";
  DataLimit checked(int64_t{2} << 20);
  EXPECT_GT(FailEach<ResizeScenario>(&checked), 4);
}

}  // namespace
}  // namespace varlane
