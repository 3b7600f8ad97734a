// SPDX-License-Identifier: Apache-2.0

#include "memory/tenant_table.h"

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
  const Tenant& tenant = found->second;
  return {.used_blocks = tenant.used(),
          .quota_blocks = tenant.quota(),
          .sequences = tenant.sequences_,
          .refusals = tenant.refusals_.load()};
}

int64_t TenantTable::used() const {
  const std::lock_guard lock(mutex_);
  int64_t used = 0;
  for (const auto& [id, tenant] : tenants_) used += tenant.used();
  return used;
}

}  // namespace varlane
