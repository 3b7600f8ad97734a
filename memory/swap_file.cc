// SPDX-License-Identifier: Apache-2.0

#include "memory/swap_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/math.h"
#include "base/os_calls.h"

namespace varlane {
namespace {

// Long enough for a disk's full speed, short enough to be spared.
constexpr int64_t kBufferBytes = int64_t{4} << 20;

// A file without a name in `folder`.
Result<File> OpenNameless(const std::string& folder, int flags) {
  constexpr unsigned int kMode = S_IRUSR | S_IWUSR;
  Result<File> file = File::Open(folder, O_TMPFILE | O_RDWR | flags, kMode);
  if (file.ok() || file.status().code() != StatusCode::kUnavailable) {
    return file;
  }
  // Not on this file system: a name, for a moment.
  static std::atomic<uint64_t> count{0};
  const std::string name =
      StrCat(folder, "/varlane-swap.", getpid(), ".", count.fetch_add(1));
  file = File::Open(name, O_CREAT | O_EXCL | O_RDWR | flags, kMode);
  if (file.ok()) (void)os::Unlink(name.c_str());
  return file;
}

}  // namespace

SwapFile::SwapFile(int64_t num_slots, int64_t slot_bytes)
    : num_slots_(num_slots),
      slot_bytes_(slot_bytes),
      free_slots_(num_slots),
      free_(num_slots) {
  free_.InsertRange(0, num_slots);
  buffer_slots_ = std::clamp<int64_t>(kBufferBytes / slot_bytes, 1, num_slots);
  const auto bytes = static_cast<size_t>(buffer_slots_ * slot_bytes_);
  buffer_.reset(static_cast<std::byte*>(
      ::operator new (bytes, std::align_val_t{kAlignment})));
  std::memset(buffer_.get(), 0, bytes);
}

Result<std::unique_ptr<SwapFile>> SwapFile::Create(const std::string& folder,
                                                   int64_t max_bytes,
                                                   int64_t block_bytes,
                                                   bool direct_io) {
  const int64_t slot_bytes = RoundUp(block_bytes, kAlignment);
  const int64_t num_slots = std::min<int64_t>(
      max_bytes / slot_bytes, std::numeric_limits<int32_t>::max());
  VARLANE_REQUIRE_ARG(num_slots >= 1, "max_bytes = ", max_bytes,
                      ", but one block takes ", slot_bytes);
  std::unique_ptr<SwapFile> file(new SwapFile(num_slots, slot_bytes));
  Status status;
  for (const bool direct : {true, false}) {
    if (direct && !direct_io) continue;
    // O_DIRECT may be refused when opening (tmpfs) or when writing.
    status = file->Open(folder, direct);
    if (status.ok()) status = file->Probe();
    if (status.ok()) return file;
  }
  return status;
}

Status SwapFile::Open(const std::string& folder, bool direct_io) {
  Result<File> file = OpenNameless(folder, direct_io ? O_DIRECT : 0);
  VARLANE_RETURN_IF_ERROR(file.status());
  VARLANE_RETURN_IF_ERROR(file->Allocate(file_bytes()));
  file_ = *std::move(file);
  direct_io_ = direct_io;
  return {};
}

Status SwapFile::Probe() {
  std::vector<int64_t> slots(static_cast<size_t>(buffer_slots_));
  for (int64_t i = 0; i < buffer_slots_; ++i) {
    slots[static_cast<size_t>(i)] = i;
    std::memset(buffer_slot(i), static_cast<int>(i % 251 + 1),
                static_cast<size_t>(slot_bytes_));
  }
  const auto bytes = static_cast<double>(buffer_slots_ * slot_bytes_);
  auto start = Clock::now();
  VARLANE_RETURN_IF_ERROR(Write(slots));
  VARLANE_RETURN_IF_ERROR(Flush());
  write_rate_.Add(bytes, SecondsSince(start));
  std::memset(buffer(), 0, static_cast<size_t>(buffer_slots_ * slot_bytes_));
  start = Clock::now();
  VARLANE_RETURN_IF_ERROR(Read(slots));
  read_rate_.Add(bytes, SecondsSince(start));
  for (int64_t i = 0; i < buffer_slots_; ++i) {
    const std::byte want = std::byte(i % 251 + 1);
    const std::byte* const slot = buffer_slot(i);
    VARLANE_REQUIRE(std::all_of(slot, slot + slot_bytes_,
                                [want](std::byte b) { return b == want; }),
                    StatusCode::kUnavailable, file_.path(), ": slot ", i,
                    " was not read back as written");
  }
  return {};
}

void SwapFile::Allocate(std::span<int64_t> slots) noexcept {
  VARLANE_DCHECK(static_cast<int64_t>(slots.size()) <= free_slots_);
  for (int64_t& slot : slots) {
    slot = free_.Min();
    free_.Erase(slot);
  }
  free_slots_ -= static_cast<int64_t>(slots.size());
}

void SwapFile::Free(std::span<const int64_t> slots) noexcept {
  for (const int64_t slot : slots) free_.Insert(slot);
  free_slots_ += static_cast<int64_t>(slots.size());
}

// Calls transfer(offset in the file, bytes of the buffer) for each run of slots
// that follow each other.
template <typename Transfer>
Status SwapFile::ForRuns(std::span<const int64_t> slots,
                         const Transfer& transfer) const {
  for (size_t begin = 0; begin < slots.size();) {
    size_t end = begin + 1;
    while (end < slots.size() && slots[end] == slots[end - 1] + 1) ++end;
    const std::span<std::byte> bytes{
        buffer_slot(static_cast<int64_t>(begin)),
        (end - begin) * static_cast<size_t>(slot_bytes_)};
    VARLANE_RETURN_IF_ERROR(transfer(slots[begin] * slot_bytes_, bytes));
    begin = end;
  }
  return {};
}

Status SwapFile::Write(std::span<const int64_t> slots) const {
  return ForRuns(slots, [this](int64_t offset, std::span<std::byte> bytes) {
    return file_.WriteAt(offset, bytes);
  });
}

Status SwapFile::Read(std::span<const int64_t> slots) const {
  return ForRuns(slots, [this](int64_t offset, std::span<std::byte> bytes) {
    return file_.ReadAt(offset, bytes);
  });
}

Status SwapFile::Flush() const { return direct_io_ ? Status() : file_.Sync(); }

}  // namespace varlane
