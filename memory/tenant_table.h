// TenantTable: how many blocks each tenant's sequences hold, and may hold.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_TENANT_TABLE_H_
#define VARLANE_MEMORY_TENANT_TABLE_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "memory/thread_slot.h"
#include "varlane/kv_pool.h"

namespace varlane {

// One tenant's account. What it holds is spread over parts by thread, since
// most tenants have no quota and then nobody needs the sum.
//
// Threads: safe from any. Beside others used() is some value between before and
//          after, so under a quota takings go one after the other.
class Tenant {
 public:
  // Takes `blocks` where the quota allows it.
  bool Charge(int64_t blocks) noexcept {
    if (quota() < 0 || blocks <= 0) {
      ForceCharge(blocks);
      return true;
    }
    const std::lock_guard lock(charges_);
    const int64_t most = quota();
    if (most >= 0 && used() + blocks > most) return false;
    ForceCharge(blocks);
    return true;
  }
  // Takes `blocks`, whatever the quota says.
  void ForceCharge(int64_t blocks) noexcept { used_.Add(blocks); }
  void Refund(int64_t blocks) noexcept { used_.Add(-blocks); }
  void CountRefusal() noexcept { refusals_.fetch_add(1); }

  int64_t used() const noexcept { return used_.Sum(); }
  int64_t quota() const noexcept { return quota_.load(); }

 private:
  friend class TenantTable;
  SpreadCounter used_;  // on cache lines of its own
  std::atomic<int64_t> quota_{-1};
  std::atomic<int64_t> refusals_{0};
  std::mutex charges_;
  int64_t sequences_ = 0;  // guarded by the table
};

// Threads: safe from any.
class TenantTable {
 public:
  // The tenant's account, for one sequence more. Throws std::bad_alloc.
  Tenant* Join(TenantId id);
  // For one more sequence of a tenant that has one.
  void JoinAgain(Tenant* tenant) noexcept;
  // One sequence less. Forgets a tenant that has nothing and no quota.
  void Leave(TenantId id) noexcept;

  // Throws std::bad_alloc.
  void SetQuota(TenantId id, int64_t max_blocks);
  KvTenantStats stats(TenantId id) const;
  // By id. Throws std::bad_alloc.
  std::vector<KvTenant> all() const;
  // Sum of what all hold.
  int64_t used() const;

 private:
  // mutex_ is held.
  static KvTenantStats StatsOf(const Tenant& tenant) noexcept;

  mutable std::mutex mutex_;
  std::unordered_map<TenantId, Tenant> tenants_;  // nodes stay where they are
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_TENANT_TABLE_H_
