// Standard and project headers of the kernels, included before any target
// attribute is in force: what they define must not be compiled for AVX-512.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_KERNELS_STD_HEADERS_H_
#define VARLANE_KERNELS_STD_HEADERS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "hwy/cache_control.h"
#include "kernels/args.h"
#include "kernels/kernel_table.h"
#include "varlane/dtype.h"
#include "varlane/function_ref.h"
#include "varlane/kv_layout.h"

#endif  // VARLANE_KERNELS_STD_HEADERS_H_
