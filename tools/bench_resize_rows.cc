// Rows on the pool's size: memory returned to the system and regained, blocks
// moved out of the way, and what appends notice of it.
//
// SPDX-License-Identifier: Apache-2.0

#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tools/bench_session.h"
#include "tools/clock.h"
#include "tools/parse.h"
#include "tools/status_util.h"
#include "varlane/kv_pool.h"

namespace varlane::tools {
namespace {

using bench::kBlockTokens;

constexpr int64_t kPageBytes = 4096;

// 64 KiB a block.
constexpr KvLayout kLayout = {.dtype = DType::kBF16,
                              .num_layers = 1,
                              .num_kv_heads = 8,
                              .head_size = 128,
                              .v_head_size = 128,
                              .block_size = kBlockTokens};
constexpr int64_t kBlockBytes = int64_t{2} * 8 * 128 * kBlockTokens * 2;

Result<std::unique_ptr<KvPool>> MakePool(BenchSession* session,
                                         int64_t num_blocks) {
  return KvPool::Create({.layout = kLayout, .num_blocks = num_blocks},
                        session->runtime());
}

// Seconds of a change of the pool's size, or of whatever it refuses.
template <typename Change>
Result<double> Timed(const Change& change) {
  const Clock::time_point start = Clock::now();
  VARLANE_TOOLS_TRY(change());
  return SecondsSince(start);
}

// --- memory that only the system has a hand in -------------------------------

// Anonymous memory with huge pages asked for, as the pool's is.
class RawMemory {
 public:
  static Result<std::unique_ptr<RawMemory>> Create(int64_t bytes) {
    std::unique_ptr<RawMemory> memory(new RawMemory(bytes));
    memory->data_ = mmap(nullptr, memory->size(), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory->data_ == MAP_FAILED) {
      return Fail(StatusCode::kResourceExhausted, "no {} of address space",
                  FormatBytes(bytes));
    }
    (void)madvise(memory->data_, memory->size(), MADV_HUGEPAGE);
    return memory;
  }
  ~RawMemory() {
    if (data_ != MAP_FAILED) (void)munmap(data_, size());
  }
  RawMemory(const RawMemory&) = delete;
  RawMemory& operator=(const RawMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return static_cast<size_t>(bytes_); }

  // Every page, by all workers, in pieces of a huge page.
  Status Touch(Runtime* runtime) const {
    constexpr int64_t kPiece = 2 * kMiB;
    return runtime->Launch(
        Grid{(bytes_ + kPiece - 1) / kPiece}, [this](const Threadgroup& group) {
          const int64_t begin = group.index() * kPiece;
          const int64_t end = std::min(bytes_, begin + kPiece);
          for (int64_t i = begin; i < end; i += kPageBytes) {
            static_cast<volatile char*>(data_)[i] = 1;
          }
        });
  }
  Status GiveBack() const {
    if (madvise(data_, size(), MADV_DONTNEED) == 0) return {};
    return Fail(StatusCode::kInternal, "madvise: {}", std::strerror(errno));
  }

 private:
  explicit RawMemory(int64_t bytes) : bytes_(bytes) {}
  const int64_t bytes_;
  void* data_ = MAP_FAILED;
};

// --- returned and regained ---------------------------------------------------

// The whole of a pool given back and taken again, beside as much memory without
// a pool: four figures, measured in turn, which two rows share.
class Resizing {
 public:
  explicit Resizing(BenchSession* session)
      : session_(session),
        bytes_(std::min(kGiB, session->options().memory_bytes / 2) / kMiB *
               kMiB) {}

  Status Report(bool regained, BenchRow* row) {
    if (samples_.of.empty()) VARLANE_TOOLS_TRY(Measure());
    const std::vector<double>& ours = samples_.of[regained ? 2 : 0];
    const std::vector<double>& raw = samples_.of[regained ? 3 : 1];
    const double gib = static_cast<double>(bytes_) / double(kGiB);
    std::vector<double> rates;
    std::vector<double> raw_rates;
    std::vector<double> ratios;
    for (size_t i = 0; i < ours.size(); ++i) {
      rates.push_back(gib / ours[i]);
      raw_rates.push_back(gib / raw[i]);
      ratios.push_back(raw[i] / ours[i]);
    }
    SetValues(rates, samples_.disturbed, row);
    row->limit = Median(raw_rates);
    SetRatios(ratios, samples_.disturbed, row);
    row->detail = fmt::format(
        "{}, {} huge; {}", FormatBytes(bytes_), FormatBytes(huge_page_bytes_),
        regained ? "limit: first touch of as much by all workers"
                 : "limit: madvise of as much");
    return {};
  }

 private:
  Status Measure() {
    const int64_t blocks = bytes_ / kBlockBytes;
    if (blocks == 0) {
      return Fail(StatusCode::kResourceExhausted,
                  "needs more than --memory allows");
    }
    VARLANE_TOOLS_ASSIGN(const std::unique_ptr<KvPool> pool,
                         MakePool(session_, blocks));
    VARLANE_TOOLS_ASSIGN(const std::unique_ptr<RawMemory> raw,
                         RawMemory::Create(bytes_));
    VARLANE_TOOLS_TRY(raw->Touch(session_->runtime()));
    const std::vector<Sampler> samplers = {
        {[&] { return Timed([&] { return pool->Shrink(blocks).status(); }); },
         false},
        {[&] { return Timed([&] { return raw->GiveBack(); }); }, false},
        {[&] { return Timed([&] { return pool->Grow(blocks); }); }, false},
        {[&] { return Timed([&] { return raw->Touch(session_->runtime()); }); },
         false}};
    VARLANE_TOOLS_ASSIGN(samples_, Interleave(samplers, session_->budget()));
    huge_page_bytes_ = pool->stats().huge_page_bytes;
    return pool->CheckInvariants();
  }

  BenchSession* const session_;
  const int64_t bytes_;
  Samples samples_;
  int64_t huge_page_bytes_ = 0;
};

// --- moved -------------------------------------------------------------------

// A sequence in the second half of a pool whose first half comes free: to
// shrink to the half is to move it all. Growth makes room for the next round's
// sequence, behind the one that was moved.
class Moving {
 public:
  explicit Moving(BenchSession* session)
      : session_(session),
        bytes_(std::min(kGiB / 4, session->options().memory_bytes / 4) / kMiB *
               kMiB) {}

  Status Measure(BenchRow* row) {
    blocks_ = bytes_ / kBlockBytes;
    VARLANE_TOOLS_ASSIGN(pool_, MakePool(session_, 2 * blocks_));
    VARLANE_TOOLS_TRY(AddSequence(&front_));
    VARLANE_TOOLS_TRY(AddSequence(&back_));
    VARLANE_TOOLS_ASSIGN(const std::unique_ptr<RawMemory> raw,
                         RawMemory::Create(2 * bytes_));
    VARLANE_TOOLS_TRY(raw->Touch(session_->runtime()));
    const auto half = static_cast<size_t>(bytes_);
    const std::vector<Sampler> samplers = {
        {[this] { return MoveOnce(); }, false},
        {[&] {
           return Timed([&] {
             std::memcpy(raw->data(), raw->data() + half, half);
             return Status();
           });
         },
         false}};
    VARLANE_TOOLS_ASSIGN(const Samples samples,
                         Interleave(samplers, session_->budget()));
    std::vector<double> millis;
    std::vector<double> ratios;
    for (size_t i = 0; i < samples.of[0].size(); ++i) {
      millis.push_back(samples.of[0][i] * 1e3);
      ratios.push_back(samples.of[1][i] / samples.of[0][i]);
    }
    SetValues(millis, samples.disturbed, row);
    row->limit = Median(samples.of[1]) * 1e3;
    SetRatios(ratios, samples.disturbed, row);
    row->detail = fmt::format("{} moved, as much returned; limit: memcpy",
                              FormatBytes(bytes_));
    return pool_->CheckInvariants();
  }

 private:
  Status AddSequence(SeqId* seq) {
    *seq = pool_->CreateSequence();
    VARLANE_TOOLS_ASSIGN(const Admission admission,
                         pool_->Append(*seq, blocks_ * kBlockTokens));
    if (admission.admitted()) return {};
    return Fail(StatusCode::kInternal, "{} blocks were refused", blocks_);
  }

  Result<double> MoveOnce() {
    VARLANE_TOOLS_TRY(pool_->Free(front_));
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_ASSIGN(const KvResize shrunk, pool_->Shrink(blocks_));
    const double seconds = SecondsSince(start);
    if (shrunk.moved_blocks != blocks_) {
      return Fail(StatusCode::kInternal, "{} of {} blocks were moved",
                  shrunk.moved_blocks, blocks_);
    }
    VARLANE_TOOLS_TRY(pool_->Grow(blocks_));
    front_ = back_;
    VARLANE_TOOLS_TRY(AddSequence(&back_));
    return seconds;
  }

  BenchSession* const session_;
  const int64_t bytes_;
  int64_t blocks_ = 0;
  std::unique_ptr<KvPool> pool_;
  SeqId front_ = -1;
  SeqId back_ = -1;
};

// One slab of free blocks, of a pool of 64: what a shrink costs that moves
// nothing.
Status MeasureFreeSlab(BenchSession* session, BenchRow* row) {
  constexpr int64_t kSlabBlocks = 2 * kMiB / kBlockBytes;
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<KvPool> pool,
                       MakePool(session, 64 * kSlabBlocks));
  const std::vector<Sampler> samplers = {
      {[&]() -> Result<double> {
         const Clock::time_point start = Clock::now();
         VARLANE_TOOLS_TRY(pool->Shrink(kSlabBlocks).status());
         const double seconds = SecondsSince(start);
         VARLANE_TOOLS_TRY(pool->Grow(kSlabBlocks));
         return seconds;
       },
       false}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> micros;
  for (const double seconds : samples.of[0]) micros.push_back(seconds * 1e6);
  SetValues(micros, samples.disturbed, row);
  return {};
}

// --- what others notice ------------------------------------------------------

// The longest of many appends of one block, in seconds, while `meanwhile` runs;
// the first one, before that begins, does not count.
template <typename Meanwhile>
Result<double> LongestAppend(KvPool* pool, const Meanwhile& meanwhile) {
  const SeqId seq = pool->CreateSequence();
  std::atomic<bool> is_over{false};
  std::atomic<bool> has_begun{false};
  double longest = 0;
  Status status;
  std::thread appends([&] {
    while (!is_over.load() && status.ok()) {
      const Clock::time_point start = Clock::now();
      status = pool->Append(seq, kBlockTokens).status();
      const double seconds = SecondsSince(start);
      if (has_begun.exchange(true)) longest = std::max(longest, seconds);
      if (status.ok()) status = pool->Truncate(seq, 0);
    }
  });
  while (!has_begun.load()) std::this_thread::yield();
  const Status done = meanwhile();
  is_over.store(true);
  appends.join();
  VARLANE_TOOLS_TRY(done);
  VARLANE_TOOLS_TRY(status);
  VARLANE_TOOLS_TRY(pool->Free(seq));
  return longest;
}

// Beside a pool that returns and regains all but a slab, and beside a sleep of
// about as long.
Status MeasureLongestAppend(BenchSession* session, BenchRow* row) {
  const int64_t bytes =
      std::min(kGiB / 2, session->options().memory_bytes / 2) / kMiB * kMiB;
  const int64_t blocks = bytes / kBlockBytes;
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<KvPool> pool,
                       MakePool(session, blocks));
  double resize_seconds = 0;
  const auto resize = [&]() -> Status {
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(pool->Shrink(blocks - 64).status());
    VARLANE_TOOLS_TRY(pool->Grow(blocks - 64));
    resize_seconds = SecondsSince(start);
    return {};
  };
  const auto rest = [&]() -> Status {
    std::this_thread::sleep_for(std::chrono::duration<double>(resize_seconds));
    return {};
  };
  const std::vector<Sampler> samplers = {
      {[&] { return LongestAppend(pool.get(), resize); }, false},
      {[&] { return LongestAppend(pool.get(), rest); }, false}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> micros;
  for (const double seconds : samples.of[0]) micros.push_back(seconds * 1e6);
  SetValues(micros, samples.disturbed, row);
  row->limit = Median(samples.of[1]) * 1e6;
  row->detail = fmt::format("{} in {:.0f} ms; limit: without",
                            FormatBytes(2 * bytes), resize_seconds * 1e3);
  return {};
}

}  // namespace

void AddResizeRows(BenchSession* session) {
  const auto resizing = std::make_shared<Resizing>(session);
  for (const bool regained : {false, true}) {
    BenchRow row;
    row.name = regained ? "pool regains memory" : "pool returns memory";
    row.unit = "GiB/s";
    row.must = 0.8;
    session->Add(std::move(row), [=](BenchRow* out) {
      return resizing->Report(regained, out);
    });
  }
  BenchRow slab;
  slab.name = "shrink by a free slab";
  slab.unit = "us";
  session->Add(slab,
               [=](BenchRow* out) { return MeasureFreeSlab(session, out); });
  BenchRow moving;
  moving.name = "shrink that moves half of the pool";
  moving.unit = "ms";
  session->Add(moving,
               [=](BenchRow* out) { return Moving(session).Measure(out); });
  BenchRow append;
  append.name = "longest append while the pool shrinks and grows";
  append.unit = "us";
  session->Add(append, [=](BenchRow* out) {
    return MeasureLongestAppend(session, out);
  });
}

}  // namespace varlane::tools
