// Where K/V come from that a cache may hold: from there, or from memory.
//
// Where all layers' K/V fit the last-level caches, what one step read may still
// stand there at the next one, or other work may have driven it out: nothing
// that a launch is told says so. Passed as from memory, what is in L3 takes 1.2
// to 1.5 times as long; passed as from a cache, what is in memory 1.1 to 1.3
// times (Zen 5, one register group of each KV head). So each worker tries now
// and then what it usually does not do, and what was quicker stays: the more
// often in a row that was in vain, the later it tries again.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

class Origin {
 public:
  // How the partition that begins is to be passed.
  HWY_INLINE bool memory() const {
    return memory_ != (stage_ == Stage::kOtherwise);
  }

  // It has ended, and took so many ticks a byte.
  HWY_INLINE void Note(float ticks) {
    if (stage_ == Stage::kUsual) {
      NoteUsual(ticks);
    } else if (NoteStep(ticks)) {
      EndStep(sum_ / (kSteps - kUnjudged));
    }
  }

 private:
  // A trial: some partitions the other way, then as many as usual, whose first
  // ones find what was asked for before.
  enum class Stage : uint8_t { kUsual, kOtherwise, kAfter };

  static constexpr int kSteps = 8;
  static constexpr int kUnjudged = 2;
  static constexpr int kLeast = 32;  // partitions between trials
  static constexpr int kMost = 1024;
  static constexpr float kQuicker = 0.95f;
  static constexpr float kWeight = 1.0f / 8;
  // So many in a row that are not as they were at the last trial are a reason
  // for the next one; fewer may be what other work drove out of a cache.
  static constexpr float kUnlike = 1.5f;
  static constexpr int kMostUnlike = 64;

  HWY_INLINE void NoteUsual(float ticks) {
    if (recent_ == 0) recent_ = judged_ = ticks;
    recent_ += kWeight * (ticks - recent_);
    const bool unlike = ticks > kUnlike * judged_ || judged_ > kUnlike * ticks;
    unlike_ = unlike ? unlike_ + 1 : 0;
    --left_;
    if (left_ <= 0 || unlike_ == kMostUnlike) BeginStep(Stage::kOtherwise);
  }

  HWY_INLINE void BeginStep(Stage stage) {
    stage_ = stage;
    left_ = kSteps;
    unlike_ = 0;
    sum_ = 0;
  }

  // Whether that was the last one of a step.
  HWY_INLINE bool NoteStep(float ticks) {
    if (left_ <= kSteps - kUnjudged) sum_ += ticks;
    return --left_ == 0;
  }

  HWY_INLINE void EndStep(float mean) {
    if (stage_ == Stage::kOtherwise) {
      otherwise_ = mean;
      BeginStep(Stage::kAfter);
      return;
    }
    // Before and after it, since either may be a time of something else.
    judged_ = HWY_MIN(recent_, mean);
    recent_ = mean;
    between_ = HWY_MIN(2 * between_, kMost);
    if (otherwise_ < kQuicker * judged_) {
      memory_ = !memory_;
      recent_ = judged_ = otherwise_;
      between_ = kLeast;
    }
    BeginStep(Stage::kUsual);
    left_ = between_;
  }

  bool memory_ = true;
  Stage stage_ = Stage::kUsual;
  int left_ = kLeast;     // partitions of the stage
  int between_ = kLeast;  // trials
  int unlike_ = 0;        // partitions in a row
  float recent_ = 0;      // ticks a byte as usual,
  float judged_ = 0;      // the same at the last trial,
  float otherwise_ = 0;   // and of the other way
  float sum_ = 0;         // of a step
};

// The calling thread's. It changes when things are asked for, never results.
HWY_INLINE Origin& OriginOfThread() {
  static constinit thread_local Origin origin;
  return origin;
}

}  // namespace VARLANE_NS
}  // namespace varlane
