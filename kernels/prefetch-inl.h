// What a micro-kernel fetches ahead, a few lines every step.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// How a micro-kernel fetches ahead while it computes.
//
//   kNoFetch    what it reads is in L2 already
//   kFetchNear  as many lines a step as it reads: few rows, whose next keys or
//               values are needed soon
//   kFetchPaced the same from memory, as a Pace says (Zen 5)
//   kFetchFar   a line or two a step: more rows share a run, over some of which
//               the next one is spread
enum FetchMode : int { kNoFetch, kFetchNear, kFetchPaced, kFetchFar };

constexpr bool IsNear(FetchMode mode) {
  return mode == kFetchNear || mode == kFetchPaced;
}

// Whether what is read a few steps later is asked for once more. What comes
// from a cache Zen 5 does not drop (contexts of 96 and 128 in L3, in turns:
// without 4 to 6% faster).
constexpr bool AsksSoon(FetchMode mode) {
  return kZen5 ? mode == kFetchPaced : IsNear(mode);
}

// Pieces of memory side by side: one, two, or kTogether or as many as a tile
// has of which a step takes some in turn; far, one of them or two.
enum class Pieces : uint8_t {
  kAlone,
  kPaired,
  kTogether,
  kTogetherByTwo,
  kTile
};

// Whether what is fetched ahead is asked for once, a line or two a step of many
// pieces in turn: those that drop no prefetch or, as Zen 3, few (AVX2 there, in
// turns, decode of 4 rows from DRAM: 15% faster in bf16, 20% in f32 and 30% in
// f16; every other line only, 33% slower).
constexpr bool kAsksOnce = kIntelAvx512 || kAvx2;

// How many go together. Each begins a page of 4 KiB or is one. While the TLB
// asks for pages Intel's CPUs wait with all else, but for four at a time, and
// several give their own prefetchers more to do (blocks of 16 tokens, from
// DRAM, 8 pieces instead of 2: decode 14% faster in bf16, 10% in f32 and f16;
// 2 or 5 tokens, 12% in bf16, 14 to 21% in f32).
constexpr int kTogether = kZen5 ? kGroups : kAsksOnce ? 2 * kGroups : 2;

// How many of them a loop takes: on Zen 3 a tile's, but two tiles' of f32 where
// it is a single group's.
template <class Ops, FetchMode kMode>
constexpr int kLoopTogether =
    !kAvx2 || (IsNear(kMode) && sizeof(typename Ops::Cache) == sizeof(float))
        ? kTogether
        : kGroups;
template <class Ops, FetchMode kMode>
constexpr Pieces kPiecesInTurn =
    kLoopTogether<Ops, kMode> == kGroups ? Pieces::kTile : Pieces::kTogether;

// Into L2, which takes more misses at a time than L1 does (Zen 4: 27 against 16
// GB/s a core over random 4 KiB pieces); on Zen 5 it takes fewer (11 to 17
// against 23 GB/s).
HWY_INLINE void FetchLine(const std::byte* line) {
  __builtin_prefetch(line, 0, kZen5 ? 3 : 2);
}

HWY_INLINE void FetchLines(const void* from, size_t bytes) {
  const auto* line = static_cast<const std::byte*>(from);
  for (size_t at = 0; at < bytes; at += 64) FetchLine(line + at);
}

// What is in L2 and read soon. Intel's CPUs take it into L1: while prefetches
// wait for room, so does all that misses L1 (Emerald Rapids, 4 rows of f32 in a
// loop: with both 0.97 of the pace of plain reads, with either alone 0.90).
HWY_INLINE void FetchSoon(const std::byte* line) {
  __builtin_prefetch(line, 0, kIntelAvx512 || kZen5 ? 3 : 2);
}

// Whether the loop over values asks for the next group's while it reads one's.
// They are in L2, but a pass reads half of each row, on pages in any order, of
// which Zen 5's own prefetchers lose track in 16-bit caches (the loop alone: 5
// to 7% slower than over pages in order, with this even; in turns, prefill in
// bf16 0.5 to 1.5% faster, in f16 0 to 1%). In f32 they do not (1% slower).
template <class Ops>
constexpr bool FetchesValuesSoon(FetchMode mode) {
  return kZen5 && !IsNear(mode) && sizeof(typename Ops::Cache) == 2;
}

// The first lines of what a micro-kernel reads: line[i] + step * stride.
constexpr int kHeadLines = kZen5 ? 2 * kMaxVecs : kMaxVecs;
struct StreamHead {
  HWY_INLINE StreamHead() = default;  // see passes-inl.h

  const std::byte* line[kHeadLines] = {};
  size_t stride = 0;
};

// The keys of a tile, or of a part of it, whose groups stand at `groups`.
template <int kCount = kGroups>
HWY_INLINE StreamHead KeyHead(const std::byte* const* groups, size_t stride) {
  StreamHead head;
  for (int i = 0; i < kHeadLines; ++i) head.line[i] = groups[i % kCount];
  head.stride = stride;
  return head;
}

// Pieces of memory to fetch, each `lines` lines `stride` bytes apart. Past the
// end the last lines are asked for again, which costs less than a branch around
// it; so every stream stands at some line that is mapped.
struct Prefetch {
  HWY_INLINE Prefetch() = default;  // see passes-inl.h

  const std::byte* stream[kTogether] = {};
  const std::byte* before[2] = {};  // stream[0] and [1] of the pieces before
  const std::byte* const* next = nullptr;  // the pieces after those
  const std::byte* const* end = nullptr;
  size_t at = 0;  // bytes into `stream`
  size_t stride = 0;
  size_t back = 0;  // two lines
  size_t left = 0;  // lines of `stream`; 0 = nothing to fetch
  size_t lines = 0;
  size_t turn = 0;  // of pieces that go together, the first of the next step
  Pieces pieces = Pieces::kAlone;
  // Whether to ask once more, near for what the micro-kernel is about to read,
  // far for the pieces before; and what is read after its own part.
  bool again = false;
  StreamHead onward;
  int wait = 0;  // between steps: WaitOf a Pace's delay

  // Fetches nothing, standing at `line`.
  HWY_INLINE void Idle(const std::byte* line) {
    for (const std::byte*& piece : stream) piece = line;
    before[0] = before[1] = line;
    next = end = nullptr;
    at = stride = back = left = turn = 0;
    again = false;
  }

  // Fetches pieces [from, to); an even number of them where they are paired.
  HWY_INLINE void Start(const std::byte* const* from,
                        const std::byte* const* to, Pieces side_by_side,
                        size_t line_stride, size_t num_lines) {
    if (from == to) return;
    next = from;
    end = to;
    pieces = side_by_side;
    stride = line_stride;
    back = 2 * line_stride;
    lines = num_lines;
    NextPieces();
  }

  HWY_INLINE void NextPieces() {
    at = 0;
    left = lines;
    if ((kAsksOnce || kZen5) && pieces >= Pieces::kTogether) {
      // Of too few, some are asked for twice.
      const int most = kAvx2 && pieces == Pieces::kTile ? kGroups : kTogether;
      const auto count = HWY_MIN(static_cast<int>(end - next), most);
      for (int i = 0; i < most; ++i) stream[i] = next[i % count];
      next += count;
      return;
    }
    if (again) {
      before[0] = stream[0];
      before[1] = stream[1];
    }
    stream[0] = *next++;
    stream[1] = pieces == Pieces::kPaired ? *next++ : stream[0];
  }
};

// Steps through a Prefetch with its state in few registers, beside a register
// tile of kVecs vectors. Every line is asked for twice, two lines apart: the
// CPU drops what it has no room for (Zen 4, from DRAM: 10% more). One that
// drops nothing is asked once. Zen 5 still has no room two lines later, but a
// piece later (verify of 5 tokens of a group of 4, bf16, in turns: 2 to 5%
// faster); where many groups share a run once is enough.
template <class Ops, FetchMode kMode, int kVecs>
class Fetcher {
 public:
  static constexpr bool kOn = kMode != kNoFetch;

 private:
  // Not f32 for one piece at a time, which leaves memory the time that it needs
  // (verify 2% slower).
  static constexpr bool kAsksAgain = Ops::kPack == 2;
  // Lines that a step reads.
  static constexpr size_t kReads =
      HWY_MAX(kVecs * kVecBytes<Ops> / 64, size_t{1});
  // Lines a step of each piece. Near: half of what a register tile reads.
  static constexpr size_t kLines =
      IsNear(kMode) ? HWY_MAX(kReads / 2, size_t{1}) : 1;
  // Near, on Zen 5 four lines at a time (f16: 1% faster than two), once as many
  // have been read: faster, the CPU would have no room for what is asked for
  // and drop it, and then be asked for nothing (f16 at twice the pace, 8 rows
  // from DRAM, in turns: 16 to 20% slower). A line every other step that reads
  // half of one.
  static constexpr size_t kStepsOfFetch =
      !IsNear(kMode)                                 ? 1
      : kZen5                                        ? 4 / kReads
      : kAvx2 && kVecs * kVecBytes<Ops> < size_t{64} ? 2
                                                     : 1;
  // Lines that go together at a time, near: as many as a register tile reads.
  static constexpr size_t kSome = !IsNear(kMode) ? 1
                                  : kAvx2        ? kReads
                                  : kZen5        ? kStepsOfFetch * kReads
                                                 : 2 * kLines;

 public:
  // Steps of a round, which AVX2's loops take at a time, each of them with a
  // piece of its own, so that none has to look for it: Zen 3 takes 6
  // instructions a cycle, presumably half of them while the core's other thread
  // runs, and a step with 4 rows of f16, 4 cycles of multiply-adds, has 17 of
  // them instead of 28 (in turns, 4 rows from DRAM: f32 6 to 17% faster, f16 3
  // to 12%, bf16 0 to 5%, but two rows of f32 3% slower; verify of 5 tokens
  // 10%, bf16 even; prefill, most of which fetches nothing, 2 steps at a time,
  // f32 9 to 15%, f16 3 to 7%). Two steps of pairs would spill beside 6 rows.
  static constexpr size_t kRound =
      !kAvx2 ? 1
      : kOn  ? kLoopTogether<Ops, kMode> * kStepsOfFetch / kSome
             : 2 / Ops::kPack;

  explicit HWY_INLINE Fetcher(Prefetch& fetch)
      : fetch_(fetch),
        one_(fetch.stream[0]),
        two_(fetch.stream[1]),
        at_(fetch.at),
        left_(fetch.left),
        turn_(fetch.turn),
        pieces_(fetch.pieces),
        again_(fetch.again) {}
  HWY_INLINE ~Fetcher() {
    if constexpr (kOn) {
      fetch_.stream[0] = one_;
      fetch_.stream[1] = two_;
      fetch_.at = at_;
      fetch_.left = left_;
      fetch_.turn = turn_;
    }
  }
  Fetcher(const Fetcher&) = delete;
  Fetcher& operator=(const Fetcher&) = delete;

  // `read` is one of the lines that the step reads.
  HWY_INLINE void Step(const std::byte* read) {
    if constexpr (kAvx2) return;  // by rounds
    if constexpr (kStepsOfFetch > 1) {
      step_ = (step_ + 1) % kStepsOfFetch;
      if (step_ != 0) return;
    }
    if constexpr (kMode == kFetchPaced) {
      StepPaced();
    } else if constexpr (kZen5 && kMode == kFetchNear) {
      StepNear(read);
    } else if constexpr (kAsksOnce && kOn) {
      StepTogether();
      if constexpr (kIntelAvx512 && !IsNear(kMode)) {
        if (pieces_ == Pieces::kTogetherByTwo) StepTogether();
      }
    } else if constexpr (kOn) {
      HWY_UNROLL(2) for (size_t i = 0; i < kLines; ++i) {
        const bool two = kMode == kFetchNear || pieces_ == Pieces::kPaired;
        FetchLine(one_ + at_);
        if (two) FetchLine(two_ + at_);
        if constexpr (!kZen5) {
          FetchLine(one_ + (at_ - fetch_.back));
          if (two) FetchLine(two_ + (at_ - fetch_.back));
        } else if (again_) {
          if (kAsksAgain || two) FetchLine(fetch_.before[0] + at_);
          if (two) FetchLine(fetch_.before[1] + at_);
        }
        at_ += fetch_.stride;
      }
      left_ -= kLines;  // of none it wraps
      if (HWY_UNLIKELY(left_ == 0)) EndPieces();
    }
  }

  // Before step `kStep` of a round, and after the last one.
  template <size_t kStep>
  HWY_INLINE void BeginStep() {
    if constexpr (kOn && kStep % kStepsOfFetch == 0) {
      constexpr size_t kFirst = kStep / kStepsOfFetch * kSome;
      HWY_UNROLL(4) for (size_t i = 0; i < kSome; ++i) {
        FetchLine(fetch_.stream[kFirst + i] + at_);
      }
    }
  }
  HWY_INLINE void EndRound() {
    if constexpr (kOn) {
      at_ += fetch_.stride;
      if (HWY_UNLIKELY(--left_ == 0)) EndPieces();  // of none it wraps
    }
  }

 private:
  // At the pace of memory. What is asked for in a burst, at the pace of
  // arithmetic, Zen 5 drops, then waits for what it dropped, and asks for
  // nothing meanwhile. So a step's fetch waits a while after the last one: each
  // step's delay begins where the last one ended.
  HWY_INLINE void StepPaced() {
    zero_ = ZeroLater(zero_, fetch_.wait);
    StepTogether(zero_);
  }

  // From a cache: some lines of one piece, which has a multiple of them; four
  // pieces in turn take as many pointers, for which there are no registers. But
  // of what nearly fills the L3 a part comes from memory: four pieces in turn,
  // once one of the step's lines is there (contexts of 128 that fill 0.8 to 1.0
  // of the L3, in turns: 4 to 11% faster; a half of it: 6 to 11% slower).
  HWY_INLINE void StepNear(const std::byte* read) {
    if (HWY_UNLIKELY(pieces_ != Pieces::kAlone)) {
      StepTogether(ZeroOnceRead(read));
      return;
    }
    HWY_UNROLL(4) for (size_t i = 0; i < kSome; ++i) {
      FetchLine(one_ + at_);
      at_ += fetch_.stride;
    }
    left_ -= kSome;  // of none it wraps
    if (HWY_UNLIKELY(left_ == 0)) EndPieces();
  }

  // Some lines, of the pieces whose turn it is.
  HWY_INLINE void StepTogether(size_t zero = 0) {
    HWY_UNROLL(4) for (size_t i = 0; i < kSome; ++i) {
      FetchLine(fetch_.stream[turn_ + i] + at_ + zero);
    }
    turn_ = (turn_ + kSome) % kTogether;
    if (turn_ != 0) return;
    at_ += fetch_.stride;
    if (HWY_UNLIKELY(--left_ == 0)) EndPieces();  // of none it wraps
  }

  HWY_INLINE void EndPieces() {
    if (fetch_.next == fetch_.end) {
      at_ = fetch_.stride = fetch_.back = 0;
      fetch_.wait = 0;  // what is left of the loop asks for nothing
      return;
    }
    fetch_.NextPieces();
    one_ = fetch_.stream[0];
    two_ = fetch_.stream[1];
    at_ = 0;
    left_ = fetch_.left;
  }

  Prefetch& fetch_;
  const std::byte* one_;
  const std::byte* two_;
  size_t at_;
  size_t left_;
  size_t turn_;
  Pieces pieces_;
  bool again_;
  size_t step_ = 0;  // of those that share a fetch
  size_t zero_ = 0;
};

// Asks for what a micro-kernel reads kAheadBytes later. Most of that was asked
// for long before; what the CPU dropped then, its queues being full while
// compute outran memory, it takes now. Queues that never run empty are what
// gives a core its bandwidth (Zen 4, 4 rows from DRAM: 15% more). In L1 there
// is room for less, and 16-bit caches take longer over it (Emerald Rapids: 4 to
// 5% more than with twice as much; f32 2% more than with half).
template <class Ops>
constexpr size_t kAheadBytes = kIntelAvx512 ? 1024 * sizeof(typename Ops::Cache)
                               : kZen5      ? 8 * kMaxVecs* kVecBytes<Ops>
                                            : 4096;

// kLines lines a step, or two of four in turn where a vector is half a line:
// then two steps or two vectors share one. Nothing where the keys of a tile
// take several register tiles: those run behind each other over the same lines.
template <FetchMode kMode, int kLines, bool kHalves>
class Ahead {
 public:
  static constexpr bool kOn = AsksSoon(kMode) && kTileVecs == kMaxVecs;

  explicit HWY_INLINE Ahead(const Prefetch& fetch) : fetch_(fetch) {}

  // From now on line[i] + step * stride, from `step` on. `line` outlives this.
  HWY_INLINE void Follow(const std::byte* const* line, size_t stride,
                         size_t step) {
    if (!kOn || !fetch_.again) return;
    line_ = line;
    stride_ = stride;
    at_ = step * stride;
  }
  HWY_INLINE void Follow(const StreamHead& head, size_t step) {
    Follow(head.line, head.stride, step);
  }
  // The same of neighbouring lines.
  HWY_INLINE void FollowRow(const std::byte* row, size_t stride, size_t step) {
    if constexpr (kOn) {
      for (int i = 0; i < kLines; ++i) row_[i] = row + i * 64;
      Follow(row_, stride, step);
    }
  }

  HWY_INLINE void Step() {
    if constexpr (kOn) {
      if (line_ == nullptr) return;
      if constexpr (kHalves) {
        static_assert(kLines == 4);
        const std::byte* const* line = line_ + at_ / 32 % 2;
        FetchSoon(line[0] + at_);
        FetchSoon(line[2] + at_);
      } else {
        HWY_UNROLL(8) for (int i = 0; i < kLines; ++i) {
          FetchSoon(line_[i] + at_);
        }
      }
      at_ += stride_;
    }
  }

 private:
  const Prefetch& fetch_;
  const std::byte* const* line_ = nullptr;  // null = nothing to ask for
  const std::byte* row_[kLines];
  size_t stride_ = 0;
  size_t at_ = 0;
};

// Rows of q and out to bring into L2, some at every key tile: all of them at
// once would wait for each other, and all else for them. At most kMost rows.
template <int kMost>
class RowFetches {
 public:
  HWY_INLINE RowFetches() = default;  // see passes-inl.h

  HWY_INLINE void Add(const void* row, size_t bytes) {
    rows_[left_] = static_cast<const std::byte*>(row);
    bytes_[left_] = bytes;
    ++left_;
  }
  // Spreads them over so many tiles.
  HWY_INLINE void Spread(int tiles) { each_ = (left_ + tiles - 1) / tiles; }
  HWY_INLINE void Step() {
    for (int i = 0; i < each_ && left_ > 0; ++i) {
      --left_;
      FetchLines(rows_[left_], bytes_[left_]);
    }
  }
  // What tiles that nobody saw have left over.
  HWY_INLINE void Finish() {
    while (left_ > 0) Step();
  }

 private:
  const std::byte* rows_[kMost];
  size_t bytes_[kMost];
  int left_ = 0;
  int each_ = 0;
};

}  // namespace VARLANE_NS
}  // namespace varlane
