// Kernels of the f32 cache, compiled for every target.
//
// SPDX-License-Identifier: Apache-2.0

#include "kernels/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/kv_f32.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/std_headers.h"

#define VARLANE_OPS OpsF32
#define VARLANE_KV kKvF32
#define VARLANE_MULTIPLIES_BF16 0
#include "kernels/passes-inl.h"
