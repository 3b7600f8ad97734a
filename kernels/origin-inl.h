// Where short contexts' K/V come from: memory or a cache.
//
// A long context's come from memory. A short one's, read in a single run, may
// still stand in a cache where all layers' fit there, but other work may have
// passed it meanwhile: nothing that a launch is told says so. Read as from
// memory what is in L3 takes 1.2 to 1.4 times as long, and what is in memory
// takes 1.1 to 1.3 times as long read as from L3 (Zen 5, 64 contexts of 128
// tokens in bf16). So each worker tries now and then what it usually does not,
// and what was quicker stays: the more often a trial was in vain, the later the
// next one.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

class Origin {
 public:
  // How the run that begins is to be passed.
  HWY_INLINE bool memory() const { return memory_ != (trial_ != 0); }

  // It has ended, and took so many ticks a byte.
  HWY_INLINE void Note(float ticks) {
    if (trial_ != 0) {
      NoteTrial(ticks);
      return;
    }
    if (usual_ == 0) usual_ = ticks;
    const bool other = ticks > kOther * usual_ || usual_ > kOther * ticks;
    others_ = other ? others_ + 1 : 0;
    sum_ = other ? sum_ + ticks : 0;
    usual_ += kWeight * (HWY_MIN(ticks, kMostOfUsual * usual_) - usual_);
    --left_;
    const bool changed = others_ == kOthers;
    if (changed) usual_ = sum_ / kOthers;
    if (changed || left_ <= 0) BeginTrial();
  }

 private:
  // Runs of a trial, the first two of which find what was asked for in the
  // usual way; and between trials.
  static constexpr int kTrial = 8;
  static constexpr int kUnjudged = 2;
  static constexpr int kLeast = 32;
  static constexpr int kMost = 1024;
  static constexpr float kQuicker = 0.95f;
  static constexpr float kWeight = 1.0f / 16;
  static constexpr float kMostOfUsual = 2;
  // So many in a row that are not as usual are from now on, and a reason to try
  // at once.
  static constexpr float kOther = 1.25f;
  static constexpr int kOthers = 8;

  HWY_INLINE void BeginTrial() {
    trial_ = kTrial;
    others_ = 0;
    sum_ = 0;
  }

  HWY_INLINE void NoteTrial(float ticks) {
    if (trial_ <= kTrial - kUnjudged) {
      sum_ += HWY_MIN(ticks, kMostOfUsual * usual_);
    }
    if (--trial_ != 0) return;
    const float mean = sum_ / (kTrial - kUnjudged);
    if (mean < kQuicker * usual_) {
      memory_ = !memory_;
      usual_ = mean;
      between_ = kLeast;
    } else {
      between_ = HWY_MIN(2 * between_, kMost);
    }
    left_ = between_;
    sum_ = 0;
  }

  bool memory_ = true;
  int left_ = kLeast;     // runs before the next trial
  int between_ = kLeast;  // trials
  int trial_ = 0;         // runs that are left of one
  int others_ = 0;        // runs in a row that were not as usual
  float usual_ = 0;       // ticks a byte
  float sum_ = 0;         // the same of those or of a trial's, their sum
};

// The calling thread's. It changes when things are asked for, never results.
HWY_INLINE Origin& OriginOfThread() {
  static constinit thread_local Origin origin;
  return origin;
}

}  // namespace VARLANE_NS
}  // namespace varlane
