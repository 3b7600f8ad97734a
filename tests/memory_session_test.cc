// Session files: what comes back, what is refused, and what a failure leaves.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/session.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/os_calls.h"
#include "base/xxhash64.h"
#include "memory/session_header.h"
#include "tests/testing/allocation_faults.h"
#include "tests/testing/attention_case.h"
#include "tests/testing/files.h"
#include "tests/testing/pools.h"
#include "tests/testing/testing.h"
#include "tests/testing/tokens.h"

namespace varlane {
namespace {

using testing::AllocationFaults;
using testing::ExpectSequence;
using testing::From;
using testing::MakeSequence;
using testing::ReadWholeFile;
using testing::SmallLayout;
using testing::SmallPool;
using testing::TemporaryFolder;
using testing::WriteWholeFile;

constexpr uint64_t kSeed = 11;

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// The header's checksum made right again, as a forger would.
std::string Resealed(std::string file) {
  const auto bytes = std::as_bytes(std::span(file.data(), file.size()));
  const uint64_t checksum =
      XxHash64(bytes.first(size_t(kSessionHeaderChecksumAt)));
  std::memcpy(&file[size_t(kSessionHeaderChecksumAt)], &checksum, 8);
  return file;
}

class SessionFileTest : public ::testing::Test {
 protected:
  std::string Path() const { return folder_.file("session"); }

  // A refusal says `part` and leaves the pool as it was.
  void ExpectRefused(KvPool* pool, const std::string& contents,
                     std::string_view part) {
    WriteWholeFile(Path(), contents);
    const KvPoolStats before = pool->stats();
    const Result<LoadedSession> loaded = LoadSession(pool, Path());
    ASSERT_FALSE(loaded.ok()) << "expected: " << part;
    EXPECT_TRUE(Contains(loaded.status().message(), part))
        << loaded.status().ToString();
    EXPECT_TRUE(Contains(loaded.status().message(), Path()))
        << loaded.status().ToString();
    const KvPoolStats after = pool->stats();
    EXPECT_EQ(after.free_blocks, before.free_blocks);
    EXPECT_EQ(after.sequences, before.sequences);
    EXPECT_EQ(after.references, before.references);
  }

  TemporaryFolder folder_;
};

class SessionTest : public SessionFileTest,
                    public ::testing::WithParamInterface<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, SessionTest,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         testing::DTypeParam);

TEST_P(SessionTest, ComesBackIntoAnotherPool) {
  const auto from = SmallPool(SmallLayout(GetParam()), 16);
  const auto to = SmallPool(SmallLayout(GetParam()), 9);
  for (const int64_t length : {1, 15, 16, 17, 48, 100}) {
    const SeqId seq = MakeSequence(from.get(), length, kSeed);
    const std::vector<int32_t> tokens = From(-3, length);
    VARLANE_ASSERT_OK(SaveSession(from.get(), seq, tokens, Path()));
    const Result<SessionInfo> info = ReadSessionInfo(Path());
    VARLANE_ASSERT_OK(info);
    EXPECT_EQ(info->layout, from->layout());
    EXPECT_EQ(info->length, length);
    EXPECT_TRUE(info->has_tokens);
    const Result<LoadedSession> loaded = LoadSession(to.get(), Path());
    VARLANE_ASSERT_OK(loaded);
    EXPECT_EQ(loaded->length, length);
    EXPECT_EQ(loaded->tokens, tokens);
    ExpectSequence(*to, loaded->sequence, length, kSeed);
    VARLANE_EXPECT_OK(to->Free(loaded->sequence));
    VARLANE_EXPECT_OK(from->Free(seq));
    VARLANE_EXPECT_OK(to->CheckInvariants());
    EXPECT_EQ(to->free_blocks(), 9);
    EXPECT_EQ(from->free_blocks(), 16);
  }
}

// What others left in the tail block stays in the process.
TEST_P(SessionTest, UnwrittenSlotsAreStoredAsZeros) {
  const auto pool = SmallPool(SmallLayout(GetParam()), 8);
  const SeqId seq = MakeSequence(pool.get(), 37, kSeed);
  VARLANE_ASSERT_OK(SaveSession(pool.get(), seq, {}, Path()));
  const KvLayout layout = pool->layout();
  std::string file = ReadWholeFile(Path());
  const size_t tail = file.size() - size_t(layout.block_bytes());
  const KvView view{reinterpret_cast<std::byte*>(&file[tail]), 1, layout};
  const auto size = int64_t(SizeOf(layout.dtype));
  const std::string zeros(size_t(size), '\0');
  for (int t = 37 % 16; t < 16; ++t) {
    for (int d = 0; d < layout.v_head_size_padded(); ++d) {
      ASSERT_EQ(std::memcmp(view.v(0, 1, 1) + layout.v_offset(t, d) * size,
                            zeros.data(), zeros.size()),
                0);
    }
    for (int d = 0; d < layout.head_size; ++d) {
      ASSERT_EQ(std::memcmp(view.k(0, 1, 1) + layout.k_offset(t, d) * size,
                            zeros.data(), zeros.size()),
                0);
    }
  }
}

TEST_P(SessionTest, AnEmptySequenceIsASession) {
  const auto pool = SmallPool(SmallLayout(GetParam()), 2);
  const SeqId seq = pool->CreateSequence();
  VARLANE_ASSERT_OK(SaveSession(pool.get(), seq, {}, Path()));
  const Result<LoadedSession> loaded = LoadSession(pool.get(), Path());
  VARLANE_ASSERT_OK(loaded);
  EXPECT_EQ(loaded->length, 0);
  EXPECT_EQ(pool->free_blocks(), 2);
}

// One layer and head: a file of four blocks is short enough to damage each
// byte of it.
KvLayout TinyLayout() {
  return {.dtype = DType::kF32,
          .num_layers = 1,
          .num_kv_heads = 1,
          .head_size = 8,
          .v_head_size = 16,
          .block_size = 16};
}

TEST_F(SessionFileTest, AnyDamagedByteIsFound) {
  const auto pool = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(pool.get(), 40, kSeed);
  VARLANE_ASSERT_OK(SaveSession(pool.get(), seq, From(-3, 40), Path()));
  const std::string good = ReadWholeFile(Path());
  const SessionHeader header{TinyLayout(), 40, 40};
  const auto used = size_t(kSessionHeaderBytes + header.index_bytes());
  int64_t refused = 0;
  for (size_t at = 0; at < good.size(); at += at < 600 ? 1 : 7) {
    if (at >= used && at < size_t(header.data_begin())) continue;  // filling
    std::string bad = good;
    bad[at] = char(bad[at] ^ (1 << (at % 8)));
    WriteWholeFile(Path(), bad);
    const Result<LoadedSession> loaded = LoadSession(pool.get(), Path());
    ASSERT_FALSE(loaded.ok()) << "byte " << at;
    ASSERT_EQ(loaded.status().code(), StatusCode::kInvalidArgument)
        << loaded.status().ToString();
    ++refused;
  }
  EXPECT_GT(refused, 900);
  EXPECT_EQ(pool->free_blocks(), 5);
  EXPECT_EQ(pool->stats().sequences, 1);
}

TEST_F(SessionFileTest, AnyOtherLengthIsFound) {
  const auto pool = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(pool.get(), 40, kSeed);
  VARLANE_ASSERT_OK(SaveSession(pool.get(), seq, From(-3, 40), Path()));
  const std::string good = ReadWholeFile(Path());
  for (size_t length = 0; length < good.size(); length += 97) {
    ExpectRefused(pool.get(), good.substr(0, length), "");
  }
  ExpectRefused(pool.get(), good + '\0', "file_bytes = ");
  ExpectRefused(pool.get(), "", "no session file: 0 bytes");
  ExpectRefused(pool.get(), std::string(5000, 'x'), "does not begin with");
}

TEST_F(SessionFileTest, AForgedHeaderIsRefusedByField) {
  const auto pool = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(pool.get(), 40, kSeed);
  VARLANE_ASSERT_OK(SaveSession(pool.get(), seq, {}, Path()));
  const std::string good = ReadWholeFile(Path());
  const auto forged = [&](size_t at, uint64_t value, size_t bytes) {
    std::string file = good;
    std::memcpy(&file[at], &value, bytes);
    return Resealed(file);
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  ExpectRefused(pool.get(), forged(8, 2, 4), "version = 2, expected 1");
  ExpectRefused(pool.get(), forged(12, 77, 4), "dtype = 77");
  ExpectRefused(pool.get(), forged(12, kHuge, 4), "dtype = ");
  ExpectRefused(pool.get(), forged(16, 0, 4), "num_layers = 0");
  ExpectRefused(pool.get(), forged(16, kHuge, 4), "num_layers = ");
  ExpectRefused(pool.get(), forged(20, kHuge, 4), "num_kv_heads = ");
  ExpectRefused(pool.get(), forged(24, 7, 4), "head_size = 7");
  ExpectRefused(pool.get(), forged(28, kHuge, 4), "v_head_size = ");
  ExpectRefused(pool.get(), forged(32, 0, 4), "block_size = 0");
  ExpectRefused(pool.get(), forged(32, 17, 4), "block_size = 17");
  ExpectRefused(pool.get(), forged(36, 2, 4), "pack = 2, expected 1");
  ExpectRefused(pool.get(), forged(40, kHuge, 8), "block_bytes = ");
  ExpectRefused(pool.get(), forged(48, kHuge, 8), "length = ");
  ExpectRefused(pool.get(), forged(48, uint64_t{1} << 40, 8), "length = ");
  ExpectRefused(pool.get(), forged(48, 8000, 8), "length = 8000 needs 500");
  ExpectRefused(pool.get(), forged(48, 30, 8), "file_bytes = ");
  ExpectRefused(pool.get(), forged(56, 39, 8), "num_tokens = 39");
  ExpectRefused(pool.get(), forged(56, 40, 8), "index's checksum differs");
  ExpectRefused(pool.get(), forged(64, 1, 8), "file_bytes = 1");
  ExpectRefused(pool.get(), forged(72, 1, 1), "are not zero");
}

TEST_F(SessionFileTest, APoolOfAnotherLayoutIsNamedByField) {
  const auto from = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(from.get(), 40, kSeed);
  VARLANE_ASSERT_OK(SaveSession(from.get(), seq, {}, Path()));
  const std::string good = ReadWholeFile(Path());
  const auto other = [&](const std::function<void(KvLayout*)>& change) {
    KvLayout layout = TinyLayout();
    change(&layout);
    return SmallPool(layout, 4);
  };
  ExpectRefused(other([](KvLayout* l) { l->dtype = DType::kF16; }).get(), good,
                "dtype = f32, but the pool has dtype = f16");
  ExpectRefused(other([](KvLayout* l) { l->num_layers = 2; }).get(), good,
                "num_layers = 1, but the pool has num_layers = 2");
  ExpectRefused(other([](KvLayout* l) { l->num_kv_heads = 3; }).get(), good,
                "num_kv_heads = 1, but the pool has num_kv_heads = 3");
  ExpectRefused(other([](KvLayout* l) { l->head_size = 64; }).get(), good,
                "head_size = 8, but the pool has head_size = 64");
  ExpectRefused(other([](KvLayout* l) { l->v_head_size = 8; }).get(), good,
                "v_head_size = 16, but the pool has v_head_size = 8");
  ExpectRefused(other([](KvLayout* l) { l->block_size = 32; }).get(), good,
                "block_size = 16, but the pool has block_size = 32");
  const auto full = SmallPool(TinyLayout(), 4);
  (void)MakeSequence(full.get(), 30, kSeed);
  ExpectRefused(full.get(), good, "3 blocks are needed, but 2 of 4 are free");
}

TEST_F(SessionFileTest, WhatIsNoFileIsRefusedAtOnce) {
  const auto pool = SmallPool(TinyLayout(), 4);
  const SeqId seq = MakeSequence(pool.get(), 20, kSeed);
  EXPECT_EQ(LoadSession(pool.get(), Path()).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(LoadSession(pool.get(), folder_.path()).status().code(),
            StatusCode::kInvalidArgument);
  // Opening a FIFO would wait for a writer.
  ASSERT_EQ(mkfifo(folder_.file("fifo").c_str(), 0600), 0);
  EXPECT_EQ(LoadSession(pool.get(), folder_.file("fifo")).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SaveSession(pool.get(), 99, {}, Path()).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(SaveSession(pool.get(), seq, {}, folder_.file("no/folder")).code(),
            StatusCode::kNotFound);
  const Status wrong = SaveSession(pool.get(), seq, From(-3, 19), Path());
  EXPECT_TRUE(Contains(wrong.message(), "tokens has 19 entries"));
  EXPECT_EQ(folder_.names(), std::vector<std::string>{"fifo"});
}

TEST_F(SessionFileTest, TheFileIsItsOwnersOnly) {
  const auto pool = SmallPool(TinyLayout(), 4);
  const SeqId seq = MakeSequence(pool.get(), 20, kSeed);
  VARLANE_ASSERT_OK(SaveSession(pool.get(), seq, {}, Path()));
  struct stat status = {};
  ASSERT_EQ(stat(Path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

// Every system call of a save fails once: the old file is still there, whole,
// nothing lies beside it, and no block is held.
TEST_F(SessionFileTest, AFailedSaveLeavesTheOldFile) {
  const auto pool = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(pool.get(), 40, kSeed);
  WriteWholeFile(Path(), "the old one");
  int64_t failures = 0;
  for (int64_t call = 0;; ++call) {
    OsFaults::FailAfter(call, ENOSPC);
    const Status status = SaveSession(pool.get(), seq, From(-3, 40), Path());
    const int64_t made = OsFaults::failed();
    OsFaults::Disarm();
    VARLANE_EXPECT_OK(pool->CheckInvariants());
    EXPECT_EQ(pool->stats().sequences, 1);
    if (made == 0) {
      VARLANE_ASSERT_OK(status);
      break;
    }
    if (status.ok()) continue;  // closing, or the folder's sync: no matter
    ++failures;
    EXPECT_TRUE(Contains(status.message(), "session")) << status.ToString();
    ASSERT_EQ(ReadWholeFile(Path()), "the old one") << "call " << call;
    ASSERT_EQ(folder_.names(), std::vector<std::string>{"session"});
  }
  EXPECT_EQ(failures, 9);  // open, fstat, 3 blocks, header, index, sync, rename
  const Result<LoadedSession> loaded = LoadSession(pool.get(), Path());
  VARLANE_ASSERT_OK(loaded);
  ExpectSequence(*pool, loaded->sequence, 40, kSeed);
}

TEST_F(SessionFileTest, AFailedLoadTakesNoBlock) {
  const auto pool = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(pool.get(), 40, kSeed);
  VARLANE_ASSERT_OK(SaveSession(pool.get(), seq, From(-3, 40), Path()));
  int64_t failures = 0;
  for (int64_t call = 0;; ++call) {
    OsFaults::FailAfter(call, EIO);
    const Result<LoadedSession> loaded = LoadSession(pool.get(), Path());
    const int64_t made = OsFaults::failed();
    OsFaults::Disarm();
    if (loaded.ok()) (void)pool->Free(loaded->sequence);
    VARLANE_EXPECT_OK(pool->CheckInvariants());
    ASSERT_EQ(pool->free_blocks(), 5) << "call " << call;
    ASSERT_EQ(pool->stats().sequences, 1);
    if (made == 0) {
      VARLANE_ASSERT_OK(loaded);
      break;
    }
    if (!loaded.ok()) ++failures;
  }
  EXPECT_EQ(failures, 8);  // open, 2 fstat, header, index, 3 blocks
}

// Every allocation of a save and a load fails once.
TEST_F(SessionFileTest, AFullHeapIsAnError) {
  const auto pool = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(pool.get(), 40, kSeed);
  const std::vector<int32_t> tokens = From(-3, 40);
  const std::string path = Path();
  int64_t failures = 0;
  for (int64_t i = 0;; ++i) {
    AllocationFaults::FailAfter(i);
    Status status = SaveSession(pool.get(), seq, tokens, path);
    if (status.ok()) {
      const Result<LoadedSession> loaded = LoadSession(pool.get(), path);
      status = loaded.status();
      if (loaded.ok()) (void)pool->Free(loaded->sequence);
    }
    AllocationFaults::Disarm();
    EXPECT_EQ(pool->free_blocks(), 5) << "allocation " << i;
    EXPECT_EQ(pool->stats().sequences, 1);
    EXPECT_LE(folder_.names().size(), 1u);
    if (AllocationFaults::failed() == 0) {
      VARLANE_ASSERT_OK(status);
      break;
    }
    if (!status.ok()) ++failures;
  }
  EXPECT_GT(failures, 12);
}

// An interrupted call is repeated.
TEST_F(SessionFileTest, AnInterruptionIsNoFailure) {
  const auto pool = SmallPool(TinyLayout(), 8);
  const SeqId seq = MakeSequence(pool.get(), 40, kSeed);
  OsFaults::FailAfter(2, EINTR, 2);  // the first block's write
  const Status status = SaveSession(pool.get(), seq, {}, Path());
  EXPECT_EQ(OsFaults::failed(), 2);
  OsFaults::Disarm();
  VARLANE_ASSERT_OK(status);
  VARLANE_EXPECT_OK(LoadSession(pool.get(), Path()));
}

}  // namespace
}  // namespace varlane
