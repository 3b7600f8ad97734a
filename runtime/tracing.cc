// SPDX-License-Identifier: Apache-2.0

#include "runtime/tracing.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace varlane {
namespace {

constinit thread_local TraceRecorder* innermost_recorder = nullptr;

// The ring this thread used last.
struct CachedRing {
  uint64_t tracer = 0;
  TraceRing* ring = nullptr;
};
constinit thread_local CachedRing cached_ring;

uint64_t Pack(uint32_t low, uint32_t high) {
  return uint64_t{low} | uint64_t{high} << 32;
}
uint32_t Low(uint64_t word) { return static_cast<uint32_t>(word); }
uint32_t High(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

std::array<uint64_t, TraceRing::kWords> ToWords(const Slice& slice) {
  const auto u32 = [](int32_t value) { return static_cast<uint32_t>(value); };
  return {static_cast<uint64_t>(slice.begin),
          static_cast<uint64_t>(slice.end),
          Pack(uint32_t{slice.name} | static_cast<uint32_t>(slice.kind) << 16,
               u32(slice.worker)),
          static_cast<uint64_t>(slice.index),
          static_cast<uint64_t>(slice.note.sequence),
          Pack(u32(slice.note.partition_begin), u32(slice.note.partition_end)),
          Pack(u32(slice.note.head), 0),
          static_cast<uint64_t>(slice.note.bytes)};
}

Slice FromWords(const std::array<uint64_t, TraceRing::kWords>& words) {
  Slice slice;
  slice.begin = static_cast<int64_t>(words[0]);
  slice.end = static_cast<int64_t>(words[1]);
  slice.name = static_cast<uint16_t>(words[2]);
  slice.kind = static_cast<SliceKind>(Low(words[2]) >> 16);
  slice.worker = static_cast<int32_t>(High(words[2]));
  slice.index = static_cast<int64_t>(words[3]);
  slice.note.sequence = static_cast<int64_t>(words[4]);
  slice.note.partition_begin = static_cast<int32_t>(Low(words[5]));
  slice.note.partition_end = static_cast<int32_t>(High(words[5]));
  slice.note.head = static_cast<int32_t>(Low(words[6]));
  slice.note.bytes = static_cast<int64_t>(words[7]);
  return slice;
}

}  // namespace

// --- TraceRing ---------------------------------------------------------------

TraceRing::TraceRing(size_t num_slices)
    : num_slices_(num_slices), slots_(std::make_unique<Words[]>(num_slices)) {}

// head_ goes first, and each word after it, so that a reader that saw a word of
// this slice then sees that the slot is being written. Release stores are plain
// ones on x86: an exchange or a fence would wait for all that the body stored.
void TraceRing::Push(const Slice& slice) noexcept {
  const uint64_t at = tail_.load(std::memory_order_relaxed);
  head_.store(at + 1, std::memory_order_relaxed);
  const auto words = ToWords(slice);
  Words& slot = slots_[next_slot_];
  for (size_t i = 0; i < kWords; ++i) {
    slot.word[i].store(words[i], std::memory_order_release);
  }
  tail_.store(at + 1, std::memory_order_release);
  if (++next_slot_ == num_slices_) next_slot_ = 0;
  // The ring is larger than caches: the next slot is there by the next push.
  __builtin_prefetch(&slots_[next_slot_], 1);
}

void TraceRing::Read(std::vector<Slice>* slices) const {
  const uint64_t end = tail_.load(std::memory_order_acquire);
  const uint64_t begin = end > num_slices_ ? end - num_slices_ : 0;
  const size_t first = slices->size();
  for (uint64_t at = begin; at < end; ++at) {
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) {
      words[i] =
          slots_[at % num_slices_].word[i].load(std::memory_order_acquire);
    }
    slices->push_back(FromWords(words));
  }
  const uint64_t head = head_.load(std::memory_order_relaxed);
  const uint64_t safe = head > num_slices_ ? head - num_slices_ : 0;
  if (safe <= begin) return;
  const auto lost = static_cast<ptrdiff_t>(std::min(safe, end) - begin);
  const auto from = slices->begin() + static_cast<ptrdiff_t>(first);
  slices->erase(from, from + lost);
}

int64_t TraceRing::num_lost() const noexcept {
  return std::max<int64_t>(num_pushed() - static_cast<int64_t>(num_slices_), 0);
}

// --- Tracer::Impl ------------------------------------------------------------

Tracer::Impl::Impl(const TraceOptions& options)
    : id_([] {
        static std::atomic<uint64_t> next = 1;
        return next.fetch_add(1, std::memory_order_relaxed);
      }()),
      slices_per_thread_(options.slices_per_thread),
      names_(1, "?") {
  names_.emplace_back("read GB/s");
}

TraceRing* Tracer::Impl::Ring() noexcept {
  if (cached_ring.tracer == id_) return cached_ring.ring;
  try {
    auto ring = std::make_unique<TraceRing>(slices_per_thread_);
    const std::lock_guard lock(mutex_);
    rings_.push_back(std::move(ring));
    cached_ring = {id_, rings_.back().get()};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  return cached_ring.ring;
}

uint16_t Tracer::Impl::Intern(std::string_view name) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    const auto at = std::find(names_.begin(), names_.end(), name);
    if (at != names_.end()) return static_cast<uint16_t>(at - names_.begin());
    if (names_.size() > std::numeric_limits<uint16_t>::max()) return 0;
    names_.emplace_back(name);
    return static_cast<uint16_t>(names_.size() - 1);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

TraceStats Tracer::Impl::stats() const noexcept {
  const std::lock_guard lock(mutex_);
  TraceStats stats;
  stats.num_threads = static_cast<int>(rings_.size());
  for (const std::unique_ptr<TraceRing>& ring : rings_) {
    stats.slices += ring->num_pushed();
    stats.overwritten += ring->num_lost();
  }
  return stats;
}

// --- what records ------------------------------------------------------------

void LaunchTrace::Begin(Tracer::Impl* with,
                        std::string_view launch_name) noexcept {
  tracer = with;
  name = with->Intern(launch_name.empty() ? "launch" : launch_name);
  bytes.store(0, std::memory_order_relaxed);
  surplus.store(0, std::memory_order_relaxed);
  begin = with->clock().Now();
}

void LaunchTrace::EndLaunch(int worker, int64_t num_threadgroups) noexcept {
  CountBandwidth();
  TraceRing* const ring = tracer->Ring();
  if (ring == nullptr) return;
  Slice slice;
  slice.begin = begin;
  slice.end = std::max(begin, tracer->clock().Now());
  slice.name = name;
  slice.kind = SliceKind::kLaunch;
  slice.worker = worker;
  slice.index = num_threadgroups;
  slice.note.sequence = surplus.load(std::memory_order_relaxed);
  slice.note.bytes = bytes.load(std::memory_order_relaxed);
  ring->Push(slice);
}

void LaunchTrace::CountBandwidth() noexcept {
  const int64_t read = bytes.load(std::memory_order_relaxed);
  TraceRing* const ring = tracer->Ring();
  if (read == 0 || ring == nullptr) return;
  Slice slice;
  slice.kind = SliceKind::kReadRate;
  slice.name = Tracer::Impl::kReadRateName;
  slice.begin = begin;
  slice.end = tracer->clock().Now();
  slice.note.bytes = read;
  ring->Push(slice);
}

TraceRecorder::TraceRecorder(LaunchTrace* launch, int worker) noexcept
    : ring_(launch->tracer->Ring()),
      clock_(launch->tracer->clock()),
      last_(clock_.Now()),
      name_(launch->name),
      worker_(worker),
      launch_(launch),
      outer_(innermost_recorder) {
  innermost_recorder = this;
}

TraceRecorder::~TraceRecorder() {
  innermost_recorder = outer_;
  launch_->bytes.fetch_add(bytes_, std::memory_order_relaxed);
  launch_->surplus.fetch_add(surplus_, std::memory_order_relaxed);
}

// A surplus threadgroup takes nanoseconds, less than asking for the time does:
// it is counted, and the next slice begins those nanoseconds early.
void TraceRecorder::End(int64_t index) noexcept {
  is_timed_ = !is_surplus_;
  if (is_surplus_) {
    ++surplus_;
    return;
  }
  bytes_ += note_.bytes;
  const int64_t begin = last_;
  last_ = std::max(begin, clock_.Now());
  if (ring_ == nullptr) return;
  Slice slice;
  slice.begin = begin;
  slice.end = last_;
  slice.name = name_;
  slice.worker = worker_;
  slice.index = index;
  slice.note = note_;
  ring_->Push(slice);
}

void Threadgroup::Annotate(const TraceNote& note) const noexcept {
  if (innermost_recorder != nullptr) innermost_recorder->note_ = note;
}

void Threadgroup::MarkSurplus() const noexcept {
  if (innermost_recorder != nullptr) innermost_recorder->is_surplus_ = true;
}

TraceScope::TraceScope(const LaunchTrace& launch, int worker) noexcept
    : launch_(launch), worker_(worker) {
  if (launch.tracer != nullptr) begin_ = launch.tracer->clock().Now();
}

TraceScope::~TraceScope() {
  if (launch_.tracer == nullptr) return;
  TraceRing* const ring = launch_.tracer->Ring();
  if (ring == nullptr) return;
  Slice slice;
  slice.begin = begin_;
  slice.end = std::max(begin_, launch_.tracer->clock().Now());
  slice.name = launch_.name;
  slice.kind = SliceKind::kHost;
  slice.worker = worker_;
  ring->Push(slice);
}

}  // namespace varlane
