// All owner patterns and partition modes, for tests that try every one.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_LAUNCH_MODES_H_
#define VARLANE_TESTS_TESTING_LAUNCH_MODES_H_

#include "varlane/attention.h"

namespace varlane::testing {

inline constexpr OwnerPattern kOwnerPatterns[] = {
    OwnerPattern::kSearch, OwnerPattern::kMap, OwnerPattern::kPlanned,
    OwnerPattern::kPadded};

// kAuto is one of them.
inline constexpr PartitionMode kPartitionModes[] = {PartitionMode::kWalk,
                                                    PartitionMode::kSpread};

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_LAUNCH_MODES_H_
