// Proves that memory is reserved, committed, populated and given back, and that
// HugePageAllocator hands it out.
//
// SPDX-License-Identifier: Apache-2.0

#include "runtime/numa_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "base/os_calls.h"
#include "runtime/page_sizes.h"
#include "tests/testing/testing.h"
#include "varlane/huge_page_allocator.h"

namespace varlane {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// A reservation that frees itself.
class Reservation {
 public:
  Reservation(int64_t bytes, int64_t alignment) : bytes_(bytes) {
    Result<std::byte*> data = ReserveAddressSpace(bytes, alignment);
    EXPECT_TRUE(testing::IsOk(data));
    if (data.ok()) data_ = *data;
  }
  ~Reservation() { ReleaseAddressSpace(data_, bytes_); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_;
};

// Pages of the range that are in RAM, by the kernel's own count.
int64_t ResidentBytes(std::byte* data, int64_t bytes) {
  const int64_t page = BasePageBytes();
  std::vector<unsigned char> in_ram(static_cast<size_t>(bytes / page));
  if (mincore(data, static_cast<size_t>(bytes), in_ram.data()) != 0) return -1;
  int64_t total = 0;
  for (const unsigned char flag : in_ram) total += (flag & 1) * page;
  return total;
}

// Whether the kernel can read the byte, asked without risking a fault here.
bool IsReadable(const std::byte* data) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return false;
  const bool readable = write(ends[1], data, 1) == 1;
  EXPECT_TRUE(readable || errno == EFAULT);
  close(ends[0]);
  close(ends[1]);
  return readable;
}

int64_t FreeExplicitPages() {
  std::ifstream file(
      "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
  int64_t pages = 0;
  file >> pages;
  return file ? pages : 0;
}

TEST(NumaMemoryTest, ReservesFarMoreThanTheMachineHas) {
  // TSan limits the address space that programs may use.
  const int64_t bytes = int64_t{64} << 30;
  const Reservation space(bytes, kHugePageBytes);
  ASSERT_NE(space.data(), nullptr);
  EXPECT_FALSE(IsReadable(space.data()));
  EXPECT_FALSE(IsReadable(space.data() + bytes - 1));
}

TEST(NumaMemoryTest, HonoursEveryAlignment) {
  for (int64_t alignment = 1; alignment <= 64 * kMiB; alignment *= 4) {
    const Reservation space(3 * BasePageBytes(), alignment);
    ASSERT_NE(space.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(space.data()) %
                  static_cast<uintptr_t>(alignment),
              0u)
        << alignment;
  }
}

TEST(NumaMemoryTest, CommitsOnlyWhatIsAsked) {
  const Reservation space(8 * kMiB, kHugePageBytes);
  VARLANE_ASSERT_OK(
      CommitMemory(space.data() + 2 * kMiB, 2 * kMiB, HugePages::kOff));
  EXPECT_FALSE(IsReadable(space.data() + 2 * kMiB - 1));
  EXPECT_TRUE(IsReadable(space.data() + 2 * kMiB));
  EXPECT_TRUE(IsReadable(space.data() + 4 * kMiB - 1));
  EXPECT_FALSE(IsReadable(space.data() + 4 * kMiB));
}

TEST(NumaMemoryTest, PopulateTakesEveryPageAndKeepsContents) {
  const Reservation space(4 * kMiB, kHugePageBytes);
  VARLANE_ASSERT_OK(CommitMemory(space.data(), 4 * kMiB, HugePages::kOff));
  EXPECT_EQ(ResidentBytes(space.data(), 4 * kMiB), 0);
  space.data()[5000] = std::byte{42};
  VARLANE_ASSERT_OK(PopulateMemory(space.data(), 4 * kMiB));
  EXPECT_EQ(ResidentBytes(space.data(), 4 * kMiB), 4 * kMiB);
  EXPECT_EQ(space.data()[5000], std::byte{42});
  EXPECT_EQ(space.data()[5001], std::byte{0});
}

TEST(NumaMemoryTest, PopulatingWhatIsNotCommittedIsAnError) {
  const Reservation space(4 * kMiB, kHugePageBytes);
  VARLANE_ASSERT_OK(CommitMemory(space.data(), 2 * kMiB, HugePages::kOff));
  const Status status = PopulateMemory(space.data(), 4 * kMiB);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition)
      << status.ToString();
}

TEST(NumaMemoryTest, DecommitGivesPagesBackAndFaultsAgain) {
  const Reservation space(4 * kMiB, kHugePageBytes);
  for (int round = 0; round < 3; ++round) {
    VARLANE_ASSERT_OK(
        CommitMemory(space.data(), 4 * kMiB, HugePages::kTransparent));
    EXPECT_EQ(space.data()[0], std::byte{0}) << "round " << round;
    std::memset(space.data(), 0xff, 4 * kMiB);
    VARLANE_ASSERT_OK(DecommitMemory(space.data(), 2 * kMiB));
    EXPECT_EQ(ResidentBytes(space.data(), 2 * kMiB), 0);
    EXPECT_EQ(ResidentBytes(space.data() + 2 * kMiB, 2 * kMiB), 2 * kMiB);
    EXPECT_FALSE(IsReadable(space.data()));
    EXPECT_EQ(space.data()[2 * kMiB], std::byte{0xff});
    VARLANE_ASSERT_OK(DecommitMemory(space.data() + 2 * kMiB, 2 * kMiB));
  }
}

TEST(NumaMemoryTest, HugePageBytesNeverExceedsTheRange) {
  const Reservation space(8 * kMiB, kHugePageBytes);
  Result<HugePages> got =
      CommitMemory(space.data(), 8 * kMiB, HugePages::kTransparent);
  VARLANE_ASSERT_OK(got);
  VARLANE_ASSERT_OK(PopulateMemory(space.data(), 8 * kMiB));
  Result<int64_t> all = HugePageBytes(space.data(), 8 * kMiB);
  VARLANE_ASSERT_OK(all);
  EXPECT_EQ(*all % kHugePageBytes, 0);
  EXPECT_LE(*all, 8 * kMiB);
  Result<int64_t> part = HugePageBytes(space.data(), 2 * kMiB);
  VARLANE_ASSERT_OK(part);
  EXPECT_LE(*part, 2 * kMiB);
  std::ifstream mode("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(mode, text);
  if (*got != HugePages::kTransparent ||
      text.find("[never]") != std::string::npos || *all == 0) {
    GTEST_SKIP() << "no transparent huge page to be had here: " << text;
  }
  EXPECT_EQ(*part, 2 * kMiB);
}

TEST(NumaMemoryTest, OffMeansNoHugePages) {
  const Reservation space(8 * kMiB, kHugePageBytes);
  Result<HugePages> got = CommitMemory(space.data(), 8 * kMiB, HugePages::kOff);
  VARLANE_ASSERT_OK(got);
  EXPECT_EQ(*got, HugePages::kOff);
  VARLANE_ASSERT_OK(PopulateMemory(space.data(), 8 * kMiB));
  Result<int64_t> huge = HugePageBytes(space.data(), 8 * kMiB);
  VARLANE_ASSERT_OK(huge);
  EXPECT_EQ(*huge, 0);
}

TEST(NumaMemoryTest, ExplicitFallsBackAndSaysWhatItGot) {
  const Reservation space(4 * kMiB, kHugePageBytes);
  const bool pool_has_pages = FreeExplicitPages() >= 2;
  Result<HugePages> got =
      CommitMemory(space.data(), 4 * kMiB, HugePages::kExplicit);
  VARLANE_ASSERT_OK(got);
  if (pool_has_pages) {
    EXPECT_EQ(*got, HugePages::kExplicit);
  } else {
    EXPECT_NE(*got, HugePages::kExplicit);
  }
  VARLANE_ASSERT_OK(PopulateMemory(space.data(), 4 * kMiB));
  std::memset(space.data(), 1, 4 * kMiB);
  if (pool_has_pages) {
    Result<int64_t> huge = HugePageBytes(space.data(), 4 * kMiB);
    VARLANE_ASSERT_OK(huge);
    EXPECT_EQ(*huge, 4 * kMiB);
  }
  VARLANE_ASSERT_OK(DecommitMemory(space.data(), 4 * kMiB));
  EXPECT_FALSE(IsReadable(space.data()));
}

TEST(NumaMemoryTest, ExplicitOnHalfAHugePageIsNotExplicit) {
  const Reservation space(4 * kMiB, kHugePageBytes);
  Result<HugePages> got =
      CommitMemory(space.data(), 1 * kMiB, HugePages::kExplicit);
  VARLANE_ASSERT_OK(got);
  EXPECT_NE(*got, HugePages::kExplicit);
}

TEST(NumaMemoryTest, RefusalsNameTheValue) {
  EXPECT_EQ(ReserveAddressSpace(0, 4096).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(ReserveAddressSpace(4096, 3000).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(ReserveAddressSpace(INT64_MAX, 4096).status().code(),
            StatusCode::kInvalidArgument);
  const Status too_much = ReserveAddressSpace(int64_t{1} << 56, 4096).status();
  EXPECT_EQ(too_much.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(too_much.message().find("64 PiB"), std::string_view::npos)
      << too_much.message();
  EXPECT_NE(too_much.message().find("Cannot allocate memory"),
            std::string_view::npos)
      << too_much.message();
  const Reservation space(kMiB, 4096);
  const Status odd = CommitMemory(space.data(), 100, HugePages::kOff).status();
  EXPECT_EQ(odd.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(odd.message().find("bytes = 100"), std::string_view::npos);
  EXPECT_EQ(PopulateMemory(space.data() + 1, 4096).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(DecommitMemory(nullptr, 4096).code(), StatusCode::kInvalidArgument);
  ReleaseAddressSpace(nullptr, 4096);
}

// --- placement ---------------------------------------------------------------

// Whether the kernel answers at all: containers may forbid it to.
bool CanQueryPages() {
  int value = 0;
  void* page = &value;
  int node = -1;
  return os::QueryPages(1, &page, &node) == 0 && node >= 0;
}

TEST(NumaMemoryTest, PagesAreCountedWhereTheyAre) {
  if (!CanQueryPages()) GTEST_SKIP() << "move_pages is refused here";
  // More than one question's worth, and no multiple of it.
  const int64_t page = BasePageBytes();
  const int64_t bytes = 1300 * page;
  const Reservation space(bytes, kHugePageBytes);
  VARLANE_ASSERT_OK(CommitMemory(space.data(), bytes, HugePages::kOff));
  PagePlacement found = QueryPlacement(space.data(), bytes, -1);
  EXPECT_EQ(found.absent, bytes) << "nothing was touched";
  VARLANE_ASSERT_OK(PopulateMemory(space.data(), 700 * page));
  found = QueryPlacement(space.data(), bytes, -1);
  EXPECT_EQ(found.on_node, 700 * page);
  EXPECT_EQ(found.absent, 600 * page);
  EXPECT_EQ(found.elsewhere + found.unknown + found.error, 0);
  found = QueryPlacement(space.data(), bytes, 1000);
  EXPECT_EQ(found.elsewhere, 700 * page) << "no page is on node 1000";
  EXPECT_EQ(found.on_node, 0);
}

TEST(NumaMemoryTest, ARefusedQueryLeavesPagesUnknown) {
  const int64_t page = BasePageBytes();
  const Reservation space(600 * page, kHugePageBytes);
  VARLANE_ASSERT_OK(CommitMemory(space.data(), 600 * page, HugePages::kOff));
  VARLANE_ASSERT_OK(PopulateMemory(space.data(), 600 * page));
  for (const int error : {EPERM, ENOSYS}) {
    OsFaults::FailAfter(0, error);  // the first of two questions
    const PagePlacement found = QueryPlacement(space.data(), 600 * page, -1);
    OsFaults::Disarm();
    EXPECT_EQ(found.error, error);
    EXPECT_EQ(found.unknown, 512 * page + (CanQueryPages() ? 0 : 88 * page));
  }
}

TEST(NumaMemoryTest, PreferringANodeSaysWhatTheKernelSaid) {
  const Reservation space(kMiB, kHugePageBytes);
  VARLANE_ASSERT_OK(CommitMemory(space.data(), kMiB, HugePages::kOff));
  OsFaults::FailAfter(0, EPERM);
  EXPECT_EQ(PreferNode(space.data(), kMiB, 0), EPERM);
  OsFaults::Disarm();
  EXPECT_EQ(PreferNode(space.data(), kMiB, -1), EINVAL);
  EXPECT_EQ(PreferNode(space.data(), kMiB, 100000), EINVAL);
  const int error = PreferNode(space.data(), kMiB, 0);
  EXPECT_TRUE(error == 0 || error == EPERM || error == ENOSYS) << error;
  VARLANE_EXPECT_OK(PopulateMemory(space.data(), kMiB));
  EXPECT_EQ(ResidentBytes(space.data(), kMiB), kMiB);
}

// --- the allocator

TEST(HugePageAllocatorTest, LargeMemoryStandsOnHugePagesAndIsZero) {
  HugePageVector<float> values(static_cast<size_t>(3 * kMiB) / sizeof(float));
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kHugePageBytes, 0U);
  EXPECT_TRUE(std::all_of(values.begin(), values.end(),
                          [](float value) { return value == 0; }));
  const Result<int64_t> huge = HugePageBytes(data, 4 * kMiB);
  VARLANE_ASSERT_OK(huge.status());
  std::vector<std::string> warnings;
  const std::string mode = DetectTransparentHugePages(&warnings);
  if (mode != "always" && mode != "madvise") {
    GTEST_SKIP() << "no transparent huge pages here: " << mode;
  }
  EXPECT_GT(*huge, 0);
}

TEST(HugePageAllocatorTest, EverySizeIsUsableAndFreed) {
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{64}, kMiB - 1,
                              kMiB, kMiB + 1, 2 * kMiB, 2 * kMiB + 1}) {
    SCOPED_TRACE(bytes);
    const auto size = static_cast<size_t>(bytes);
    auto* data = static_cast<char*>(AllocateHugePages(size));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0U);
    std::memset(data, 1, size);
    FreeHugePages(data, size);
    if (bytes < kMiB) continue;
    errno = 0;
    EXPECT_NE(os::Madvise(data, 1, MADV_NORMAL), 0) << "still mapped";
    EXPECT_EQ(errno, ENOMEM);
  }
  FreeHugePages(nullptr, 0);
  FreeHugePages(nullptr, static_cast<size_t>(4 * kMiB));
}

TEST(HugePageAllocatorTest, WhatCannotBeHadIsBadAlloc) {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  EXPECT_THROW((void)AllocateHugePages(kMost), std::bad_alloc);
  EXPECT_THROW((void)AllocateHugePages(kMost / 4), std::bad_alloc);
  EXPECT_THROW((void)HugePageAllocator<float>().allocate(kMost / 2),
               std::bad_array_new_length);
  for (const int after : {0, 1}) {  // reserving, committing
    OsFaults::FailAfter(after, ENOMEM);
    EXPECT_THROW((void)AllocateHugePages(static_cast<size_t>(4 * kMiB)),
                 std::bad_alloc)
        << after;
    OsFaults::Disarm();
  }
}

}  // namespace
}  // namespace varlane
