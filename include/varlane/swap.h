// SequenceSwapper: sequences in a file while others need their blocks.
//
// The alternative to computing a preempted sequence again. Blocks are written
// to slots of one preallocated file without a name, each with its checksum, and
// read back later, by a thread of the swapper's own; both are asked for and
// polled or waited for. Whatever fails on the way (a full disk, an I/O error, a
// checksum) ends as kFailed, and the caller computes again: never a wrong
// output. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SWAP_H_
#define VARLANE_SWAP_H_

#include <cstdint>
#include <memory>
#include <string>

#include "varlane/export.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"

namespace varlane {

struct SwapOptions {
  std::string folder;     // where the file is made; it never has a name there
                          //   for long, and is gone with the process
  int64_t max_bytes = 0;  // disk space, taken at Create
  bool direct_io = true;  // O_DIRECT where the file system knows it: the page
                          //   cache is memory that is short already
};

using SwapId = int64_t;
inline constexpr SwapId kNoSwap = -1;

enum class SwapState : uint8_t {
  kWriting,  // the swapper holds the sequence and its blocks
  kStored,   // in the file only
  kReading,  // into the caller's sequence
  kLoaded,   // there, bit for bit; its slots are free again
  kFailed,   // lost: compute again
};

struct SwapStats {
  int64_t swapped_out = 0;    // sequences written
  int64_t swapped_in = 0;     // sequences read back
  int64_t bytes_written = 0;  // K/V, without what fills slots up
  int64_t bytes_read = 0;
  int64_t write_failures = 0;  // sequences
  int64_t read_failures = 0;   // sequences, damaged ones included
  int64_t stored_blocks = 0;   // now, being written or read included
  int64_t pending_blocks = 0;  // now: come free when they are written
  int64_t capacity_blocks = 0;
  int64_t file_bytes = 0;
  bool direct_io = false;        // what was got
  double write_bytes_per_s = 0;  // running estimates, measured at Create first
  double read_bytes_per_s = 0;
};

// Threads: every member from any thread; one I/O thread of its own.
class VARLANE_EXPORT SequenceSwapper {
 public:
  // Makes the file, takes its disk space, and writes and reads 4 MiB of it, for
  // the first estimates and to see that it works.
  //
  // Errors: kInvalidArgument (max_bytes holds not one block), kNotFound,
  //         kPermissionDenied, kResourceExhausted (disk, heap, threads),
  //         kUnavailable; they name folder and reason. Nothing is left then.
  // Lifetime: `pool` must outlive it.
  static Result<std::unique_ptr<SequenceSwapper>> Create(
      const SwapOptions& options, KvPool* pool);
  // Waits for the transfer under way, and frees the sequences it holds.
  ~SequenceSwapper();
  SequenceSwapper(const SequenceSwapper&) = delete;
  SequenceSwapper& operator=(const SequenceSwapper&) = delete;

  // Takes `sequence` over: it is the swapper's, which frees it when it is
  // written, or cannot be. Its K/V must have been written by then.
  // Errors: kNotFound; kInvalidArgument (no token); kResourceExhausted (slots,
  //         heap). The sequence stays the caller's then.
  Result<SwapId> SwapOut(SeqId sequence);
  // Begins to read the stored sequence into `sequence`, which has its length
  // and stays the caller's. Until kLoaded or kFailed it must not be freed, cut
  // or written; CancelSwapIn or Drop first.
  // Errors: kNotFound (no such swap or sequence), kFailedPrecondition (not
  //         kStored), kInvalidArgument (another length), kResourceExhausted.
  Status SwapIn(SwapId swap, SeqId sequence);
  // Stops a SwapIn: kStored again, unless it was read or lost already. Nothing
  // of the swapper's touches the sequence any more on return.
  void CancelSwapIn(SwapId swap);
  // Forgets the swap, whatever its state; the id is none afterwards. As
  // CancelSwapIn for a sequence being read.
  void Drop(SwapId swap);

  // kFailed for an id that is none.
  SwapState state(SwapId swap) const;
  // Blocks while kWriting or kReading.
  SwapState Wait(SwapId swap);
  // Tokens of the sequence; 0 for an id that is none.
  int64_t length(SwapId swap) const;

  // Transfers queued or under way.
  bool busy() const;
  // Transfers that ended, well or not, since Create; and waiting for one more
  // than `seen`. Returns at once when nothing is under way.
  int64_t completions() const;
  void WaitForCompletion(int64_t seen);

  // Bytes that SwapOut could take now.
  int64_t free_bytes() const;
  SwapStats stats() const;

 private:
  class Impl;
  explicit SequenceSwapper(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// --- swap or recompute -------------------------------------------------------

enum class Eviction : uint8_t { kRecompute, kSwap };

// What is known of both ways; rates that were not measured yet are 0.
struct EvictionCosts {
  int64_t tokens = 0;           // to compute again
  int64_t bytes = 0;            // to write and read instead
  int64_t free_swap_bytes = 0;  // room for them
  double write_bytes_per_s = 0;
  double read_bytes_per_s = 0;
  double prefill_tokens_per_s = 0;
};

// The cheaper way: bytes / write + bytes / read against tokens / prefill.
// Recompute where there is no room, nothing to keep or a tie; swap while a rate
// is not known, which is how it becomes known.
VARLANE_EXPORT Eviction ChooseEviction(const EvictionCosts& costs) noexcept;

}  // namespace varlane

#endif  // VARLANE_SWAP_H_
