// MemoryAccount: who is granted what, beside whom, and what a refusal says.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/memory_account.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/machine_fixture.h"
#include "tests/testing/testing.h"

namespace varlane {
namespace {

using namespace testing;  // NOLINT(*using-namespace*)

// 64 GiB, 48 of them available, 1.28 in reserve: room for 46.72.
class MemoryAccountTest : public MachineTest {
 protected:
  std::unique_ptr<MemoryAccount> Open(int64_t cap_bytes = 0) {
    Result<std::unique_ptr<MemoryAccount>> account =
        MemoryAccount::Create({.root = root_, .cap_bytes = cap_bytes});
    EXPECT_TRUE(IsOk(account));
    return account.ok() ? std::move(account).value() : nullptr;
  }
  static int64_t Room(const MemoryAccount& account) {
    const auto report = account.Report();
    EXPECT_TRUE(IsOk(report));
    return report.ok() ? report->room_bytes : -1;
  }
  static constexpr int64_t kRoom = 48 * kGiB - 64 * kGiB / 50;
};

TEST_F(MemoryAccountTest, ClaimsTakeRoomAndGiveItBackWhenTheyGo) {
  const auto account = Open();
  EXPECT_EQ(Room(*account), kRoom);
  {
    Result<MemoryClaim> weights = account->Claim(
        {.use = MemoryUse::kWeights, .name = "model", .bytes = 16 * kGiB});
    VARLANE_ASSERT_OK(weights);
    EXPECT_EQ(Room(*account), kRoom - 16 * kGiB);
    MemoryClaim moved = std::move(*weights);
    MemoryClaim other;
    other = std::move(moved);
    EXPECT_EQ(other.bytes(), 16 * kGiB);
    EXPECT_EQ(moved.bytes(), 0);  // NOLINT(*use-after-move*)
    EXPECT_EQ(Room(*account), kRoom - 16 * kGiB);
  }
  EXPECT_EQ(Room(*account), kRoom);
}

TEST_F(MemoryAccountTest, WhatIsTouchedIsInTheLimitsUseAndNotCountedTwice) {
  const auto account = Open();
  Result<MemoryClaim> kv =
      account->Claim({.use = MemoryUse::kKvCache, .bytes = 10 * kGiB});
  VARLANE_ASSERT_OK(kv);
  kv->SetResident(4 * kGiB);
  EXPECT_EQ(Room(*account), kRoom - 6 * kGiB);
  kv->SetResident(99 * kGiB);  // clamped
  EXPECT_EQ(kv->resident_bytes(), 10 * kGiB);
  EXPECT_EQ(Room(*account), kRoom);
  VARLANE_EXPECT_OK(kv->Resize(2 * kGiB));
  EXPECT_EQ(kv->resident_bytes(), 2 * kGiB);
  EXPECT_EQ(Room(*account), kRoom);
}

TEST_F(MemoryAccountTest, ARefusalNamesEveryTermAndWhatToChange) {
  const auto account = Open();
  const Result<MemoryClaim> kv = account->Claim(
      {.use = MemoryUse::kKvCache, .name = "pool", .bytes = 40 * kGiB});
  VARLANE_ASSERT_OK(kv);
  const Result<MemoryClaim> refused = account->Claim(
      {.use = MemoryUse::kEmbedder, .name = "tokens", .bytes = 8 * kGiB});
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(),
            "8 GiB of embedder tokens do not fit: host RAM (limit 64 GiB, 16 "
            "GiB in use, 1.28 GiB in reserve, 40 GiB promised) has 6.72 GiB "
            "left; ask for at most 6.72 GiB, release some of the 40 GiB of KV "
            "cache pool, or free 1.28 GiB or raise the limit by as much");
  // What it advises is granted, to the byte; and one byte more is not.
  const int64_t most = Room(*account);
  EXPECT_FALSE(account->Claim({.bytes = most + 1}).ok());
  VARLANE_EXPECT_OK(account->Claim({.bytes = most}));
}

TEST_F(MemoryAccountTest, ARefusedResizeChangesNothing) {
  const auto account = Open();
  Result<MemoryClaim> claim = account->Claim({.bytes = 10 * kGiB});
  VARLANE_ASSERT_OK(claim);
  EXPECT_EQ(claim->Resize(60 * kGiB).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(claim->Resize(-1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(claim->bytes(), 10 * kGiB);
  EXPECT_EQ(Room(*account), kRoom - 10 * kGiB);
  VARLANE_EXPECT_OK(claim->Resize(kRoom));
  EXPECT_EQ(Room(*account), 0);
  claim->Release();
  EXPECT_EQ(claim->Resize(1).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Room(*account), kRoom);
}

TEST_F(MemoryAccountTest, TheCapBoundsAllClaimsTouchedOrNot) {
  const auto account = Open(8 * kGiB);
  Result<MemoryClaim> claim = account->Claim({.use = MemoryUse::kWeights,
                                              .bytes = 6 * kGiB,
                                              .resident_bytes = 6 * kGiB});
  VARLANE_ASSERT_OK(claim);
  EXPECT_EQ(Room(*account), 2 * kGiB);
  const Result<MemoryClaim> refused =
      account->Claim({.bytes = 3 * kGiB, .resident_bytes = 3 * kGiB});
  EXPECT_NE(refused.status().message().find("the account's cap (limit 8 GiB, 6 "
                                            "GiB in use, 0 B in reserve, 0 B "
                                            "promised) has 2 GiB left"),
            std::string_view::npos)
      << refused.status().message();
}

TEST_F(MemoryAccountTest, ANodeHasItsOwnRoom) {
  WriteNodes();  // 11 GiB available on node 0, 20 on node 2
  const auto account = Open();
  const Result<MemoryClaim> first =
      account->Claim({.bytes = 8 * kGiB, .node = 0});
  VARLANE_ASSERT_OK(first);
  const Result<MemoryClaim> refused =
      account->Claim({.bytes = 4 * kGiB, .node = 0});
  EXPECT_EQ(refused.status().message(),
            "4 GiB of embedder do not fit on NUMA node 0: of 11 GiB available "
            "there 8 GiB are promised to others; ask for at most 3 GiB there, "
            "or for any node");
  VARLANE_EXPECT_OK(account->Claim({.bytes = 4 * kGiB, .node = 2}));
  VARLANE_EXPECT_OK(account->Claim({.bytes = 4 * kGiB}));
  EXPECT_EQ(account->Claim({.bytes = 1, .node = 7}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST_F(MemoryAccountTest, APlanSeesWhatIsPromisedToOthers) {
  const auto account = Open();
  const Result<MemoryClaim> claim = account->Claim({.bytes = 20 * kGiB});
  VARLANE_ASSERT_OK(claim);
  const Result<MemoryLimits> limits = account->Limits();
  VARLANE_ASSERT_OK(limits);
  EXPECT_EQ(limits->available_bytes, 28 * kGiB);
  EXPECT_EQ(limits->room_bytes, kRoom - 20 * kGiB);
}

TEST_F(MemoryAccountTest, TheDerivationIsPrintedTermByTerm) {
  const auto account = Open(50 * kGiB);
  Result<MemoryClaim> claim = account->Claim(
      {.use = MemoryUse::kScratch, .name = "workers", .bytes = 2 * kGiB});
  VARLANE_ASSERT_OK(claim);
  claim->SetResident(kGiB);
  const auto report = account->Report();
  VARLANE_ASSERT_OK(report);
  EXPECT_EQ(report->ToString(),
            "claims\n"
            "  2 GiB of scratch workers: 1 GiB touched, 1 GiB promised\n"
            "limits\n"
            "  host RAM: 64 GiB - 16 GiB in use - 1.28 GiB in reserve - 1 GiB "
            "promised = 45.72 GiB left, which binds\n"
            "  the account's cap: 50 GiB - 2 GiB in use - 0 B in reserve - 0 B "
            "promised = 48 GiB left\n");
}

TEST_F(MemoryAccountTest, BadRequestsAreNamed) {
  const auto account = Open();
  EXPECT_EQ(account->Claim({.bytes = -1}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(
      account->Claim({.bytes = 1, .resident_bytes = 2}).status().message(),
      "resident_bytes = 2, must be in [0, bytes = 1]");
  EXPECT_EQ(
      MemoryAccount::Create({.root = root_, .cap_bytes = -1}).status().code(),
      StatusCode::kInvalidArgument);
  EXPECT_EQ(MemoryAccount::Create({.root = root_ + "/nowhere"}).status().code(),
            StatusCode::kUnavailable);
}

TEST_F(MemoryAccountTest, AClaimMayOutliveItsAccount) {
  auto account = Open();
  Result<MemoryClaim> claim = account->Claim({.bytes = kGiB});
  VARLANE_ASSERT_OK(claim);
  account.reset();
  EXPECT_EQ(claim->bytes(), kGiB);
  VARLANE_EXPECT_OK(claim->Resize(2 * kGiB));
}

// More threads than fit, each for a share that all but two could have.
TEST_F(MemoryAccountTest, ConcurrentClaimsNeverPassTheRoom) {
  const auto account = Open(8 * kGiB);
  for (int round = 0; round < 20; ++round) {
    std::vector<MemoryClaim> claims(4);
    std::vector<std::thread> threads;
    std::atomic<int> granted = 0;
    for (MemoryClaim& slot : claims) {
      threads.emplace_back([&] {
        Result<MemoryClaim> claim = account->Claim({.bytes = 3 * kGiB});
        if (!claim.ok()) return;
        slot = std::move(*claim);
        ++granted;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(granted, 2);
  }
}

}  // namespace
}  // namespace varlane
