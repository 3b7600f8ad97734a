// Supervise: work in a child process, so that its being killed or hung is a
// result like any other.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_SUPERVISE_H_
#define VARLANE_TOOLS_SUPERVISE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>

#include "tools/ballast.h"
#include "tools/child_cgroup.h"
#include "varlane/status.h"

namespace varlane::tools {

// Shared between supervisor, worker and ballast.
struct StressShared {
  std::atomic<int64_t> heartbeats{0};  // the worker's: its steps
  BallastState ballast;
  // The worker's last words.
  std::atomic<int> code{0};
  std::array<char, 1024> message{};
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

struct SuperviseOptions {
  double hang_seconds = 120;  // without a heartbeat
  // Where both children run; null = here.
  ChildCgroup* cgroup = nullptr;
  // A ballast in a process of its own.
  bool ballast = false;
  BallastTimes ballast_times;
  uint64_t seed = 1;
};

// Runs `work` in a child process and, beside it, the ballast; both end with us
// at the latest, whatever happens to us. Returns the work's Status.
//
// Errors: those of `work`; kInternal when a child was killed - by the kernel
//         for want of memory, say - or gave no heartbeat for hang_seconds;
//         kCancelled after SIGINT, SIGTERM or SIGHUP. No child is left then.
// Requires: no thread but the caller's.
Status Supervise(const SuperviseOptions& options, StressShared* shared,
                 const std::function<Status()>& work);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_SUPERVISE_H_
