// How fast a worker asks memory for what it reads.
//
// A core keeps some sixty lines in flight. Zen 5 drops prefetches beyond them;
// what was dropped is missed by arithmetic, which then asks for nothing while
// it waits. Arithmetic on a few rows is several times as fast as memory, so
// unless something slows its prefetches down it spends its time that way. Paced
// a little faster than memory they are all taken, and arrive when needed
// (4 rows from DRAM: 4 to 20% faster).
//
// Memory's pace changes within seconds, by what others do: 13 multiplications
// are best for a core that gets 22 GB/s and cost one that gets 32 a fifth. So
// each worker finds its own: tiles take turns with a delay that is a little
// longer. If they take longer by it, the delay is what binds, and becomes
// shorter; if not, memory is.
//
// What comes from a cache, as a prefix that many sequences share may, teaches
// nothing of memory: a tile much quicker than usual is asked for as fast as can
// be and not judged.
//
// A prefetch takes 1.3 cycles, needed or not. Asked for again shortly before
// its use, a line that was dropped does not hold arithmetic up: f32 is 2 to 3%
// faster by it, 4 rows of bf16 1% while a core gets 24 GB/s. While it gets 33
// the same is 2 to 4% slower, in f16 7%. So every eighth pair of tiles tries it
// the other way round.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

class Pace {
 public:
  // What stands for Prefetch::delay during the tile that begins, and for
  // Prefetch::again.
  HWY_INLINE int delay() const {
    if (cached_) return kLeast;
    return delay_ + (Tries(kLonger) ? Step() : 0);
  }
  HWY_INLINE bool again() const {
    return !cached_ && again_ != Tries(kOtherwise);
  }

  // A tile begins.
  HWY_INLINE void Begin(uint64_t ticks) { begin_ = ticks; }

  // It ends, having read so many bytes, and the next one begins.
  HWY_INLINE void Next(uint64_t ticks, float bytes) {
    ticks_[changed_ ? 1 : 0] = static_cast<float>(ticks - begin_) / bytes;
    begin_ = ticks;
    ++tiles_;
    if (tiles_ % 2 != 0) {
      changed_ = !changed_;
      return;
    }
    NotePair((ticks_[0] + ticks_[1]) / 2);
    if (!cached_) Judge();
    // Which of a pair comes first follows no period that tiles might share
    // (Thue-Morse).
    const uint32_t pair = tiles_ / 2;
    changed_ = hwy::PopCount(pair) % 2 != 0;
    change_ = pair % 8 == 7 ? kOtherwise : kLonger;
  }

 private:
  // What one tile of a pair does otherwise than the other one.
  enum Change : uint8_t { kLonger, kOtherwise };

  static constexpr int kLeast = 1;
  static constexpr int kMost = 96;
  // A tile's ticks beside its delays, counted in delays.
  static constexpr float kRest = 4;
  // One pair may be a matter of other processes; so much evidence is enough.
  static constexpr float kMostOfPair = 0.15f;
  static constexpr float kEnough = 0.3f;
  static constexpr float kEnoughAgain = 0.6f;
  static constexpr float kOfCache = 0.85f;
  static constexpr float kMostOfUsual = 1.25f;
  static constexpr float kWeight = 1.0f / 8;
  static constexpr float kWeightOfCache = 1.0f / 256;

  // Whether a pair that took so many ticks a byte came from a cache. What does
  // counts little for what is usual: memory that became quicker is noticed in
  // the end, and a disturbance is soon forgotten.
  HWY_INLINE void NotePair(float ticks) {
    cached_ = ticks < kOfCache * usual_;
    if (usual_ == 0) usual_ = ticks;
    const float weight = cached_ ? kWeightOfCache : kWeight;
    usual_ += weight * (HWY_MIN(ticks, kMostOfUsual * usual_) - usual_);
  }

  HWY_INLINE bool Tries(Change change) const {
    return changed_ && change_ == change;
  }
  HWY_INLINE int Step() const { return 1 + delay_ / 16; }

  HWY_INLINE void Judge() {
    const float all = ticks_[0] + ticks_[1];
    const float more = HWY_MIN(
        HWY_MAX(2 * (ticks_[1] - ticks_[0]) / all, -kMostOfPair), kMostOfPair);
    if (change_ == kOtherwise) {
      JudgeAgain(more);
    } else {
      JudgeDelay(more);
    }
  }

  HWY_INLINE void JudgeDelay(float more) {
    // Of what it would be if nothing but the delay bound; less than half, since
    // too short a delay costs little and too long a one all it is.
    const float third =
        static_cast<float>(Step()) / 3 / (static_cast<float>(delay_) + kRest);
    evidence_ += more - third;
    if (evidence_ > kEnough) Move(-Step());
    if (evidence_ < -kEnough) Move(Step());
  }

  HWY_INLINE void Move(int by) {
    delay_ = HWY_MIN(HWY_MAX(delay_ + by, kLeast), kMost);
    evidence_ = 0;
  }

  // Counts what speaks for a change since it last had more against it.
  HWY_INLINE void JudgeAgain(float more) {
    evidence_again_ = HWY_MAX(evidence_again_ - more, 0.0f);
    if (evidence_again_ < kEnoughAgain) return;
    again_ = !again_;
    evidence_again_ = 0;
  }

  int delay_ = 9;
  bool again_ = true;
  bool cached_ = false;
  bool changed_ = false;
  Change change_ = kLonger;
  uint32_t tiles_ = 0;
  float evidence_ = 0;        // that the delay binds; below 0, that memory does
  float evidence_again_ = 0;  // that the other choice is quicker
  float usual_ = 0;           // ticks a byte from memory
  float ticks_[2] = {};       // the same of a pair, the changed tile's second
  uint64_t begin_ = 0;
};

// The calling thread's. It changes when things are asked for, never results.
HWY_INLINE Pace& PaceOfThread() {
  static constinit thread_local Pace pace;
  return pace;
}

}  // namespace VARLANE_NS
}  // namespace varlane
