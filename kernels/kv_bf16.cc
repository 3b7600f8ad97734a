// Kernels of the bf16 cache, compiled for every target.
//
// SPDX-License-Identifier: Apache-2.0

#include "kernels/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/kv_bf16.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/std_headers.h"

#define VARLANE_OPS OpsBf16
#define VARLANE_KV kKvBf16
#define VARLANE_MULTIPLIES_BF16 1
#include "kernels/passes-inl.h"
