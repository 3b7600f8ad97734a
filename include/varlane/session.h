// Sessions: a sequence's K/V in a file, to go on with it later or elsewhere.
//
// A file holds the layout, the length, on request the tokens, and every block
// with its checksum; integers are little-endian. What is computed after a load
// has the same bits as without: blocks are stored byte for byte, and a row
// depends on nothing else (docs/numerics.md). Whether a pool shards its heads
// makes no difference to the file. Slots past the length are stored
// as zeros: another sequence's remains never leave the process. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SESSION_H_
#define VARLANE_SESSION_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "varlane/export.h"
#include "varlane/kv_layout.h"
#include "varlane/kv_pool.h"
#include "varlane/status.h"

namespace varlane {

// What a session file says of itself.
struct SessionInfo {
  KvLayout layout;
  int64_t length = 0;  // tokens
  bool has_tokens = false;
  int64_t file_bytes = 0;
};

struct LoadedSession {
  SeqId sequence = -1;  // the caller's to Free
  int64_t length = 0;
  std::vector<int32_t> tokens;  // [length], or empty where none were saved
};

// Writes `sequence` to `path`, readable by its owner only (mode 0600).
// `tokens` is empty or has one id a position.
//
// The file is replaced as a whole: it is written beside `path`, synced and
// renamed, so that a reader, a crash or a full disk finds the old file or the
// new one.
//
// Threads: the sequence may be appended to, forked, truncated and freed
//          meanwhile (the blocks are held); its K/V below the length must have
//          been written. Counts as an outstanding step (KvPool::BeginStep).
// Errors:  kNotFound (no such sequence, no such folder), kInvalidArgument
//          (count of tokens), kResourceExhausted (disk, heap),
//          kPermissionDenied, kUnavailable; they name path and reason, and
//          `path` is as it was.
// Cost:    the bytes written once, at the disk's speed; one block of heap.
VARLANE_EXPORT Status SaveSession(KvPool* pool, SeqId sequence,
                                  std::span<const int32_t> tokens,
                                  const std::string& path);

// A new sequence of `pool` with what the file holds.
//
// The file may come from strangers: nothing in it is believed. The pool's
// layout must be the file's in every field; number of blocks, their order and
// sharding aside.
//
// Threads: any; counts as an outstanding step (KvPool::BeginStep).
// Errors:  kInvalidArgument naming what is wrong: no session file, another
//          version, a field, its value and the pool's, a damaged byte range,
//          a length that the file's size contradicts; kResourceExhausted when
//          the pool has too few free blocks (needed, free) or the heap too
//          little; kNotFound, kPermissionDenied, kUnavailable (the file).
//          The pool holds what it held.
VARLANE_EXPORT Result<LoadedSession> LoadSession(KvPool* pool,
                                                 const std::string& path);

// The file's header, checked; its blocks are not read. Errors: as LoadSession.
VARLANE_EXPORT Result<SessionInfo> ReadSessionInfo(const std::string& path);

}  // namespace varlane

#endif  // VARLANE_SESSION_H_
