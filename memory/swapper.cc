// SequenceSwapper: a queue of transfers and the thread that makes them.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/swap.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "base/math.h"
#include "base/xxhash64.h"
#include "memory/block_parts.h"
#include "memory/step_pin.h"
#include "memory/swap_file.h"

namespace varlane {
namespace {

bool IsUnderWay(SwapState state) {
  return state == SwapState::kWriting || state == SwapState::kReading;
}

}  // namespace

class SequenceSwapper::Impl {
 public:
  Impl(KvPool* pool, std::unique_ptr<SwapFile> file)
      : pool_(pool),
        block_bytes_(pool->layout().block_bytes()),
        file_(std::move(file)),
        stats_{.capacity_blocks = file_->num_slots(),
               .file_bytes = file_->file_bytes(),
               .direct_io = file_->direct_io()},
        write_rate_(file_->write_rate()),
        read_rate_(file_->read_rate()),
        thread_([this] { RunTransfers(); }) {}
  ~Impl();

  Result<SwapId> SwapOut(SeqId sequence);
  Status SwapIn(SwapId swap, SeqId sequence);
  void CancelSwapIn(SwapId swap);
  void Drop(SwapId swap);
  SwapState state(SwapId swap) const;
  SwapState Wait(SwapId swap);
  int64_t length(SwapId swap) const;
  bool busy() const;
  int64_t completions() const;
  void WaitForCompletion(int64_t seen);
  int64_t free_bytes() const;
  SwapStats stats() const;

 private:
  struct Entry {
    SwapState state = SwapState::kWriting;
    SeqId sequence = -1;  // kWriting: ours; kReading: the caller's
    int64_t length = 0;
    std::vector<int64_t> slots;       // [blocks]
    std::vector<uint64_t> checksums;  // [blocks], of the blocks' bytes
    bool stopped = false;  // the transfer under way has no use any more
  };
  using Lock = std::unique_lock<std::mutex>;

  // mutex_ is held.
  Entry* Find(SwapId swap) {
    const auto found = entries_.find(swap);
    return found == entries_.end() ? nullptr : &found->second;
  }
  const Entry* Find(SwapId swap) const {
    return const_cast<Impl*>(this)->Find(swap);
  }
  void FreeSlots(Entry* entry);
  // Takes the entry out of the queue, or stops the thread's work on it; the
  // thread does not touch it or its sequence any more on return.
  void StopTransfer(SwapId swap, Lock* lock);

  // The thread. An entry under way is not erased, so it may be used without the
  // lock, but for what StopTransfer writes.
  void RunTransfers();
  Status WriteOut(Entry* entry);
  Status ReadIn(Entry* entry);
  // Copies blocks [begin, begin + count) between pool and buffer. False: the
  // transfer was stopped.
  Result<bool> CopyBlocks(Entry* entry, size_t begin, size_t count,
                          bool to_pool);
  void EndWrite(Entry* entry, const Status& status, double seconds);
  void EndRead(Entry* entry, const Status& status, double seconds);

  KvPool* const pool_;
  const int64_t block_bytes_;
  const std::unique_ptr<SwapFile> file_;

  mutable std::mutex mutex_;      // guards all below; not held while I/O runs
  std::condition_variable work_;  // for the thread
  std::condition_variable progress_;           // for everybody else
  std::unordered_map<SwapId, Entry> entries_;  // references stay valid
  std::deque<SwapId> queue_;
  SwapId running_ = kNoSwap;
  SwapId next_id_ = 0;
  int64_t completions_ = 0;
  bool closing_ = false;
  SwapStats stats_;  // but for the rates
  RateEstimate write_rate_;
  RateEstimate read_rate_;

  std::vector<int32_t> table_;  // the thread's
  std::thread thread_;          // last: runs as soon as it is made
};

SequenceSwapper::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    for (auto& [swap, entry] : entries_) entry.stopped = true;
  }
  work_.notify_all();
  thread_.join();
  for (const auto& [swap, entry] : entries_) {
    if (entry.state == SwapState::kWriting) (void)pool_->Free(entry.sequence);
  }
}

// --- callers -----------------------------------------------------------------

Result<SwapId> SequenceSwapper::Impl::SwapOut(SeqId sequence) {
  const Result<int64_t> length = pool_->Length(sequence);
  VARLANE_RETURN_IF_ERROR(length.status());
  VARLANE_REQUIRE_ARG(*length > 0, "seq = ", sequence, " has no token");
  const auto blocks = static_cast<size_t>(
      DivCeil<int64_t>(*length, pool_->layout().block_size));
  Entry entry;
  entry.sequence = sequence;
  entry.length = *length;
  entry.slots.resize(blocks);
  entry.checksums.resize(blocks);
  const std::lock_guard lock(mutex_);
  VARLANE_REQUIRE(static_cast<int64_t>(blocks) <= file_->free_slots(),
                  StatusCode::kResourceExhausted, "seq = ", sequence, " has ",
                  blocks, " blocks, but the swap file has ",
                  file_->free_slots(), " free slots of ", file_->num_slots());
  const SwapId swap = next_id_;
  queue_.push_back(swap);
  try {
    entries_.emplace(swap, std::move(entry));
  } catch (...) {
    queue_.pop_back();
    throw;
  }
  ++next_id_;
  file_->Allocate(Find(swap)->slots);
  stats_.stored_blocks += static_cast<int64_t>(blocks);
  stats_.pending_blocks += static_cast<int64_t>(blocks);
  work_.notify_one();
  return swap;
}

Status SequenceSwapper::Impl::SwapIn(SwapId swap, SeqId sequence) {
  const Result<int64_t> length = pool_->Length(sequence);
  VARLANE_RETURN_IF_ERROR(length.status());
  const std::lock_guard lock(mutex_);
  Entry* const entry = Find(swap);
  VARLANE_REQUIRE(entry != nullptr, StatusCode::kNotFound, "swap = ", swap,
                  ", but there is no such swap");
  VARLANE_REQUIRE(entry->state == SwapState::kStored,
                  StatusCode::kFailedPrecondition, "swap = ", swap,
                  " is not stored: state ", static_cast<int>(entry->state));
  VARLANE_REQUIRE_ARG(entry->length == *length, "seq = ", sequence, " has ",
                      *length, " tokens, but swap = ", swap, " has ",
                      entry->length);
  queue_.push_back(swap);
  entry->state = SwapState::kReading;
  entry->sequence = sequence;
  entry->stopped = false;
  work_.notify_one();
  return {};
}

void SequenceSwapper::Impl::FreeSlots(Entry* entry) {
  file_->Free(entry->slots);
  stats_.stored_blocks -= static_cast<int64_t>(entry->slots.size());
  entry->slots.clear();
}

void SequenceSwapper::Impl::StopTransfer(SwapId swap, Lock* lock) {
  const auto queued = std::find(queue_.begin(), queue_.end(), swap);
  if (queued != queue_.end()) {
    queue_.erase(queued);
    ++completions_;
    progress_.notify_all();
    return;
  }
  if (running_ != swap) return;
  Find(swap)->stopped = true;
  // One buffer full at the disk's speed; its slots may be used again then.
  progress_.wait(*lock, [&] { return running_ != swap; });
}

void SequenceSwapper::Impl::CancelSwapIn(SwapId swap) {
  Lock lock(mutex_);
  Entry* const entry = Find(swap);
  if (entry == nullptr || entry->state != SwapState::kReading) return;
  StopTransfer(swap, &lock);
  if (entry->state == SwapState::kReading) entry->state = SwapState::kStored;
}

void SequenceSwapper::Impl::Drop(SwapId swap) {
  Lock lock(mutex_);
  Entry* const entry = Find(swap);
  if (entry == nullptr) return;
  StopTransfer(swap, &lock);
  if (entry->state == SwapState::kWriting) {
    stats_.pending_blocks -= static_cast<int64_t>(entry->checksums.size());
    (void)pool_->Free(entry->sequence);
  }
  FreeSlots(entry);
  entries_.erase(swap);
}

SwapState SequenceSwapper::Impl::state(SwapId swap) const {
  const std::lock_guard lock(mutex_);
  const Entry* const entry = Find(swap);
  return entry == nullptr ? SwapState::kFailed : entry->state;
}

SwapState SequenceSwapper::Impl::Wait(SwapId swap) {
  Lock lock(mutex_);
  const auto state = [&] {
    const Entry* const entry = Find(swap);
    return entry == nullptr ? SwapState::kFailed : entry->state;
  };
  progress_.wait(lock, [&] { return !IsUnderWay(state()); });
  return state();
}

int64_t SequenceSwapper::Impl::length(SwapId swap) const {
  const std::lock_guard lock(mutex_);
  const Entry* const entry = Find(swap);
  return entry == nullptr ? 0 : entry->length;
}

bool SequenceSwapper::Impl::busy() const {
  const std::lock_guard lock(mutex_);
  return !queue_.empty() || running_ != kNoSwap;
}

int64_t SequenceSwapper::Impl::completions() const {
  const std::lock_guard lock(mutex_);
  return completions_;
}

void SequenceSwapper::Impl::WaitForCompletion(int64_t seen) {
  Lock lock(mutex_);
  progress_.wait(lock, [&] {
    return completions_ > seen || (queue_.empty() && running_ == kNoSwap);
  });
}

int64_t SequenceSwapper::Impl::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return file_->free_slots() * block_bytes_;
}

SwapStats SequenceSwapper::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  SwapStats stats = stats_;
  stats.write_bytes_per_s = write_rate_.per_second();
  stats.read_bytes_per_s = read_rate_.per_second();
  return stats;
}

// --- the I/O thread ----------------------------------------------------------

void SequenceSwapper::Impl::RunTransfers() {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (closing_) return;
    running_ = queue_.front();
    queue_.pop_front();
    Entry* const entry = Find(running_);
    const bool writes = entry->state == SwapState::kWriting;
    lock.unlock();
    const Clock::time_point start = Clock::now();
    const Status status = writes ? WriteOut(entry) : ReadIn(entry);
    const double seconds = SecondsSince(start);
    lock.lock();
    // Who stopped it decides what becomes of it.
    if (!entry->stopped) {
      writes ? EndWrite(entry, status, seconds)
             : EndRead(entry, status, seconds);
    }
    running_ = kNoSwap;
    ++completions_;
    progress_.notify_all();
  }
}

void SequenceSwapper::Impl::EndWrite(Entry* entry, const Status& status,
                                     double seconds) {
  const auto blocks = static_cast<int64_t>(entry->checksums.size());
  (void)pool_->Free(entry->sequence);
  entry->sequence = -1;
  stats_.pending_blocks -= blocks;
  if (status.ok()) {
    entry->state = SwapState::kStored;
    ++stats_.swapped_out;
    stats_.bytes_written += blocks * block_bytes_;
    write_rate_.Add(double(blocks * block_bytes_), seconds);
  } else {
    entry->state = SwapState::kFailed;
    ++stats_.write_failures;
    FreeSlots(entry);
  }
}

void SequenceSwapper::Impl::EndRead(Entry* entry, const Status& status,
                                    double seconds) {
  const auto blocks = static_cast<int64_t>(entry->checksums.size());
  entry->sequence = -1;
  if (status.ok()) {
    entry->state = SwapState::kLoaded;
    ++stats_.swapped_in;
    stats_.bytes_read += blocks * block_bytes_;
    read_rate_.Add(double(blocks * block_bytes_), seconds);
  } else {
    entry->state = SwapState::kFailed;
    ++stats_.read_failures;
  }
  FreeSlots(entry);
}

Result<bool> SequenceSwapper::Impl::CopyBlocks(Entry* entry, size_t begin,
                                               size_t count, bool to_pool) {
  {
    const std::lock_guard lock(mutex_);
    if (entry->stopped) return false;
  }
  table_.resize(entry->checksums.size());
  const StepPin pin(pool_);
  VARLANE_RETURN_IF_ERROR(
      pool_->CopyBlockTable(entry->sequence, table_).status());
  const KvView view = pool_->view();
  for (size_t i = 0; i < count; ++i) {
    const int32_t block = table_[begin + i];
    std::byte* const slot = file_->buffer_slot(static_cast<int64_t>(i));
    to_pool ? UnpackBlock(slot, view, block) : PackBlock(view, block, slot);
  }
  return true;
}

Status SequenceSwapper::Impl::WriteOut(Entry* entry) try {
  const std::span<const int64_t> slots = entry->slots;
  const auto most = static_cast<size_t>(file_->buffer_slots());
  for (size_t begin = 0; begin < slots.size(); begin += most) {
    const size_t count = std::min(most, slots.size() - begin);
    const Result<bool> copied = CopyBlocks(entry, begin, count, false);
    VARLANE_RETURN_IF_ERROR(copied.status());
    if (!*copied) return {};
    for (size_t i = 0; i < count; ++i) {
      entry->checksums[begin + i] =
          XxHash64({file_->buffer_slot(static_cast<int64_t>(i)),
                    static_cast<size_t>(block_bytes_)});
    }
    VARLANE_RETURN_IF_ERROR(file_->Write(slots.subspan(begin, count)));
  }
  return file_->Flush();
} catch (const std::bad_alloc&) {
  return {StatusCode::kResourceExhausted, "no memory for a block table"};
}

Status SequenceSwapper::Impl::ReadIn(Entry* entry) try {
  const std::span<const int64_t> slots = entry->slots;
  const auto most = static_cast<size_t>(file_->buffer_slots());
  for (size_t begin = 0; begin < slots.size(); begin += most) {
    const size_t count = std::min(most, slots.size() - begin);
    VARLANE_RETURN_IF_ERROR(file_->Read(slots.subspan(begin, count)));
    for (size_t i = 0; i < count; ++i) {
      VARLANE_REQUIRE(XxHash64({file_->buffer_slot(static_cast<int64_t>(i)),
                                static_cast<size_t>(block_bytes_)}) ==
                          entry->checksums[begin + i],
                      StatusCode::kUnavailable, "slot ", slots[begin + i],
                      " of the swap file is damaged");
    }
    const Result<bool> copied = CopyBlocks(entry, begin, count, true);
    VARLANE_RETURN_IF_ERROR(copied.status());
    if (!*copied) return {};
  }
  return {};
} catch (const std::bad_alloc&) {
  return {StatusCode::kResourceExhausted, "no memory for a block table"};
}

// --- the public face ---------------------------------------------------------

Result<std::unique_ptr<SequenceSwapper>> SequenceSwapper::Create(
    const SwapOptions& options, KvPool* pool) try {
  VARLANE_REQUIRE_ARG(pool != nullptr, "pool is null");
  VARLANE_REQUIRE_ARG(!options.folder.empty(), "folder is empty");
  Result<std::unique_ptr<SwapFile>> file =
      SwapFile::Create(options.folder, options.max_bytes,
                       pool->layout().block_bytes(), options.direct_io);
  VARLANE_RETURN_IF_ERROR(file.status());
  return std::unique_ptr<SequenceSwapper>(
      new SequenceSwapper(std::make_unique<Impl>(pool, *std::move(file))));
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted, "no memory for the swap file");
} catch (const std::system_error& error) {
  return Status(StatusCode::kResourceExhausted,
                StrCat("no thread for the swap file: ", error.what()));
}

SequenceSwapper::SequenceSwapper(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
SequenceSwapper::~SequenceSwapper() = default;

Result<SwapId> SequenceSwapper::SwapOut(SeqId sequence) try {
  return impl_->SwapOut(sequence);
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted, "no memory for a swap's books");
}
Status SequenceSwapper::SwapIn(SwapId swap, SeqId sequence) try {
  return impl_->SwapIn(swap, sequence);
} catch (const std::bad_alloc&) {
  return {StatusCode::kResourceExhausted, "no memory for a swap's books"};
}
void SequenceSwapper::CancelSwapIn(SwapId swap) { impl_->CancelSwapIn(swap); }
void SequenceSwapper::Drop(SwapId swap) { impl_->Drop(swap); }
SwapState SequenceSwapper::state(SwapId swap) const {
  return impl_->state(swap);
}
SwapState SequenceSwapper::Wait(SwapId swap) { return impl_->Wait(swap); }
int64_t SequenceSwapper::length(SwapId swap) const {
  return impl_->length(swap);
}
bool SequenceSwapper::busy() const { return impl_->busy(); }
int64_t SequenceSwapper::completions() const { return impl_->completions(); }
void SequenceSwapper::WaitForCompletion(int64_t seen) {
  impl_->WaitForCompletion(seen);
}
int64_t SequenceSwapper::free_bytes() const { return impl_->free_bytes(); }
SwapStats SequenceSwapper::stats() const { return impl_->stats(); }

}  // namespace varlane
