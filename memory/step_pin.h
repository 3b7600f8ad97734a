// StepPin: while it lives, the pool's blocks stay where their tables say.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_STEP_PIN_H_
#define VARLANE_MEMORY_STEP_PIN_H_

#include "varlane/kv_pool.h"

namespace varlane {

class StepPin {
 public:
  explicit StepPin(KvPool* pool) : pool_(pool) { pool_->BeginStep(); }
  ~StepPin() { pool_->EndStep(); }
  StepPin(const StepPin&) = delete;
  StepPin& operator=(const StepPin&) = delete;

 private:
  KvPool* const pool_;
};

}  // namespace varlane

#endif  // VARLANE_MEMORY_STEP_PIN_H_
