// Memory pressure: who tells of it, how much there is, and what to do about it.
//
// A PressureMonitor listens to the kernel (cgroup events, PSI), to systemd and
// to the embedder, and measures; where there are events it sleeps until one. A
// PressureController is a state machine that turns its answers into a ladder of
// steps, up and down with hysteresis, over any PressureTarget. For a KvPool and
// a Scheduler see serving_pressure.h. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_PRESSURE_H_
#define VARLANE_PRESSURE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "varlane/export.h"
#include "varlane/status.h"

namespace varlane {

enum class PressureLevel : uint8_t {
  kNone,
  kLow,       // the kernel reclaims, or a reserve is touched: do not grow
  kMedium,    // somebody stalls for memory, or half of a reserve is gone
  kCritical,  // the limit is near: the next touch may be the last
};
VARLANE_EXPORT const char* PressureLevelName(PressureLevel level);

// One thing that is, or could not be, listened to.
struct PressureSource {
  std::string name;  // "PSI /proc/pressure/memory", "cgroup v1 ..."
  bool active = false;
  std::string problem;  // why it is not
  int64_t events = 0;   // so far
};

// The state of things at one moment.
struct PressureSample {
  PressureLevel level = PressureLevel::kNone;
  // The limit with the least room: what it has available, and what of this is
  // its reserve (LimitReserveBytes).
  std::string limit;
  int64_t available_bytes = 0;
  int64_t reserve_bytes = 0;
  std::string cause;         // what the level comes from; empty for kNone
  int64_t wanted_bytes = 0;  // that the embedder asked back; 0 = did not say
  int64_t notices = 0;       // how often it has spoken: each wish counts once
  Status measured;           // not ok: limits could not be read this time

  // What is missing of the reserve.
  int64_t deficit_bytes() const {
    return available_bytes < reserve_bytes ? reserve_bytes - available_bytes
                                           : 0;
  }
};

struct VARLANE_EXPORT PressureOptions {
  std::string root = {};  // where /proc and /sys are; "" = this machine's
  bool cgroups = true;    // v2 memory.events and memory.pressure; v1 eventfds
  bool psi = true;        // /proc/pressure/memory
  // systemd's protocol (MEMORY_PRESSURE_WATCH, MEMORY_PRESSURE_WRITE): what to
  // watch, and what to write into it first, in base64. "" = do not;
  // "/dev/null" = the service manager wants no watching at all, by anything.
  std::string systemd_watch = {};
  std::string systemd_write = {};
  // An event's level lasts this long unless another one comes.
  int64_t hold_ns = 2'000'000'000;
  // How often to measure while there is pressure, and at all times where no
  // source has events.
  int64_t poll_ns = 500'000'000;

  // With systemd's two variables. Errors: none so far.
  static Result<PressureOptions> FromEnvironment();
};

// Threads: Wait from one thread at a time; all else from any.
class VARLANE_EXPORT PressureMonitor {
 public:
  // Opens what can be opened; sources() says what could not.
  //
  // Errors: kResourceExhausted when not even an eventfd can be had.
  static Result<std::unique_ptr<PressureMonitor>> Create(
      const PressureOptions& options);
  ~PressureMonitor();
  PressureMonitor(const PressureMonitor&) = delete;
  PressureMonitor& operator=(const PressureMonitor&) = delete;

  // Sleeps until something may have changed, at most `timeout_ms` (-1 = for
  // ever), then measures. With nothing to tell it does not wake where events
  // exist; while there is pressure it measures every poll_ns until it is over.
  // Errors: kResourceExhausted, kInternal (poll).
  Result<PressureSample> Wait(int timeout_ms);
  // Measures now: takes what events there are, without sleeping.
  Result<PressureSample> Poll() { return Wait(0); }

  // The embedder's own word: `level` holds until the next call, and
  // `wanted_bytes` should be given back, once, if possible. Wakes Wait.
  // Async-signal safe.
  void Notify(PressureLevel level, int64_t wanted_bytes = 0) noexcept;
  // Makes a Wait that sleeps, or the next one, return. Async-signal safe.
  void Wake() noexcept;

  std::vector<PressureSource> sources() const;
  bool has_events() const noexcept;  // else MemAvailable is polled
  int64_t wakeups() const noexcept;  // of Wait, timeouts included

 private:
  class Impl;
  explicit PressureMonitor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The steps of the ladder, each including those before it.
enum class PressureRung : uint8_t {
  kNormal,
  kStopGrowing,
  kDropCached,
  kCompact,
  kPreempt,
  kRefuse,
};
VARLANE_EXPORT const char* PressureRungName(PressureRung rung);

// What gives memory back. Every `bytes` is a wish; the answer is what was given
// back to the system. Nothing takes what running sequences need.
class PressureTarget {
 public:
  virtual ~PressureTarget() = default;
  virtual void SetGrowth(bool allowed) = 0;
  virtual int64_t DropCached(int64_t bytes) = 0;
  virtual int64_t Compact(int64_t bytes) = 0;
  virtual int64_t Preempt(int64_t bytes) = 0;
  virtual void SetAdmission(bool allowed) = 0;
  // Takes back up to `bytes` of what was given; returns how many.
  virtual int64_t Regrow(int64_t bytes) = 0;
};

struct PressureControllerOptions {
  // Between two climbs under kMedium, for a step's effect to show. kCritical
  // does not wait.
  int64_t climb_ns = 500'000'000;
  // Of calm before each step down: the hysteresis.
  int64_t calm_ns = 2'000'000'000;
  // The least that is asked for where events tell of pressure but no reserve is
  // short: an eighth of the reserve if 0.
  int64_t min_release_bytes = 0;
};

struct PressureStats {
  PressureLevel level = PressureLevel::kNone;
  PressureRung rung = PressureRung::kNormal;
  int64_t climbs = 0;    // steps up
  int64_t descents = 0;  // steps down
  int64_t released_bytes = 0;
  int64_t regained_bytes = 0;
  std::string cause;  // of the last climb
};

// The ladder. kLow climbs to kStopGrowing, kMedium a rung each climb_ns up to
// kCompact, kCritical at once as far as it takes. A rung that gives back
// what is wanted ends the climb: what is missing of a reserve, or the embedder
// still has to get; where neither is known, min_release_bytes each climb_ns.
// Calm descends a rung each calm_ns and, at the bottom, regrows what stays
// clear of the reserve.
//
// Threads: none of its own; call it from one, between steps.
class VARLANE_EXPORT PressureController {
 public:
  // Lifetime: `target` must outlive it.
  PressureController(const PressureControllerOptions& options,
                     PressureTarget* target);

  // `now_ns` of any clock that does not go back. Returns whether the rung
  // changed or bytes moved.
  bool Update(const PressureSample& sample, int64_t now_ns);

  // When Update should be called next though nothing was heard; INT64_MAX: at
  // the next event.
  int64_t next_update_ns() const noexcept { return next_update_ns_; }
  PressureRung rung() const noexcept { return stats_.rung; }
  const PressureStats& stats() const noexcept { return stats_; }

 private:
  bool Climb(const PressureSample& sample, int64_t now_ns);
  bool Descend(const PressureSample& sample, int64_t now_ns);
  int64_t Act(PressureRung rung, int64_t bytes);

  const PressureControllerOptions options_;
  PressureTarget* const target_;
  PressureStats stats_;
  int64_t changed_ns_ = 0;  // of the last climb, descent or pressure
  int64_t next_update_ns_ = INT64_MAX;
  int64_t to_regain_bytes_ = 0;  // given back and not taken again
  int64_t notices_ = -1;         // of the last sample
  int64_t owed_bytes_ = 0;       // of the embedder's last wish
  int64_t regain_wait_ns_;       // doubles while there is nothing to regain
};

}  // namespace varlane

#endif  // VARLANE_PRESSURE_H_
