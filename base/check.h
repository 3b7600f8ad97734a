// Checks in tiers: who is wrong decides what happens.
//
//   VARLANE_REQUIRE(cond, code, ...)  the caller is wrong: Status, every build
//   VARLANE_ENSURE(cond, ...)         we are wrong, fallible function: debug
//                                     traps, release returns kInternal
//   VARLANE_DCHECK(cond)              we are wrong, hot function: debug traps,
//                                     release free
//   VARLANE_DCHECK_SLOW(cond)         O(n) walkers; check level 2 only
//
// VARLANE_CHECK_LEVEL is 0 (release), 1 (debug) or 2 (debug with walkers).
// The trailing arguments of the first two are concatenated by MessageCat, only
// when the check fails. After mimalloc's assert tiers and libjxl's JXL_ENSURE.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_CHECK_H_
#define VARLANE_BASE_CHECK_H_

#include "base/strings.h"
#include "varlane/status.h"

#ifndef VARLANE_CHECK_LEVEL
#define VARLANE_CHECK_LEVEL 0
#endif

#define VARLANE_REQUIRE(cond, code, ...)                                    \
  do {                                                                      \
    if (!(cond)) [[unlikely]] {                                             \
      return ::varlane::Status((code), ::varlane::MessageCat(__VA_ARGS__)); \
    }                                                                       \
  } while (false)

#define VARLANE_REQUIRE_ARG(cond, ...) \
  VARLANE_REQUIRE(cond, ::varlane::StatusCode::kInvalidArgument, __VA_ARGS__)

#define VARLANE_RETURN_IF_ERROR(expr)                                    \
  do {                                                                   \
    if (::varlane::Status varlane_status = (expr); !varlane_status.ok()) \
        [[unlikely]] {                                                   \
      return varlane_status;                                             \
    }                                                                    \
  } while (false)

#if VARLANE_CHECK_LEVEL >= 1
#define VARLANE_DCHECK(cond)       \
  do {                             \
    if (!(cond)) __builtin_trap(); \
  } while (false)
#else
#define VARLANE_DCHECK(cond) \
  do {                       \
    (void)sizeof(!(cond));   \
  } while (false)
#endif

#if VARLANE_CHECK_LEVEL >= 2
#define VARLANE_DCHECK_SLOW(cond) VARLANE_DCHECK(cond)
#else
#define VARLANE_DCHECK_SLOW(cond) \
  do {                            \
    (void)sizeof(!(cond));        \
  } while (false)
#endif

#define VARLANE_ENSURE(cond, ...)                                   \
  do {                                                              \
    if (!(cond)) [[unlikely]] {                                     \
      VARLANE_DCHECK(false && "VARLANE_ENSURE");                    \
      return ::varlane::Status(::varlane::StatusCode::kInternal,    \
                               ::varlane::MessageCat(__VA_ARGS__)); \
    }                                                               \
  } while (false)

#endif  // VARLANE_BASE_CHECK_H_
