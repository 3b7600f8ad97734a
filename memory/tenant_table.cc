// SPDX-License-Identifier: Apache-2.0

#include "memory/tenant_table.h"

#include <algorithm>

namespace varlane {

Tenant* TenantTable::Join(TenantId id) {
  const std::lock_guard lock(mutex_);
  Tenant& tenant = tenants_[id];
  ++tenant.sequences_;
  return &tenant;
}

void TenantTable::JoinAgain(Tenant* tenant) noexcept {
  const std::lock_guard lock(mutex_);
  ++tenant->sequences_;
}

void TenantTable::Leave(TenantId id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(id);
  if (found == tenants_.end()) return;
  Tenant& tenant = found->second;
  --tenant.sequences_;
  if (tenant.sequences_ == 0 && tenant.used() == 0 && tenant.quota() < 0) {
    tenants_.erase(found);
  }
}

void TenantTable::SetQuota(TenantId id, int64_t max_blocks) {
  const std::lock_guard lock(mutex_);
  tenants_[id].quota_.store(max_blocks);
}

KvTenantStats TenantTable::stats(TenantId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = tenants_.find(id);
  if (found == tenants_.end()) return {};
  return StatsOf(found->second);
}

KvTenantStats TenantTable::StatsOf(const Tenant& tenant) noexcept {
  return {.used_blocks = tenant.used(),
          .quota_blocks = tenant.quota(),
          .sequences = tenant.sequences_,
          .refusals = tenant.refusals_.load()};
}

std::vector<KvTenant> TenantTable::all() const {
  std::vector<KvTenant> all;
  {
    const std::lock_guard lock(mutex_);
    all.reserve(tenants_.size());
    for (const auto& [id, tenant] : tenants_) {
      all.push_back({id, StatsOf(tenant)});
    }
  }
  std::sort(all.begin(), all.end(),
            [](const KvTenant& a, const KvTenant& b) { return a.id < b.id; });
  return all;
}

int64_t TenantTable::used() const {
  const std::lock_guard lock(mutex_);
  int64_t used = 0;
  for (const auto& [id, tenant] : tenants_) used += tenant.used();
  return used;
}

}  // namespace varlane
