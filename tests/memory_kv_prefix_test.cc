// Prefixes through the pool's public face: what is shared, copied, evicted,
// counted against quotas; then random operations that read everything back.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/testing/pools.h"
#include "tests/testing/runtimes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/testing.h"
#include "tests/testing/tokens.h"
#include "varlane/kv_pool.h"

namespace varlane {
namespace {

using testing::From;
using testing::Mix;
using testing::operator+;
using testing::Tokens;

constexpr int kBlockSize = 16;
constexpr KvLayout kLayout = {.dtype = DType::kF32,
                              .num_layers = 1,
                              .num_kv_heads = 1,
                              .head_size = 32,
                              .v_head_size = 32,
                              .block_size = kBlockSize};

Runtime* SharedRuntime() {
  static const std::unique_ptr<Runtime> runtime = testing::MakeRuntime(2);
  return runtime.get();
}

std::unique_ptr<KvPool> MakePool(int64_t num_blocks, int64_t max_blocks = 0) {
  return testing::MakePool({.layout = kLayout,
                            .num_blocks = num_blocks,
                            .max_blocks = max_blocks,
                            .huge_pages = HugePages::kOff,
                            .prefix_cache = true},
                           SharedRuntime());
}

void WriteSlot(const KvPool& pool, int64_t slot, uint32_t value) {
  const KvView view = pool.view();
  const int64_t block = slot / kBlockSize;
  const int offset = static_cast<int>(slot % kBlockSize);
  std::memcpy(view.k(block, 0, 0) + 4 * kLayout.k_offset(offset, 0), &value, 4);
  std::memcpy(view.v(block, 0, 0) + 4 * kLayout.v_offset(offset, 31), &value,
              4);
}

bool SlotHolds(const KvPool& pool, int64_t slot, uint32_t value) {
  const KvView view = pool.view();
  const int64_t block = slot / kBlockSize;
  const int offset = static_cast<int>(slot % kBlockSize);
  return std::memcmp(view.k(block, 0, 0) + 4 * kLayout.k_offset(offset, 0),
                     &value, 4) == 0 &&
         std::memcmp(view.v(block, 0, 0) + 4 * kLayout.v_offset(offset, 31),
                     &value, 4) == 0;
}

// A sequence and its tokens, all computed and committed.
struct Sequence {
  SeqId id = -1;
  TenantId tenant = 0;
  Tokens tokens;
};

// Every position holds what its tokens say.
void ExpectContents(const KvPool& pool, const Sequence& seq) {
  const Result<int64_t> length = pool.Length(seq.id);
  VARLANE_ASSERT_OK(length);
  ASSERT_EQ(*length, std::ssize(seq.tokens));
  std::vector<int64_t> slots(seq.tokens.size());
  VARLANE_ASSERT_OK(pool.CopySlotMapping(seq.id, 0, slots));
  auto value = static_cast<uint32_t>(seq.tenant);
  for (size_t i = 0; i < slots.size(); ++i) {
    value = Mix(value, seq.tokens[i]);
    ASSERT_TRUE(SlotHolds(pool, slots[i], value)) << "position " << i;
  }
}

// Appends `more`, computes and commits it. False when the pool says wait.
bool Compute(KvPool* pool, Sequence* seq, const Tokens& more) {
  const auto blocks_of = [](size_t count) {
    return static_cast<int64_t>((count + kBlockSize - 1) / kBlockSize);
  };
  const int64_t free_blocks = pool->free_blocks();
  const Result<Admission> room = pool->Append(seq->id, std::ssize(more));
  VARLANE_EXPECT_OK(room);
  if (!room.ok()) return false;
  if (!room->admitted()) {
    // With one more for a tail that is shared, it did not fit.
    EXPECT_GT(blocks_of(seq->tokens.size() + more.size()) -
                  blocks_of(seq->tokens.size()) + 1,
              free_blocks);
    return false;
  }
  const size_t begin = seq->tokens.size();
  auto value = static_cast<uint32_t>(seq->tenant);
  for (const int32_t token : seq->tokens) value = Mix(value, token);
  seq->tokens.insert(seq->tokens.end(), more.begin(), more.end());
  std::vector<int64_t> slots(more.size());
  VARLANE_EXPECT_OK(
      pool->CopySlotMapping(seq->id, static_cast<int64_t>(begin), slots));
  for (size_t i = 0; i < more.size(); ++i) {
    value = Mix(value, more[i]);
    WriteSlot(*pool, slots[i], value);
  }
  VARLANE_EXPECT_OK(
      pool->CommitTokens(seq->id, static_cast<int64_t>(begin), more));
  return true;
}

Sequence Start(KvPool* pool, const Tokens& prompt, PrefixMatch* match,
               TenantId tenant = 0) {
  const Result<PrefixMatch> found =
      pool->MatchPrefix({.tenant = tenant}, prompt);
  VARLANE_EXPECT_OK(found);
  *match = found.ok() ? *found : PrefixMatch{};
  return {.id = match->seq,
          .tenant = tenant,
          .tokens = Tokens(prompt.begin(), prompt.begin() + match->tokens)};
}

// A sequence with all of `prompt` computed.
Sequence Finished(KvPool* pool, const Tokens& prompt, TenantId tenant = 0) {
  PrefixMatch match;
  Sequence seq = Start(pool, prompt, &match, tenant);
  EXPECT_TRUE(
      Compute(pool, &seq, Tokens(prompt.begin() + match.tokens, prompt.end())));
  return seq;
}

TEST(KvPrefixTest, AFreedPromptIsFoundAgain) {
  const auto pool = MakePool(16);
  const Sequence first = Finished(pool.get(), From(1, 40));
  VARLANE_ASSERT_OK(pool->Free(first.id));
  EXPECT_EQ(pool->stats().cached_blocks, 2);
  EXPECT_EQ(pool->free_blocks(), 16);
  PrefixMatch match;
  const Sequence second = Start(pool.get(), From(1, 40), &match);
  EXPECT_EQ(match.tokens, 32);
  EXPECT_EQ(match.shared_blocks, 2);
  EXPECT_EQ(match.cached_blocks, 2);
  EXPECT_EQ(match.copied_tokens, 0);
  EXPECT_EQ(pool->free_blocks(), 14);
  ExpectContents(*pool, second);
  const Sequence third = Start(pool.get(), From(1, 40), &match);
  EXPECT_EQ(match.cached_blocks, 0);
  EXPECT_EQ(pool->free_blocks(), 14);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, ABlockThatBeginsAlikeIsCopied) {
  const auto pool = MakePool(16);
  const Sequence first = Finished(pool.get(), From(1, 48));
  PrefixMatch match;
  Sequence second = Start(pool.get(), From(1, 39) + From(900, 9), &match);
  EXPECT_EQ(match.tokens, 39);
  EXPECT_EQ(match.shared_blocks, 2);
  EXPECT_EQ(match.copied_tokens, 7);
  EXPECT_EQ(pool->prefix_stats().copied_blocks, 1);
  ExpectContents(*pool, second);
  ASSERT_TRUE(Compute(pool.get(), &second, From(900, 9)));
  ExpectContents(*pool, second);
  ExpectContents(*pool, first);
  // All of a known prompt but its last token, so that one row is left.
  const Sequence third = Start(pool.get(), From(1, 48), &match);
  EXPECT_EQ(match.tokens, 47);
  EXPECT_EQ(match.copied_tokens, 15);
  ExpectContents(*pool, third);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, WithoutABlockToCopyToTheRestIsComputed) {
  const auto pool = MakePool(3);
  const Sequence first = Finished(pool.get(), From(1, 48));
  PrefixMatch match;
  const Sequence second = Start(pool.get(), From(1, 47), &match);
  EXPECT_EQ(match.tokens, 32);
  EXPECT_EQ(match.copied_tokens, 0);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, TwoThatComputedTheSameKeepOneCopy) {
  const auto pool = MakePool(16);
  const SeqId a = pool->CreateSequence();
  const SeqId b = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(a, 32));
  VARLANE_ASSERT_OK(pool->Append(b, 32));
  EXPECT_EQ(pool->free_blocks(), 12);
  VARLANE_ASSERT_OK(pool->CommitTokens(a, 0, From(1, 32)));
  VARLANE_ASSERT_OK(pool->CommitTokens(b, 0, From(1, 32)));
  EXPECT_EQ(pool->free_blocks(), 14);
  EXPECT_EQ(pool->prefix_stats().duplicate_blocks, 2);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, CommitsMayBeRepeatedButHaveNoGaps) {
  const auto pool = MakePool(16);
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(pool->Append(seq, 20));
  VARLANE_EXPECT_OK(pool->CommitTokens(seq, 0, From(1, 10)));
  VARLANE_EXPECT_OK(pool->CommitTokens(seq, 0, From(1, 5)));
  EXPECT_EQ(pool->CommitTokens(seq, 11, From(12, 2)).ToString(),
            "OUT_OF_RANGE: begin = 11, but of seq = 0 only 10 tokens are "
            "committed so far");
  EXPECT_EQ(pool->CommitTokens(seq, 5, From(6, 16)).code(),
            StatusCode::kOutOfRange);
  VARLANE_EXPECT_OK(pool->CommitTokens(seq, 5, From(6, 15)));
  EXPECT_EQ(pool->CommitTokens(99, 0, From(1, 1)).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(pool->FindPrefix(0, From(1, 17))->shared_blocks, 1);
  EXPECT_EQ(pool->FindPrefix(0, From(1, 16))->shared_blocks, 0);
}

TEST(KvPrefixTest, CachedBlocksMakeRoomAndAreGoneThen) {
  const auto pool = MakePool(4);
  VARLANE_ASSERT_OK(pool->Free(Finished(pool.get(), From(1, 64)).id));
  EXPECT_EQ(pool->stats().cached_blocks, 4);
  Sequence other = Finished(pool.get(), From(500, 33));
  EXPECT_EQ(pool->stats().cached_blocks, 1);
  EXPECT_EQ(pool->stats().evicted_blocks, 3);
  EXPECT_EQ(pool->FindPrefix(0, From(1, 64))->tokens, 16);
  EXPECT_EQ(pool->EvictCached(9), 1);
  EXPECT_EQ(pool->FindPrefix(0, From(1, 64))->tokens, 0);
  ExpectContents(*pool, other);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, PinnedPrefixesStay) {
  const auto pool = MakePool(4);
  VARLANE_ASSERT_OK(pool->Free(Finished(pool.get(), From(1, 64)).id));
  const Result<PrefixPin> pin = pool->PinPrefix(0, From(1, 40));
  VARLANE_ASSERT_OK(pin);
  EXPECT_EQ(pin->tokens, 32);
  EXPECT_EQ(pool->free_blocks(), 2);
  EXPECT_EQ(pool->EvictCached(9), 2);
  EXPECT_EQ(pool->FindPrefix(0, From(1, 64))->tokens, 32);
  VARLANE_EXPECT_OK(pool->UnpinPrefix(pin->id));
  EXPECT_EQ(pool->UnpinPrefix(pin->id).code(), StatusCode::kNotFound);
  EXPECT_EQ(pool->EvictCached(9), 2);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, AQuotaBoundsWhatIsTaken) {
  const auto pool = MakePool(16);
  VARLANE_ASSERT_OK(pool->Free(Finished(pool.get(), From(1, 64), 7).id));
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 0);
  VARLANE_ASSERT_OK(pool->SetTenantQuota(7, 3));
  PrefixMatch match;
  const Sequence first = Start(pool.get(), From(1, 65), &match, 7);
  EXPECT_EQ(match.tokens, 48);
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 3);
  // Shared ones count once.
  const Sequence second = Start(pool.get(), From(1, 65), &match, 7);
  EXPECT_EQ(match.tokens, 48);
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 3);
  // Another tenant finds nothing of it.
  const Sequence other = Start(pool.get(), From(1, 65), &match, 8);
  EXPECT_EQ(match.tokens, 0);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
  for (const SeqId seq : {first.id, second.id, other.id}) {
    VARLANE_EXPECT_OK(pool->Free(seq));
  }
  EXPECT_EQ(pool->tenant_stats(7).used_blocks, 0);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, MovedBlocksAreFoundWhereTheyAre) {
  const auto pool = MakePool(2048, 4096);
  const Sequence low = Finished(pool.get(), From(1000, 16 * 1500));
  const Sequence high = Finished(pool.get(), From(1, 80));
  VARLANE_ASSERT_OK(pool->Free(low.id));
  EXPECT_EQ(pool->EvictCached(1400), 1400);
  VARLANE_ASSERT_OK(pool->Free(high.id));
  const Result<KvResize> shrunk = pool->Shrink(1536);
  VARLANE_ASSERT_OK(shrunk);
  EXPECT_GT(shrunk->moved_blocks, 0);
  PrefixMatch match;
  const Sequence again = Start(pool.get(), From(1, 81), &match);
  EXPECT_EQ(match.tokens, 80);
  ExpectContents(*pool, again);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

// While a step is outstanding, too: nobody reads a block that none references.
TEST(KvPrefixTest, PrefixesSurviveMemoryThatIsGivenBackForAWhile) {
  const auto pool = MakePool(2048);
  const Sequence low = Finished(pool.get(), From(1000, 16 * 1500));
  const Sequence high = Finished(pool.get(), From(1, 80));
  VARLANE_ASSERT_OK(pool->Truncate(low.id, 16 * 100));
  VARLANE_ASSERT_OK(pool->Free(high.id));
  EXPECT_EQ(pool->stats().cached_blocks, 1405);
  pool->BeginStep();
  const Result<KvResize> given = pool->GiveBack({.bytes = int64_t{4} << 20});
  pool->EndStep();
  VARLANE_ASSERT_OK(given);
  EXPECT_EQ(given->capacity_blocks, 1024);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
  // For 1405 cached blocks there are 924 places: the latest stay.
  PrefixMatch match;
  const Sequence again = Start(pool.get(), From(1, 81), &match);
  EXPECT_EQ(match.tokens, 80);
  ExpectContents(*pool, again);
  VARLANE_ASSERT_OK(pool->TakeBack(int64_t{1} << 30));
  EXPECT_EQ(pool->capacity_blocks(), 2048);
  ExpectContents(*pool, again);
  VARLANE_EXPECT_OK(pool->CheckInvariants());
}

TEST(KvPrefixTest, WithoutACacheNothingIsFound) {
  const Result<std::unique_ptr<KvPool>> pool =
      KvPool::Create({.layout = kLayout, .num_blocks = 8}, SharedRuntime());
  VARLANE_ASSERT_OK(pool);
  VARLANE_ASSERT_OK((*pool)->Free(Finished(pool->get(), From(1, 40)).id));
  PrefixMatch match;
  (void)Start(pool->get(), From(1, 40), &match);
  EXPECT_GE(match.seq, 0);
  EXPECT_EQ(match.tokens, 0);
  EXPECT_EQ((*pool)->FindPrefix(0, From(1, 40))->tokens, 0);
  EXPECT_EQ((*pool)->stats().cached_blocks, 0);
  EXPECT_EQ((*pool)->PinPrefix(0, From(1, 40)).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ((*pool)->prefix_stats().lookups, 0);
}

TEST(KvPrefixTest, ABadHomeNodeIsNamed) {
  const auto pool = MakePool(4);
  EXPECT_EQ(pool->MatchPrefix({.home_node = 99}, From(1, 4)).status().code(),
            StatusCode::kInvalidArgument);
}

// --- random operations -------------------------------------------------------

constexpr int kOperations = testing::kSanitized ? 20'000 : 1'000'000;

class RandomPrefixes {
 public:
  RandomPrefixes(KvPool* pool, uint64_t seed) : pool_(pool), random_(seed) {}

  void Step() {
    const uint64_t dice = Random(1000);
    if (live_.empty() || (dice < 250 && live_.size() < 10)) {
      StartOne();
    } else if (dice < 500) {
      const size_t room = 130 - std::min<size_t>(130, Pick().tokens.size());
      if (room > 0) (void)Compute(pool_, &Pick(), RandomTokens(Random(24)));
    } else if (dice < 600 && live_.size() < 10) {
      Sequence fork = Pick();
      const Result<SeqId> id = pool_->Fork(fork.id);
      VARLANE_ASSERT_OK(id);
      fork.id = *id;
      live_.push_back(std::move(fork));
    } else if (dice < 700) {
      Sequence& seq = Pick();
      seq.tokens.resize(Random(seq.tokens.size() + 1));
      VARLANE_ASSERT_OK(pool_->Truncate(seq.id, std::ssize(seq.tokens)));
    } else if (dice < 960) {
      std::swap(Pick(), live_.back());
      VARLANE_ASSERT_OK(pool_->Free(live_.back().id));
      live_.pop_back();
    } else if (dice < 975) {
      (void)pool_->EvictCached(static_cast<int64_t>(Random(4)));
    } else if (dice < 985) {
      PinOne();
    } else {
      Resize();
    }
  }

  void ExpectTotals() {
    const KvPoolStats stats = pool_->stats();
    ASSERT_EQ(stats.free_blocks + stats.cached_blocks + stats.referenced_blocks,
              stats.capacity_blocks);
    int64_t references = 0;
    for (const Sequence& seq : live_) {
      references += (std::ssize(seq.tokens) + kBlockSize - 1) / kBlockSize;
    }
    ASSERT_EQ(stats.references, references);
    ASSERT_EQ(stats.sequences, std::ssize(live_));
  }

  void VerifyOne() {
    if (!live_.empty()) ExpectContents(*pool_, Pick());
  }
  void VerifyAll() {
    for (const Sequence& seq : live_) {
      ASSERT_NO_FATAL_FAILURE(ExpectContents(*pool_, seq));
    }
    VARLANE_ASSERT_OK(pool_->CheckInvariants());
  }

  void End() {
    for (const Sequence& seq : live_) VARLANE_EXPECT_OK(pool_->Free(seq.id));
    live_.clear();
    for (const int64_t pin : pins_) VARLANE_EXPECT_OK(pool_->UnpinPrefix(pin));
    EXPECT_EQ(pool_->free_blocks(), pool_->capacity_blocks());
    (void)pool_->EvictCached(1 << 20);
    EXPECT_EQ(pool_->stats().free_blocks, pool_->capacity_blocks());
    VARLANE_EXPECT_OK(pool_->CheckInvariants());
  }

  int64_t copied() const { return copied_; }
  int64_t resizes() const { return resizes_; }

 private:
  uint64_t Random(uint64_t bound) { return random_() % bound; }
  Sequence& Pick() { return live_[Random(live_.size())]; }

  // Runs of few kinds, so that prompts share blocks and parts of them.
  Tokens RandomTokens(size_t count) {
    Tokens tokens;
    while (tokens.size() < count) {
      const auto first = static_cast<int32_t>(100 * Random(3));
      const size_t run = std::min<size_t>(count - tokens.size(), 11);
      tokens = std::move(tokens) + From(first, static_cast<int64_t>(run));
    }
    return tokens;
  }

  // At least what live sequences of the tenant hold must be found.
  void StartOne() {
    const TenantId tenant = Random(2);
    const Tokens prompt = RandomTokens(1 + Random(90));
    int64_t held = 0;
    for (const Sequence& seq : live_) {
      if (seq.tenant != tenant) continue;
      const size_t most = std::min(seq.tokens.size(), prompt.size() - 1);
      const auto common =
          std::mismatch(prompt.begin(), prompt.begin() + static_cast<int>(most),
                        seq.tokens.begin())
              .first -
          prompt.begin();
      held = std::max<int64_t>(held, common / kBlockSize * kBlockSize);
    }
    PrefixMatch match;
    live_.push_back(Start(pool_, prompt, &match, tenant));
    ASSERT_GE(match.tokens, held);
    ASSERT_LT(match.tokens, std::ssize(prompt));
    ASSERT_EQ(match.tokens,
              match.shared_blocks * kBlockSize + match.copied_tokens);
    copied_ += match.copied_tokens > 0 ? 1 : 0;
    ExpectContents(*pool_, live_.back());
  }

  void PinOne() {
    if (pins_.size() < 2) {
      const Result<PrefixPin> pin =
          pool_->PinPrefix(Random(2), RandomTokens(40));
      VARLANE_ASSERT_OK(pin);
      pins_.push_back(pin->id);
      return;
    }
    std::swap(pins_[Random(pins_.size())], pins_.back());
    VARLANE_ASSERT_OK(pool_->UnpinPrefix(pins_.back()));
    pins_.pop_back();
  }

  void Resize() {
    ++resizes_;
    const int64_t room = 96 - pool_->capacity_blocks();
    if (Random(2) == 0 && room > 0) {
      VARLANE_ASSERT_OK(pool_->Grow(
          1 + static_cast<int64_t>(Random(static_cast<uint64_t>(room)))));
    } else if (Random(8) == 0) {
      VARLANE_ASSERT_OK(pool_->Compact());
    } else if (Random(4) == 0) {
      // With and without moving what sequences hold.
      (void)pool_->GiveBack({.bytes = 1, .move_blocks = Random(2) == 0});
      VARLANE_ASSERT_OK(pool_->TakeBack(int64_t{1} << 40));
    } else if (pool_->capacity_blocks() > 30) {
      // Refused where sequences or pins need more.
      (void)pool_->Shrink(1 + static_cast<int64_t>(Random(16)));
    }
  }

  KvPool* pool_;
  std::mt19937_64 random_;
  std::vector<Sequence> live_;
  std::vector<int64_t> pins_;
  int64_t copied_ = 0;
  int64_t resizes_ = 0;
};

TEST(KvPrefixModelTest, RandomSequencesReadBackWhatTheirTokensSay) {
  const auto pool = MakePool(64, 96);
  RandomPrefixes model(pool.get(), 4711);
  std::printf("%d operations\n", kOperations);
  for (int op = 0; op < kOperations; ++op) {
    model.Step();
    model.ExpectTotals();
    if (op % 8 == 0) model.VerifyOne();
    if (op % 512 == 0) model.VerifyAll();
    if (HasFatalFailure()) FAIL() << "at operation " << op;
  }
  model.VerifyAll();
  // The premises: every path was taken.
  const PrefixCacheStats stats = pool->prefix_stats();
  EXPECT_GT(stats.hit_blocks, kOperations / 20);
  EXPECT_GT(stats.duplicate_blocks, kOperations / 100);
  EXPECT_GT(stats.evicted_blocks, kOperations / 100);
  EXPECT_GT(model.copied(), kOperations / 100);
  EXPECT_GT(model.resizes(), kOperations / 100);
  EXPECT_GT(pool->stats().moved_blocks, kOperations / 1000);
  EXPECT_GT(pool->stats().cow_copies, kOperations / 1000);
  model.End();
}

}  // namespace
}  // namespace varlane
