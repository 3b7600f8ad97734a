// SPDX-License-Identifier: Apache-2.0

#include "varlane/swap.h"

namespace varlane {

Eviction ChooseEviction(const EvictionCosts& costs) noexcept {
  if (costs.tokens <= 0 || costs.bytes <= 0 ||
      costs.bytes > costs.free_swap_bytes) {
    return Eviction::kRecompute;
  }
  if (!(costs.write_bytes_per_s > 0) || !(costs.read_bytes_per_s > 0) ||
      !(costs.prefill_tokens_per_s > 0)) {
    return Eviction::kSwap;
  }
  const auto bytes = static_cast<double>(costs.bytes);
  const double swap =
      bytes / costs.write_bytes_per_s + bytes / costs.read_bytes_per_s;
  const double recompute =
      static_cast<double>(costs.tokens) / costs.prefill_tokens_per_s;
  return swap < recompute ? Eviction::kSwap : Eviction::kRecompute;
}

}  // namespace varlane
