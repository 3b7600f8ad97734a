// One register group of rows over a run of key tiles: scores, softmax, values.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Of a tile that has been weighed: nothing, what every row sees all of, or what
// some see nothing or a part of.
enum class Unadded : uint8_t { kNothing, kWhole, kRagged };

// Whether softmax of R rows hides behind no scores: of so many rows on Zen 5 it
// would gain nothing (8 rows from DRAM even to 3% slower).
template <int R>
constexpr bool kSoftensApart = kPassesByTile || kVecsBeside<R> != kTileVecs;

// Whether weights of a tile in which windows begin wait for the scores of the
// next one.
template <int R, FetchMode kFetch>
constexpr bool kEdgesWait = !kSoftensApart<R> && !IsNear(kFetch);

// One register group of R rows over a run of key tiles: scores tile by tile,
// each tile's weights while the next one's scores are computed, then the values
// of all of them, or each tile's after the next one's scores. Or over a single
// tile, in two halves between which other groups take theirs.
template <class Ops, int R, FetchMode kFetch>
class GroupPass final : public RarePass<Ops> {
  using Rare = RarePass<Ops>;

 public:
  HWY_INLINE GroupPass(RunContext<Ops>& run, const RunPages& pages,
                       const Group& group, Waiting<Ops>& waiting)
      : Rare(run, pages, group, waiting, R, kFetch, kEdgesWait<R, kFetch>) {}

  HWY_INLINE void Run() {
    fresh_ = run_.fresh;
    for (int tile = 0; tile < run_.tiles; ++tile) {
      run_.row_fetches.Step();
      if (!PassTile(tile)) break;
    }
    waiting_.Finish();
    AddWeighed();
    run_.row_fetches.Finish();
  }

  // One of several heads whose tiles follow each other, each one's values added
  // after the next one's scores. So the weights of one head's last tile stand
  // beside those of the next one's first: never in the same place where every
  // other head is `odd`.
  HWY_INLINE void BeginInTurn(bool odd) {
    fresh_ = run_.fresh;
    if (odd) p_at_ = (kRun - run_.tiles) * kTileSteps<Ops>;
  }
  HWY_INLINE void AddBefore(int tile) { AddValues(tile * kTileSteps<Ops>); }
  // What is left once the next head's first scores are computed.
  HWY_INLINE void AddLast(bool odd) {
    BeginInTurn(odd);
    const int tile = run_.tiles - 1;
    fresh_ = fresh_ && tile == 0;
    added_ = tile * kTileSteps<Ops>;
    AddAlike(tile);
  }

  // False where nobody sees what comes after.
  HWY_INLINE bool PassTile(int tile) {
    const int64_t first = place_[R - 1].low - run_.begin;
    const int64_t last = place_[0].high - run_.begin;
    const int64_t begin = int64_t{tile} * kKeyTile;
    if (HWY_LIKELY(first <= begin && begin + kKeyTile <= last)) {
      WholeTile(tile);
    } else if (first <= begin && place_[R - 1].high == place_[0].high) {
      if (begin < last) LastTile(tile, static_cast<int>(last - begin));
      return false;
    } else {
      RaggedTile(tile);
    }
    return true;
  }

  // Of a turn of one tile or two, of which only the last one may be seen in
  // part: its values are added once all of several heads or groups have
  // weights. This one's stand where a run would have those of its `slot`th tile
  // and the next.
  HWY_INLINE void BeginTurn(int tile, int slot) {
    beside_ = true;
    added_ = steps_ = tile * kTileSteps<Ops>;
    p_at_ = slot * kTileSteps<Ops> - steps_;
  }
  // Whether its tiles left something to add; the rest is done.
  HWY_INLINE bool waits() const { return added_ < steps_ || half_; }
  HWY_INLINE int added() const { return added_; }
  HWY_INLINE void ResumeTurn(int tile, int slot, int added) {
    BeginTurn(tile, slot);
    added_ = added;
  }
  HWY_INLINE void AddLastOfTurn(int tile) {
    if (HWY_LIKELY(EndsAlike(tile))) {
      AddAlike(tile);
    } else {
      AddRagged(tile);
    }
  }

  // Scores and weights of one tile. Returns what AddTile has to add.
  HWY_INLINE Unadded WeighTile(int tile) {
    Hold(tile);
    PassTile(tile);
    waiting_.Finish();
    return ragged_           ? Unadded::kRagged
           : added_ < steps_ ? Unadded::kWhole
                             : Unadded::kNothing;
  }
  HWY_INLINE void AddTile(int tile, Unadded unadded) {
    Hold(tile);
    if (HWY_LIKELY(unadded == Unadded::kWhole)) {
      AddValues(added_ + kTileSteps<Ops>);
    } else {
      AddRagged(tile);
    }
  }

 private:
  using Rare::acc_;
  using Rare::added_;
  using Rare::AddHalf;
  using Rare::AddLowEdge;
  using Rare::AddRagged;
  using Rare::beside_;
  using Rare::CommonKeys;
  using Rare::edge_;
  using Rare::EndsAlike;
  using Rare::fresh_;
  using Rare::half_;
  using Rare::holds_;
  using Rare::LastTile;
  using Rare::local_;
  using Rare::modified_;
  using Rare::Modify;
  using Rare::MoveMaxima;
  using Rare::p_at_;
  using Rare::pages_;
  using Rare::PassAlike;
  using Rare::place_;
  using Rare::q_;
  using Rare::ragged_;
  using Rare::RaggedTile;
  using Rare::run_;
  using Rare::scores_;
  using Rare::SetWeighed;
  using Rare::slot_;
  using Rare::steps_;
  using Rare::UnweighedOf;
  using Rare::waiting_;
  using Rare::Weights;
  using Rare::ws_;

  // A single tile, whose weights wait where its scores stood.
  HWY_INLINE void Hold(int tile) {
    holds_ = true;
    added_ = steps_ = tile * kTileSteps<Ops>;
    p_at_ = slot_ * kMostRows<Ops> * ws_.p_stride - steps_;
    scores_ = reinterpret_cast<float*>(Weights(steps_));
  }

  // A tile that every row sees all of.
  HWY_INLINE void WholeTile(int tile) {
    const bool steady = ScoresOfWhole(tile);
    waiting_.Clear();
    if (HWY_LIKELY(steady) || MoveMaxima(tile)) {
      waiting_.Set(UnweighedOf(tile), R);
      SetWeighed(tile, kKeyTile);
      return;
    }
    PassAlike(tile, kKeyTile);
  }

  HWY_INLINE bool ScoresOfWhole(int tile) {
    if constexpr (kTileVecs == kMaxVecs || kAvx2) {
      const bool steady = SteadyBeside(tile);
      return HWY_LIKELY(!modified_) ? steady : Modify(tile);
    } else {
      waiting_.Finish();
      ScoresOf(tile, 0, kKeyTile);
      return false;
    }
  }
  HWY_INLINE bool SteadyBeside(int tile) {
    if constexpr (!kSoftensApart<R>) {
      if (HWY_LIKELY(waiting_.count() == R)) {
        return Steady<SoftenRows<Ops, R>>(tile, waiting_.rows());
      }
    }
    waiting_.Finish();
    return Steady<NoSide>(tile, {});
  }

  // What is read after this tile's keys: the next one's, or values.
  HWY_INLINE void AimOnward(int tile) {
    if constexpr (kFetch == kFetchNear && !kZen5) {
      constexpr int kSteps = kGroupTokens / Ops::kPack;
      run_.score_fetch.onward =
          tile + 1 == run_.tiles
              ? ValueHead<Ops>(pages_.v[added_ / kSteps], 0, ws_.acc_floats)
              : KeyHead(pages_.k + (tile + 1) * kGroups, run_.key_stride);
    }
  }

  template <class Side>
  HWY_INLINE bool Steady(int tile, const typename Side::Of& side_of) {
    AimOnward(tile);
    return SteadyTile<Ops, R, kFetch, Side>(
        q_, pages_.k + tile * kGroups, run_.key_stride,
        static_cast<size_t>(ws_.steps), side_of, ws_.rows + local_, scores_,
        run_.score_fetch);
  }

  HWY_INLINE void AddValues(int end) {
    if constexpr (kEdgesWait<R, kFetch>) {
      if (HWY_UNLIKELY(edge_)) AddLowEdge();
    }
    if (added_ >= end) return;
    if constexpr (kCutsPanels && !IsNear(kFetch)) {  // by tile
      const int first = added_ / kTileSteps<Ops> * kTileSteps<Ops>;
      PanelValues<Ops, R, kFetch>(Weights(added_), ws_.p_stride,
                                  reinterpret_cast<const std::byte*>(ws_.wide),
                                  added_ - first, end - first, acc_,
                                  ws_.acc_floats, fresh_, run_.value_fetch);
    } else {
      Values<Ops, R, kFetch>(Weights(added_), ws_.p_stride, pages_.v,
                             run_.on_end, added_, end, acc_, ws_.acc_floats,
                             fresh_, run_.value_fetch);
    }
    added_ = end;
    fresh_ = false;
  }

  // Of a tile that all rows see, or end in alike.
  HWY_INLINE void AddAlike(int tile) {
    SetWeighed(tile, CommonKeys(tile).end);
    AddWeighed();
  }
  HWY_INLINE void AddWeighed() {
    AddValues(steps_);
    if (HWY_LIKELY(!half_)) return;
    AddHalf();
  }

  // --- the loops, called where they are rare: they are long ------------------

  HWY_NOINLINE bool CallScoresOfWhole(int tile) override {
    return ScoresOfWhole(tile);
  }
  HWY_NOINLINE void ScoresOf(int tile, int begin, int end) override {
    constexpr int kLane = static_cast<int>(kN);
    const bool all_vecs = begin < kLane && end > kKeyTile - kLane;
    if (kVecsBeside<R> == kTileVecs && all_vecs) {
      Steady<NoSide>(tile, {});
    } else {
      AimOnward(tile);
      Scores<Ops, R, kFetch>(q_, pages_.k + tile * kGroups, run_.key_stride,
                             static_cast<size_t>(ws_.steps), begin, end,
                             scores_, run_.score_fetch);
    }
    if (HWY_UNLIKELY(modified_)) Modify(tile);
  }
  HWY_NOINLINE void CallAddValues(int end) override { AddValues(end); }
  HWY_NOINLINE void AddEdgeValues(const typename Ops::Operand* p,
                                  const std::byte* const* groups,
                                  const Span* spans, int begin,
                                  int end) override {
    ValuesOfEdge<Ops, R>(p, ws_.p_stride, groups, spans, begin, end, acc_,
                         ws_.acc_floats, fresh_);
  }
};

}  // namespace VARLANE_NS
}  // namespace varlane
