// SwapFile: slots of a nameless file, each large enough for one block.
//
//   slot 0 | slot 1 | slot 2 | ...      slot_bytes = block_bytes, rounded up to
//                                       4096, as O_DIRECT wants it
//
// Slots that follow each other are written and read in one call, out of one
// aligned buffer. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_SWAP_FILE_H_
#define VARLANE_MEMORY_SWAP_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "base/rate_estimate.h"
#include "memory/file.h"
#include "memory/free_set.h"
#include "varlane/status.h"

namespace varlane {

// Threads: not synchronised; but Transfer may run beside Allocate and Free.
class SwapFile {
 public:
  // What every offset, length and address is a multiple of.
  static constexpr int64_t kAlignment = 4096;

  // Errors: as SequenceSwapper::Create. May throw std::bad_alloc.
  static Result<std::unique_ptr<SwapFile>> Create(const std::string& folder,
                                                  int64_t max_bytes,
                                                  int64_t block_bytes,
                                                  bool direct_io);

  int64_t num_slots() const { return num_slots_; }
  int64_t free_slots() const { return free_slots_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  int64_t file_bytes() const { return num_slots_ * slot_bytes_; }
  bool direct_io() const { return direct_io_; }

  // Fills `slots`, the lowest free ones. Requires: enough are free.
  void Allocate(std::span<int64_t> slots) noexcept;
  void Free(std::span<const int64_t> slots) noexcept;

  // The buffer that all transfers go through; as many slots at once fit it.
  std::byte* buffer() const { return buffer_.get(); }
  int64_t buffer_slots() const { return buffer_slots_; }
  std::byte* buffer_slot(int64_t i) const {
    return buffer_.get() + i * slot_bytes_;
  }

  // Writes resp. reads the first slots.size() slots of the buffer.
  // Errors: File's. Requires: slots.size() <= buffer_slots().
  Status Write(std::span<const int64_t> slots) const;
  Status Read(std::span<const int64_t> slots) const;
  // Where the page cache took what was written: makes the disk have it, so that
  // the time is the disk's and the pages can be dropped.
  Status Flush() const;

  // What Create measured.
  const RateEstimate& write_rate() const { return write_rate_; }
  const RateEstimate& read_rate() const { return read_rate_; }

 private:
  struct FreeBuffer {
    void operator()(std::byte* p) const {
      ::operator delete (p, std::align_val_t{kAlignment});
    }
  };

  SwapFile(int64_t num_slots, int64_t slot_bytes);
  Status Open(const std::string& folder, bool direct_io);
  // Writes and reads a buffer full, compares, and measures.
  Status Probe();
  template <typename Transfer>
  Status ForRuns(std::span<const int64_t> slots,
                 const Transfer& transfer) const;

  const int64_t num_slots_;
  const int64_t slot_bytes_;
  int64_t free_slots_;
  FreeSet free_;
  File file_;
  bool direct_io_ = false;
  int64_t buffer_slots_ = 0;
  std::unique_ptr<std::byte, FreeBuffer> buffer_;
  RateEstimate write_rate_;
  RateEstimate read_rate_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_SWAP_FILE_H_
