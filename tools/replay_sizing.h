// How many blocks a replay's pool gets, and why.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_REPLAY_SIZING_H_
#define VARLANE_TOOLS_REPLAY_SIZING_H_

#include "tools/replay.h"

namespace varlane::tools {

KvLayout ReplayLayout(const ReplayOptions& options);

// Fixed by the options, or else the smaller of what the memory budget allows
// and what the workload can hold at once: a demo should not touch all of RAM.
// Without an explicit fraction a claim that is refused takes the fraction that
// fits. Errors: kResourceExhausted with the budget's refusal;
//         kInvalidArgument (layout).
Result<PoolSizing> SizePool(const ReplayOptions& options,
                            const Workload& workload, int num_workers);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_REPLAY_SIZING_H_
