// PressureController: a pure state machine; time and target are arguments.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <limits>

#include "varlane/pressure.h"

namespace varlane {
namespace {

constexpr std::array<const char*, 4> kLevelNames = {"none", "low", "medium",
                                                    "critical"};
constexpr std::array<const char*, 6> kRungNames = {
    "normal",  "stop growing", "drop cached prefixes",
    "compact", "preempt",      "refuse new work"};

// The longest pause between two tries to regrow, in calm_ns.
constexpr int64_t kMostCalms = 32;

// How far a level may climb.
PressureRung TopOf(PressureLevel level) {
  switch (level) {
    case PressureLevel::kNone:
      return PressureRung::kNormal;
    case PressureLevel::kLow:
      return PressureRung::kStopGrowing;
    case PressureLevel::kMedium:
      return PressureRung::kCompact;
    case PressureLevel::kCritical:
      break;
  }
  return PressureRung::kRefuse;
}

PressureRung Step(PressureRung rung, int by) {
  return static_cast<PressureRung>(static_cast<int>(rung) + by);
}

}  // namespace

const char* PressureLevelName(PressureLevel level) {
  const auto index = static_cast<size_t>(level);
  return index < kLevelNames.size() ? kLevelNames[index] : "unknown";
}

const char* PressureRungName(PressureRung rung) {
  const auto index = static_cast<size_t>(rung);
  return index < kRungNames.size() ? kRungNames[index] : "unknown";
}

PressureController::PressureController(const PressureControllerOptions& options,
                                       PressureTarget* target)
    : options_(options), target_(target), regain_wait_ns_(options.calm_ns) {}

bool PressureController::Update(const PressureSample& sample, int64_t now_ns) {
  // A measurement that failed says nothing: stay, and look again.
  if (!sample.measured.ok() && sample.level == PressureLevel::kNone) {
    next_update_ns_ = now_ns + options_.climb_ns;
    return false;
  }
  stats_.level = sample.level;
  if (sample.notices != notices_) {
    notices_ = sample.notices;
    owed_bytes_ = sample.wanted_bytes;
  }
  if (sample.level == PressureLevel::kNone ||
      stats_.rung > TopOf(sample.level)) {
    return Descend(sample, now_ns);
  }
  regain_wait_ns_ = options_.calm_ns;
  return Climb(sample, now_ns);
}

// Carries a rung out; returns the bytes given back.
int64_t PressureController::Act(PressureRung rung, int64_t bytes) {
  int64_t released = 0;
  switch (rung) {
    case PressureRung::kNormal:
      break;
    case PressureRung::kStopGrowing:
      target_->SetGrowth(false);
      break;
    case PressureRung::kDropCached:
      released = target_->DropCached(bytes);
      break;
    case PressureRung::kCompact:
      released = target_->Compact(bytes);
      break;
    case PressureRung::kPreempt:
      released = target_->Preempt(bytes);
      break;
    case PressureRung::kRefuse:
      target_->SetAdmission(false);
      break;
  }
  stats_.released_bytes += released;
  to_regain_bytes_ += released;
  return released;
}

bool PressureController::Climb(const PressureSample& sample, int64_t now_ns) {
  const PressureRung top = TopOf(sample.level);
  const bool critical = sample.level == PressureLevel::kCritical;
  const bool due = critical || stats_.rung == PressureRung::kNormal ||
                   now_ns - changed_ns_ >= options_.climb_ns;
  next_update_ns_ = now_ns + options_.climb_ns;
  if (!due) return false;
  const int64_t least = options_.min_release_bytes > 0
                            ? options_.min_release_bytes
                            : sample.reserve_bytes / 8;
  const bool knows_how_much =
      sample.wanted_bytes > 0 || sample.level < PressureLevel::kMedium;
  const int64_t wanted_before = std::max(
      {sample.deficit_bytes(), owed_bytes_, knows_how_much ? 0 : least});
  int64_t wanted = wanted_before;
  bool changed = false;
  // What the rungs climbed already can give comes first: caches may have filled
  // and slabs emptied since.
  const PressureRung held = std::min(stats_.rung, top);
  for (PressureRung rung = PressureRung::kDropCached;
       rung <= held && wanted > 0; rung = Step(rung, 1)) {
    const int64_t released = Act(rung, wanted);
    wanted -= released;
    changed |= released > 0;
  }
  while (stats_.rung < top &&
         (wanted > 0 || stats_.rung == PressureRung::kNormal)) {
    stats_.rung = Step(stats_.rung, 1);
    ++stats_.climbs;
    stats_.cause = sample.cause;
    changed = true;
    wanted -= Act(stats_.rung, wanted);
    // kMedium waits for the effect to show, but growth is stopped at no cost.
    if (!critical && stats_.rung > PressureRung::kStopGrowing) break;
  }
  owed_bytes_ = std::max<int64_t>(0, owed_bytes_ - (wanted_before - wanted));
  changed_ns_ = now_ns;
  return changed;
}

bool PressureController::Descend(const PressureSample& sample, int64_t now_ns) {
  next_update_ns_ = std::numeric_limits<int64_t>::max();
  const bool rested = stats_.rung == PressureRung::kNormal;
  if (rested && to_regain_bytes_ == 0) return false;
  const int64_t wait =
      changed_ns_ + (rested ? regain_wait_ns_ : options_.calm_ns) - now_ns;
  if (wait > 0) {
    next_update_ns_ = now_ns + wait;
    return false;
  }
  changed_ns_ = now_ns;
  next_update_ns_ = now_ns + options_.calm_ns;
  if (!rested) {
    if (stats_.rung == PressureRung::kRefuse) target_->SetAdmission(true);
    if (stats_.rung == PressureRung::kStopGrowing) target_->SetGrowth(true);
    stats_.rung = Step(stats_.rung, -1);
    ++stats_.descents;
    return true;
  }
  // Half of what stands clear of the reserve at a time: what others take
  // meanwhile shows before the rest is gone.
  const int64_t clear = sample.available_bytes - sample.reserve_bytes;
  const int64_t regained =
      clear > 0 ? target_->Regrow(std::min(to_regain_bytes_, clear / 2)) : 0;
  stats_.regained_bytes += regained;
  to_regain_bytes_ = std::max<int64_t>(0, to_regain_bytes_ - regained);
  // Ever more rarely while there is nothing to be had: idle costs nothing.
  regain_wait_ns_ = regained > 0 ? options_.calm_ns
                                 : std::min(2 * regain_wait_ns_,
                                            kMostCalms * options_.calm_ns);
  next_update_ns_ = to_regain_bytes_ > 0 ? now_ns + regain_wait_ns_
                                         : std::numeric_limits<int64_t>::max();
  return regained > 0;
}

}  // namespace varlane
