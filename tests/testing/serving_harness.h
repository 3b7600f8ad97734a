// ServingHarness: a model service around a Scheduler that believes nothing.
//
// It keeps its own books (what each request has fed and produced, and which
// token stands in which slot of the cache) and compares every step with them.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_SERVING_HARNESS_H_
#define VARLANE_TESTS_TESTING_SERVING_HARNESS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "varlane/kv_pool.h"
#include "varlane/scheduler.h"

namespace varlane::testing {

inline constexpr int64_t kTestBlockSize = 16;

class ServingHarness {
 public:
  // A pool of `num_blocks` blocks of 16 tokens and a scheduler on it. Fails
  // the test when they cannot be made.
  ServingHarness(int64_t num_blocks, const SchedulerOptions& options);

  KvPool& pool() { return *pool_; }
  Scheduler& scheduler() { return *scheduler_; }

  // Submits; the EOS is the `eos_after`-th generated token, 0 = none comes.
  Admission Submit(const Request& request, int64_t eos_after = 0);
  void Cancel(RequestId id);

  // One step: Schedule, check everything, Complete, check the pool.
  // False when there was nothing to do.
  bool RunStep();
  // The two halves of RunStep, for what happens between them.
  const Step& Schedule();
  void Complete();
  // Steps until idle; fails the test after `max_steps`. Returns their number.
  int64_t Drain(int64_t max_steps);
  // Every block is back, and nothing is live.
  void ExpectAllGone();

  // What a request did, also after its end.
  struct History {
    Request request;
    int64_t eos_after = 0;
    int64_t generated = 0;
    int64_t next = 0;      // the position it must feed next
    int64_t ever_fed = 0;  // the most positions it ever fed
    int64_t restarts = 0;  // times it fed position 0 again
    bool ended = false;    // by EOS or by count
    bool cancelled = false;
    int64_t first_step = -1;  // step of its first entry
    int64_t last_step = -1;
    std::vector<int64_t> chunks;  // counts of its prefill entries

    bool live() const { return !ended && !cancelled; }
  };
  const History& history(RequestId id) const { return histories_.at(id); }
  const Step& step() const { return step_; }    // the last one scheduled
  int64_t steps() const { return num_steps_; }  // completed

 private:
  void CheckArrays() const;
  void CheckEntry(size_t i);
  void CheckStats() const;

  SchedulerOptions options_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<RequestId, History> histories_;
  // Which token each slot of the cache holds: request and position.
  std::vector<std::pair<RequestId, int64_t>> slots_;
  Step step_;
  int64_t num_steps_ = 0;
  SchedulerStats expected_;  // the token counts only
};

// The entry of `id` in `step`, or null.
const StepEntry* FindEntry(const Step& step, RequestId id);
// The requests of `step`, in its order.
std::vector<RequestId> IdsOf(const Step& step);

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_SERVING_HARNESS_H_
