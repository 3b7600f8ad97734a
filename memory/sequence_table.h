// SequenceTable: a pool's sequences, in groups of one lock each.
//
// A sequence belongs to the group that its id says, so threads with sequences
// of their own seldom meet. Whoever holds all locks has the pool to itself:
// every change of a block table happens under one of them. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_SEQUENCE_TABLE_H_
#define VARLANE_MEMORY_SEQUENCE_TABLE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "memory/block_table.h"
#include "memory/pool_prefixes.h"
#include "memory/tenant_table.h"
#include "varlane/kv_pool.h"

namespace varlane {

struct KvSequence {
  BlockTable table;
  CommittedTokens tokens;  // what the prefix cache knows of it
  TenantId tenant_id = 0;
  Tenant* tenant = nullptr;
  int home_node = -1;
};

class SequenceTable {
 public:
  // Fewer than the 64 locks that ThreadSanitizer lets a thread hold.
  static constexpr size_t kGroups = 32;

  struct alignas(64) Group {
    mutable std::mutex mutex;
    std::unordered_map<SeqId, KvSequence> sequences;

    KvSequence* Find(SeqId seq) {
      const auto found = sequences.find(seq);
      return found == sequences.end() ? nullptr : &found->second;
    }
    const KvSequence* Find(SeqId seq) const {
      const auto found = sequences.find(seq);
      return found == sequences.end() ? nullptr : &found->second;
    }
  };

  // All groups' locks, taken in order.
  class AllLocked {
   public:
    explicit AllLocked(const SequenceTable& table) {
      for (size_t i = 0; i < kGroups; ++i) {
        locks_[i] = std::unique_lock(table.groups_[i].mutex);
      }
    }

   private:
    std::array<std::unique_lock<std::mutex>, kGroups> locks_;
  };

  // Two groups' locks, in order; the same one is taken once.
  class TwoLocked {
   public:
    TwoLocked(Group& a, Group& b) : first_(&a < &b ? a.mutex : b.mutex) {
      if (&a != &b) second_ = std::unique_lock(&a < &b ? b.mutex : a.mutex);
    }

   private:
    std::unique_lock<std::mutex> first_;
    std::unique_lock<std::mutex> second_;
  };

  // Ids are never used again.
  SeqId NewId() noexcept { return next_.fetch_add(1); }
  Group& GroupOf(SeqId seq) noexcept {
    return groups_[static_cast<size_t>(seq) % kGroups];
  }
  const Group& GroupOf(SeqId seq) const noexcept {
    return groups_[static_cast<size_t>(seq) % kGroups];
  }
  // Requires: AllLocked.
  std::array<Group, kGroups>& groups() noexcept { return groups_; }
  const std::array<Group, kGroups>& groups() const noexcept { return groups_; }

 private:
  std::array<Group, kGroups> groups_;
  std::atomic<SeqId> next_{0};
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_SEQUENCE_TABLE_H_
