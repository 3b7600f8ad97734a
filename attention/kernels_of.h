// Which kernels a runtime's options choose.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_ATTENTION_KERNELS_OF_H_
#define VARLANE_ATTENTION_KERNELS_OF_H_

#include "kernels/kernel_table.h"
#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// The table that RuntimeOptions::simd_target names; never null.
// Errors: kNotFound for an unknown or unsupported one, listing those there are.
Result<const KernelTable*> KernelsOf(const Runtime& runtime);

}  // namespace varlane

#endif  // VARLANE_ATTENTION_KERNELS_OF_H_
