// RequestQueue: every live request, in one order, either waiting or running.
//
// Not thread-safe: the scheduler's lock guards it. Knows no blocks; moving a
// request between the two sides allocates nothing.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SERVING_REQUEST_QUEUE_H_
#define VARLANE_SERVING_REQUEST_QUEUE_H_

#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "varlane/scheduler.h"
#include "varlane/swap.h"

namespace varlane {

inline constexpr SeqId kNoSequence = -1;

// One request and how far it is.
struct TrackedRequest {
  Request request;  // its `prompt` is empty: `tokens` has it
  // The first of its known tokens: all of them, as long as the caller tells;
  // those of the prompt, or none, otherwise. For the prefix cache only.
  std::vector<int32_t> tokens;
  int64_t arrival = 0;           // Submit order
  SeqId sequence = kNoSequence;  // kNoSequence while waiting
  int64_t generated = 0;         // sampled so far; survives a preemption
  int64_t computed = 0;          // positions in the cache, completed steps only
  int64_t committed = 0;         // of these, told to the pool; <= tokens.size()
  int64_t length = 0;            // computed + this step's: the pool's length
  int64_t ever_computed = 0;     // most positions ever computed
  SwapId swap = kNoSwap;         // holds `stored` positions in the swap file
  int64_t stored = 0;
  bool loading = false;    // running, but being read back from there
  bool in_step = false;    // part of the outstanding step
  bool cancelled = false;  // dropped while in the outstanding step
  bool eos = false;        // named in Complete's `finished`

  int64_t known() const { return request.prompt_tokens + generated; }
  int64_t outstanding() const { return known() - computed; }
  bool samples() const { return length == known(); }
  bool knows_all_tokens() const {
    return static_cast<int64_t>(tokens.size()) == known();
  }
};

// Higher priority first, then the one that came first. Both the queue and the
// victim follow it: the next to start is the first waiting, the next to be
// preempted is the last running.
struct Before {
  bool operator()(const TrackedRequest* a, const TrackedRequest* b) const {
    if (a->request.priority != b->request.priority) {
      return a->request.priority > b->request.priority;
    }
    return a->arrival < b->arrival;
  }
};

class RequestQueue {
 public:
  using Ordered = std::set<TrackedRequest*, Before>;

  // Null when there is no such request.
  TrackedRequest* Find(RequestId id);
  // Queues it behind its priority class. Requires: the id is not in use.
  // Throws std::bad_alloc; nothing changes then.
  TrackedRequest* Add(const Request& request);
  // Forgets it, wherever it is; the pointer dies.
  void Erase(TrackedRequest* request);

  // waiting -> running.
  void Start(TrackedRequest* request);
  // running -> waiting. It comes to stand in front of its priority class,
  // because a class starts in arrival order: whoever runs arrived before all
  // of the class that never ran, and the victim is the class's youngest, so
  // those preempted earlier arrived later still.
  void Return(TrackedRequest* request);

  const Ordered& waiting() const { return waiting_; }
  const Ordered& running() const { return running_; }
  TrackedRequest* victim() const { return *running_.rbegin(); }

 private:
  std::unordered_map<RequestId, TrackedRequest> requests_;
  Ordered waiting_;
  Ordered running_;
  int64_t next_arrival_ = 0;
};

}  // namespace varlane

#endif  // VARLANE_SERVING_REQUEST_QUEUE_H_
