// BlockMemory: slabs, nodes, growth, and refusals under real limits: rlimits
// and a memory cgroup, each in a process of its own.
//
// SPDX-License-Identifier: Apache-2.0

#include "memory/block_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

using testing::MakeRuntime;

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;
constexpr int64_t kGiB = 1024 * kMiB;

bool IsZero(const std::byte* data, int64_t bytes) {
  return std::all_of(data, data + bytes,
                     [](std::byte b) { return b == std::byte{0}; });
}

// Field 0 of statm is the address space, 1 what is resident.
int64_t StatmBytes(int field) {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  for (int i = 0; i <= field; ++i) statm >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

TEST(SlabBytesTest, SlabsAreHugePagesTimesAPowerOfTwoAndWasteLittle) {
  for (int64_t pool = 1; pool < 1000 * kGiB; pool = pool * 3 / 2 + 1) {
    const int64_t slab = SlabBytesFor(pool);
    EXPECT_EQ(slab % (2 * kMiB), 0);
    EXPECT_EQ(slab & (slab - 1), 0);
    EXPECT_LE(slab, 64 * kMiB);
    EXPECT_LE(slab, std::max(2 * kMiB, pool / 64));
  }
  EXPECT_EQ(SlabBytesFor(1), 2 * kMiB);
  EXPECT_EQ(SlabBytesFor(20 * kGiB), 64 * kMiB);
}

TEST(LimitReserveTest, IsTwoPercentAtLeast64MiBAtMostAnEighth) {
  EXPECT_EQ(LimitReserveBytes(kGiB), 64 * kMiB);
  EXPECT_EQ(LimitReserveBytes(100 * kGiB), 2 * kGiB);
  EXPECT_EQ(LimitReserveBytes(64 * kMiB), 8 * kMiB);
  // A pool keeps half of what a plan leaves.
  EXPECT_EQ(UntouchedBytes({.name = "", .reserve_bytes = 64 * kMiB}),
            32 * kMiB);
}

TEST(BlockMemoryTest, OverflowingSizeIsRefused) {
  const auto runtime = MakeRuntime(2);
  const auto memory = BlockMemory::Create(
      {.block_bytes = int64_t{1} << 40, .max_blocks = 1 << 30}, runtime.get());
  EXPECT_EQ(memory.status().code(), StatusCode::kInvalidArgument);
}

TEST(BlockMemoryTest, CommittedMemoryIsZeroAndWritable) {
  const auto runtime = MakeRuntime(2);
  for (const HugePages pages :
       {HugePages::kOff, HugePages::kTransparent, HugePages::kExplicit}) {
    auto memory = BlockMemory::Create(
        {.block_bytes = 3 * kKiB, .max_blocks = 1000, .huge_pages = pages},
        runtime.get());
    VARLANE_ASSERT_OK(memory);
    EXPECT_EQ((*memory)->stats().reserved_bytes, 4 * kMiB);
    EXPECT_EQ((*memory)->stats().committed_bytes, 0);
    VARLANE_ASSERT_OK((*memory)->Commit(1000));
    const BlockMemoryStats& stats = (*memory)->stats();
    EXPECT_EQ(stats.committed_bytes, 4 * kMiB);
    EXPECT_EQ(stats.num_slabs, 2);
    EXPECT_LE(stats.huge_pages, pages);
    if (pages == HugePages::kOff) {
      EXPECT_EQ(stats.huge_page_bytes, 0);
    }
    EXPECT_TRUE(IsZero((*memory)->base(), 1000 * 3 * kKiB));
    std::memset((*memory)->base(), 1, 1000 * 3 * kKiB);
  }
}

TEST(BlockMemoryTest, PopulatedBeforeUse) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's own memory hides what the pool takes";
  }
  const auto runtime = MakeRuntime(2);
  auto memory = BlockMemory::Create({.block_bytes = kMiB, .max_blocks = 128},
                                    runtime.get());
  VARLANE_ASSERT_OK(memory);
  const int64_t reserved = StatmBytes(1);
  VARLANE_ASSERT_OK((*memory)->Commit(64));
  const int64_t committed = StatmBytes(1);
  EXPECT_GE(committed - reserved, 60 * kMiB);
  EXPECT_LE(committed - reserved, 80 * kMiB);
  memory->reset();
  EXPECT_LE(StatmBytes(1), reserved + 8 * kMiB) << "not given back";
}

TEST(BlockMemoryTest, GrowthKeepsAddressesAndContents) {
  const auto runtime = MakeRuntime(2);
  auto memory = BlockMemory::Create(
      {.block_bytes = 1536 * kKiB, .max_blocks = 20}, runtime.get());
  VARLANE_ASSERT_OK(memory);
  VARLANE_ASSERT_OK((*memory)->Commit(3));
  std::byte* const base = (*memory)->base();
  const int64_t bytes = 3 * 1536 * kKiB;
  std::memset(base, 0x5a, static_cast<size_t>(bytes));
  for (const int64_t blocks : {4, 9, 20}) {
    VARLANE_ASSERT_OK((*memory)->Commit(blocks));
    ASSERT_EQ((*memory)->base(), base);
    ASSERT_TRUE(std::all_of(base, base + bytes,
                            [](std::byte b) { return b == std::byte{0x5a}; }));
  }
  EXPECT_TRUE(IsZero(base + bytes, 17 * 1536 * kKiB));
  EXPECT_EQ((*memory)->stats().committed_bytes, 30 * kMiB);
}

TEST(BlockMemoryTest, BlocksAreSpreadEvenlyOverNodesAsRanges) {
  const auto runtime = MakeRuntime(2, "numa:2 core:2 pu:1");
  ASSERT_NE(runtime, nullptr);
  ASSERT_EQ(runtime->num_nodes(), 2);
  auto memory = BlockMemory::Create({.block_bytes = 2 * kMiB, .max_blocks = 10},
                                    runtime.get());
  VARLANE_ASSERT_OK(memory);
  // A node's range is made of whole huge pages, so the halves are exact.
  EXPECT_EQ((*memory)->blocks_per_node(), 5);
  const auto committed = [&] {
    return std::to_string((*memory)->committed_blocks(0)) + "+" +
           std::to_string((*memory)->committed_blocks(1));
  };
  VARLANE_ASSERT_OK((*memory)->Commit(4));
  EXPECT_EQ(committed(), "2+2");
  VARLANE_ASSERT_OK((*memory)->Commit(5));
  EXPECT_EQ(committed(), "3+2");
  VARLANE_ASSERT_OK((*memory)->Commit(6));
  EXPECT_EQ(committed(), "3+3") << "many small growths stay even too";
  VARLANE_ASSERT_OK((*memory)->Commit(10));
  EXPECT_EQ(committed(), "5+5");
  EXPECT_EQ((*memory)->NodeOfBlock(4), 0);
  EXPECT_EQ((*memory)->NodeOfBlock(5), 1);
  std::memset((*memory)->base(), 1, static_cast<size_t>(20 * kMiB));
}

TEST(BlockMemoryTest, OddBlocksLeaveNodesWholeHugePages) {
  const auto runtime = MakeRuntime(2, "numa:2 core:2 pu:1");
  ASSERT_NE(runtime, nullptr);
  auto memory = BlockMemory::Create(
      {.block_bytes = 96 * kKiB, .max_blocks = 100}, runtime.get());
  VARLANE_ASSERT_OK(memory);
  const int64_t stride = (*memory)->blocks_per_node();
  EXPECT_EQ(stride, 64) << "64 x 96 KiB = 6 MiB";
  const int64_t blocks[] = {30, 3};
  VARLANE_ASSERT_OK((*memory)->Commit(blocks));
  EXPECT_EQ((*memory)->stats().committed_bytes, 4 * kMiB + 2 * kMiB);
  std::memset((*memory)->BlockPart(0, 0), 1, size_t(30 * 96 * kKiB));
  std::memset((*memory)->BlockPart(stride, 0), 2, size_t(3 * 96 * kKiB));
  EXPECT_EQ((*memory)->BlockPart(stride, 0) - (*memory)->base(), 6 * kMiB);
}

TEST(BlockMemoryTest, ReleasedSlabsGoBackAndComeBackZero) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's own memory hides what the pool takes";
  }
  const auto runtime = MakeRuntime(2);
  for (const MemoryBacking backing :
       {MemoryBacking::kAnonymous, MemoryBacking::kMemfd}) {
    auto memory = BlockMemory::Create(
        {.block_bytes = 768 * kKiB, .max_blocks = 100, .backing = backing},
        runtime.get());
    VARLANE_ASSERT_OK(memory);
    VARLANE_ASSERT_OK((*memory)->Commit(100));
    EXPECT_EQ((*memory)->memory_fd() >= 0, backing == MemoryBacking::kMemfd);
    std::byte* const base = (*memory)->base();
    std::memset(base, 7, size_t(75 * kMiB));
    const int64_t before = StatmBytes(1);
    const int64_t kept[] = {4};  // 3 MiB: two slabs, the second in part
    VARLANE_ASSERT_OK((*memory)->Release(kept));
    EXPECT_LE(StatmBytes(1), before - 68 * kMiB) << "still resident";
    const BlockMemoryStats& stats = (*memory)->stats();
    EXPECT_EQ(stats.committed_bytes, 4 * kMiB);
    EXPECT_EQ(stats.slabs_released, 36);
    EXPECT_EQ(stats.slabs_regained, 0);
    EXPECT_EQ((*memory)->committed_blocks(0), 5);
    VARLANE_ASSERT_OK((*memory)->Commit(60));
    EXPECT_EQ(stats.slabs_regained, 21);
    EXPECT_TRUE(std::all_of(base, base + 4 * kMiB,
                            [](std::byte b) { return b == std::byte{7}; }));
    EXPECT_TRUE(IsZero(base + 4 * kMiB, 41 * kMiB));
  }
}

TEST(BlockMemoryTest, MemfdShowsTheSameBytesElsewhere) {
  const auto runtime = MakeRuntime(2);
  auto memory = BlockMemory::Create({.block_bytes = 64 * kKiB,
                                     .max_blocks = 64,
                                     .backing = MemoryBacking::kMemfd},
                                    runtime.get());
  VARLANE_ASSERT_OK(memory);
  VARLANE_ASSERT_OK((*memory)->Commit(64));
  std::memset((*memory)->BlockPart(17, 0), 5, 64 * kKiB);
  std::byte byte{};
  ASSERT_EQ(pread((*memory)->memory_fd(), &byte, 1, 17 * 64 * kKiB + 99), 1);
  EXPECT_EQ(byte, std::byte{5});
}

void LockWithoutPermission() {
  const auto runtime = MakeRuntime(2);
  const rlimit none = {};
  EXPECT_EQ(setrlimit(RLIMIT_MEMLOCK, &none), 0);
  BlockMemoryOptions options = {
      .block_bytes = kMiB, .max_blocks = 8, .lock = MemoryLock::kTry};
  auto memory = BlockMemory::Create(options, runtime.get());
  const bool tried = memory.ok() && (*memory)->Commit(8).ok();
  const BlockMemoryStats stats =
      tried ? (*memory)->stats() : BlockMemoryStats();
  // A privileged process may lock whatever its limit says.
  const bool may_lock = stats.lock_error == 0;
  const bool reported = stats.locked_bytes == (may_lock ? 8 * kMiB : 0);
  options.lock = MemoryLock::kRequired;
  auto required = BlockMemory::Create(options, runtime.get());
  const Status status =
      required.ok() ? (*required)->Commit(8) : required.status();
  const bool refused =
      status.code() == StatusCode::kResourceExhausted &&
      status.message().find("RLIMIT_MEMLOCK") != std::string::npos &&
      (*required)->stats().committed_bytes == 0;
  std::_Exit(tried && reported && (may_lock ? status.ok() : refused) ? 0 : 1);
}

TEST(BlockMemoryDeathTest, LockThatIsNotGivenIsReportedOrRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LockWithoutPermission(), ::testing::ExitedWithCode(0), "");
}

// --- real limits, in a process of their own --------------------------------
// Each body below runs in a re-executed copy of this test (a "death test" that
// is expected to live), since limits cannot be lifted again.

#define EXPECT_IN_CHILD(cond, ...)                               \
  do {                                                           \
    if (!(cond)) {                                               \
      std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #cond, \
                   std::string(__VA_ARGS__).c_str());            \
      std::_Exit(1);                                             \
    }                                                            \
  } while (false)

constexpr int64_t kBlockBytes = 256 * kKiB;

struct Attempt {
  std::unique_ptr<BlockMemory> memory;  // null when refused
  Status status;
};

Attempt Try(Runtime* runtime, int64_t num_blocks,
            BlockMemoryOptions options = {}) {
  options.block_bytes = kBlockBytes;
  options.max_blocks = std::max(num_blocks, options.max_blocks);
  Result<std::unique_ptr<BlockMemory>> memory =
      BlockMemory::Create(options, runtime);
  if (!memory.ok()) return {nullptr, memory.status()};
  Status status = (*memory)->Commit(num_blocks);
  if (!status.ok()) return {nullptr, status};
  return {*std::move(memory), status};
}

// The N of "... N blocks would fit".
int64_t FittingBlocks(const Status& status) {
  const std::string text(status.message());
  const size_t colon = text.rfind(": ");
  return colon == std::string::npos ? -1 : std::atoll(&text[colon + 2]);
}

// All of it can be written to. Not under a sanitizer, whose shadow of what is
// written would take several times as much.
void Use(const BlockMemory& memory, int64_t num_blocks) {
  if (testing::kSanitized) return;
  std::memset(memory.base(), 1, static_cast<size_t>(num_blocks * kBlockBytes));
}

// The pool of 2 GiB is refused in the name of `limit`, nothing stays behind,
// and the number of blocks that the refusal offers is true.
void ExpectTrueRefusal(Runtime* runtime, const std::string& limit) {
  const int64_t before = StatmBytes(0);
  const Status refused = Try(runtime, 2 * kGiB / kBlockBytes).status;
  const std::string message = refused.ToString();
  EXPECT_IN_CHILD(refused.code() == StatusCode::kResourceExhausted, message);
  EXPECT_IN_CHILD(message.find(limit) != std::string::npos, message);
  EXPECT_IN_CHILD(StatmBytes(0) < before + 64 * kMiB,
                  "address space has leaked");
  const int64_t fitting = FittingBlocks(refused);
  EXPECT_IN_CHILD(fitting > 0, message);
  // A sanitizer's shadow takes of the same limit, and cannot be foreseen.
  const int64_t asked = testing::kSanitized ? fitting / 4 * 3 : fitting;
  const Attempt second = Try(runtime, asked);
  EXPECT_IN_CHILD(second.status.ok(),
                  second.status.ToString() + " after " + message);
  Use(*second.memory, asked);
}

void LimitAndTry(decltype(RLIMIT_AS) resource, const std::string& name,
                 int64_t bytes) {
  const auto runtime = MakeRuntime(2);
  // Threads and heaps of the runtime are there before the limit is set.
  EXPECT_IN_CHILD(Try(runtime.get(), 64).status.ok());
  rlimit limit{};
  EXPECT_IN_CHILD(getrlimit(resource, &limit) == 0);
  limit.rlim_cur = static_cast<rlim_t>(bytes);
  EXPECT_IN_CHILD(setrlimit(resource, &limit) == 0);
  ExpectTrueRefusal(runtime.get(), name);
  // Without the check the kernel refuses, and that is a value as well.
  const int64_t before = StatmBytes(0);
  const Status refused =
      Try(runtime.get(), 2 * kGiB / kBlockBytes, {.check_limits = false})
          .status;
  EXPECT_IN_CHILD(refused.code() == StatusCode::kResourceExhausted,
                  refused.ToString());
  EXPECT_IN_CHILD(StatmBytes(0) < before + 64 * kMiB,
                  "address space has leaked");
  std::_Exit(0);
}

class BlockMemoryLimitTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(BlockMemoryLimitTest, AddressSpaceLimitRefusesWithWhatFits) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's shadow does not fit under RLIMIT_AS";
  }
  EXPECT_EXIT(LimitAndTry(RLIMIT_AS, "RLIMIT_AS", StatmBytes(0) + 600 * kMiB),
              ::testing::ExitedWithCode(0), "");
}

TEST_F(BlockMemoryLimitTest, DataLimitRefusesWithWhatFits) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's shadow counts as data";
  }
  EXPECT_EXIT(LimitAndTry(RLIMIT_DATA, "RLIMIT_DATA", 512 * kMiB),
              ::testing::ExitedWithCode(0), "");
}

// The limit is lowered when growth has begun: what was there stays, usable.
// Without the check the kernel refuses half way, so that slabs are given back.
void ShrinkLimitAndGrow(bool check_limits) {
  const auto runtime = MakeRuntime(2);
  Attempt pool =
      Try(runtime.get(), 64,
          {.max_blocks = 2 * kGiB / kBlockBytes, .check_limits = check_limits});
  EXPECT_IN_CHILD(pool.status.ok(), pool.status.ToString());
  std::memset(pool.memory->base(), 7, 64 * kBlockBytes);
  rlimit limit{};
  getrlimit(RLIMIT_DATA, &limit);
  limit.rlim_cur = static_cast<rlim_t>(400 * kMiB);
  EXPECT_IN_CHILD(setrlimit(RLIMIT_DATA, &limit) == 0);
  const int64_t resident = StatmBytes(1);
  const int64_t slabs = pool.memory->stats().num_slabs;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const Status refused = pool.memory->Commit(kGiB / kBlockBytes);
    EXPECT_IN_CHILD(refused.code() == StatusCode::kResourceExhausted,
                    refused.ToString());
    EXPECT_IN_CHILD(pool.memory->stats().num_slabs == slabs);
    EXPECT_IN_CHILD(StatmBytes(1) < resident + 16 * kMiB, "memory has leaked");
  }
  for (int64_t i = 0; i < 64 * kBlockBytes; ++i) {
    EXPECT_IN_CHILD(pool.memory->base()[i] == std::byte{7});
  }
  const Status grown = pool.memory->Commit(256);
  EXPECT_IN_CHILD(grown.ok(), grown.ToString());
  EXPECT_IN_CHILD(
      IsZero(pool.memory->base() + 64 * kBlockBytes, 192 * kBlockBytes),
      "given back and taken again, memory is zero");
  std::_Exit(0);
}

TEST_F(BlockMemoryLimitTest, RefusedGrowthChangesNothing) {
  if (testing::kSanitized) {
    GTEST_SKIP() << "a sanitizer's shadow counts as data";
  }
  EXPECT_EXIT(ShrinkLimitAndGrow(true), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(ShrinkLimitAndGrow(false), ::testing::ExitedWithCode(0), "");
}

const std::string kMemoryCgroups = "/sys/fs/cgroup/memory/";

bool WriteFile(const std::string& path, int64_t number) {
  std::ofstream file(path);
  file << number << std::flush;
  return file.good();
}

// Why no memory cgroup can be made here; empty where one can.
std::string WhyNoCgroup(const std::string& directory) {
  if (access((kMemoryCgroups + "memory.limit_in_bytes").c_str(), F_OK) != 0) {
    return "no cgroup v1 memory controller at " + kMemoryCgroups;
  }
  if (mkdir(directory.c_str(), 0755) != 0) {
    return "cannot make " + directory + ": " + std::strerror(errno);
  }
  rmdir(directory.c_str());
  return "";
}

// Were a check missing, the kernel would kill this process and the test fail.
void OutgrowCgroup(const std::string& directory) {
  EXPECT_IN_CHILD(mkdir(directory.c_str(), 0755) == 0);
  EXPECT_IN_CHILD(WriteFile(directory + "/memory.limit_in_bytes", 320 * kMiB));
  EXPECT_IN_CHILD(WriteFile(directory + "/cgroup.procs", getpid()));
  const auto runtime = MakeRuntime(2);
  ExpectTrueRefusal(runtime.get(), "cgroup v1 memory /");
  // Explicit huge pages would come from elsewhere, so nothing is refused before
  // the first slab that did not get any; then each is checked.
  Attempt explicit_pages = Try(runtime.get(), 2 * kGiB / kBlockBytes,
                               {.huge_pages = HugePages::kExplicit});
  EXPECT_IN_CHILD(explicit_pages.status.ok() ||
                      explicit_pages.status.message().find("cgroup v1") !=
                          std::string::npos,
                  explicit_pages.status.ToString());
  explicit_pages.memory.reset();
  // In small steps, as a service grows: refused in time as well.
  Attempt pool = Try(runtime.get(), 1, {.max_blocks = 2 * kGiB / kBlockBytes});
  EXPECT_IN_CHILD(pool.status.ok(), pool.status.ToString());
  int64_t blocks = 1;
  Status status;
  while (status.ok() && blocks < 2 * kGiB / kBlockBytes) {
    status = pool.memory->Commit(blocks + 32);
    if (status.ok()) blocks += 32;
  }
  EXPECT_IN_CHILD(status.code() == StatusCode::kResourceExhausted,
                  status.ToString());
  EXPECT_IN_CHILD(blocks * kBlockBytes > 64 * kMiB, std::to_string(blocks));
  Use(*pool.memory, blocks);
  std::_Exit(0);
}

TEST_F(BlockMemoryLimitTest, CgroupSmallerThanThePoolRefusesAndNobodyDies) {
  const std::string prefix = kMemoryCgroups + "varlane_test_";
  const std::string why =
      WhyNoCgroup(prefix + "probe_" + std::to_string(getpid()));
  if (!why.empty()) GTEST_SKIP() << why;
  // Evaluated in the child, so its parent is this process.
  EXPECT_EXIT(OutgrowCgroup(prefix + std::to_string(getppid())),
              ::testing::ExitedWithCode(0), "");
  const std::string directory = prefix + std::to_string(getpid());
  // The child's exit may be seen before it has left its cgroup.
  for (int i = 0; rmdir(directory.c_str()) != 0 && errno == EBUSY && i < 100;
       ++i) {
    usleep(10'000);
  }
}

}  // namespace
}  // namespace varlane
