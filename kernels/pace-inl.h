// How fast a worker asks memory for what it reads.
//
// A core keeps some sixty lines in flight. Zen 5 drops prefetches beyond them;
// what was dropped is missed by arithmetic, which then asks for nothing while
// it waits. Arithmetic on a few rows is several times as fast as memory, so
// unless something slows its prefetches down it spends its time that way. Paced
// a little faster than memory they are all taken, and arrive when needed
// (4 rows from DRAM: 4 to 20% faster).
//
// Memory's pace changes within seconds, by what others do: 39 cycles a step are
// best for a core that gets 22 GB/s and cost one that gets 32 a third, where 24
// are best and 27 cost 4%. So each worker finds its own: tiles take turns with
// a delay that is a little longer. If they take longer by it, the delay is what
// binds, and becomes shorter, by a cycle; if not, memory is.
//
// What comes from a cache, as a prefix that many sequences share may, teaches
// little of memory: tiles much quicker than usual are not judged.
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
  // The cycles of Prefetch::wait during the tile that begins, and what stands
  // for Prefetch::again.
  HWY_INLINE int delay() const {
    return delay_ + (Tries(kLonger) ? Step() : 0);
  }
  HWY_INLINE bool again() const { return again_ != Tries(kOtherwise); }

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

  static constexpr int kLeast = 3;
  static constexpr int kMost = 288;
  // Of what a step takes, cycles beside its delay.
  static constexpr float kRest = 12;
  // One pair may be a matter of other processes; so much evidence is enough, to
  // be had in some ten pairs where the delay is too long and in a hundred or
  // two, milliseconds, where it is too short.
  static constexpr float kMostOfPair = 0.15f;
  static constexpr float kEnough = 1.0f;
  static constexpr float kEnoughAgain = 0.6f;
  static constexpr float kOfCache = 0.85f;
  static constexpr float kOfMemory = 0.95f;
  static constexpr float kMostOfUsual = 1.25f;
  static constexpr float kWeightOfMore = 1.0f / 8;
  static constexpr float kWeightOfLess = 1.0f / 256;

  // Whether what is read comes from a cache, after a pair that took so many
  // ticks a byte. Two in a row say so, one may be chance. A cache shows only as
  // the delay becomes shorter, so what is usual follows far more slowly than it
  // does, and what the delay was is kept. But it follows: what shows may after
  // all be memory that became quicker.
  HWY_INLINE void NotePair(float ticks) {
    if (usual_ == 0) usual_ = ticks;
    const bool quick = ticks < kOfCache * usual_;
    if (ticks >= kOfMemory * usual_) delay_of_memory_ = delay_;
    cached_ = quick && quick_;
    if (cached_) delay_ = delay_of_memory_;
    quick_ = quick;
    const float weight = ticks < usual_ ? kWeightOfLess : kWeightOfMore;
    usual_ += weight * (HWY_MIN(ticks, kMostOfUsual * usual_) - usual_);
  }

  HWY_INLINE bool Tries(Change change) const {
    return changed_ && change_ == change && !cached_;
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
    // Of what it would be if nothing but the delay bound; far less than half,
    // since too short a delay costs little and too long a one all it is, and
    // since what is clipped of noise hides a part of it.
    const float eighth =
        static_cast<float>(Step()) / 8 / (static_cast<float>(delay_) + kRest);
    evidence_ += more - eighth;
    if (evidence_ > kEnough) Move(-1);
    if (evidence_ < -kEnough) Move(1);
  }

  // By less than what is tried: what one cycle costs drowns in noise.
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

  int delay_ = 27;
  int delay_of_memory_ = 27;  // when a pair last took as long as is usual
  bool again_ = true;
  bool quick_ = false;  // the last pair was
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
