// One register group of rows over a run of key tiles: scores, softmax, values.
//
// Interior tiles take no masks. At the edges of what a row sees its P.V stops
// where the row does, half a step where a pair is cut.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// Of a tile that has been weighed: nothing, what every row sees all of, or what
// some see nothing or a part of.
enum class Unadded : uint8_t { kNothing, kWhole, kRagged };

// One register group of R rows over a run of key tiles: scores tile by tile,
// each tile's weights while the next one's scores are computed, then the values
// of all of them, or each tile's after the next one's scores. Or over a single
// tile, in two halves between which other groups take theirs.
template <class Ops, int R, FetchMode kFetch>
class GroupPass {
 public:
  HWY_INLINE GroupPass(RunContext<Ops>& run, const RunPages& pages,
                       const Group& group, Waiting<Ops>& waiting)
      : run_(run),
        pages_(pages),
        waiting_(waiting),
        ws_(*run.ws),
        args_(*run.args),
        local_(group.local),
        slot_(group.slot),
        q_(ws_.q +
           static_cast<size_t>(group.row) * static_cast<size_t>(ws_.steps)),
        place_(ws_.places + group.row),
        acc_(ws_.acc + group.local * ws_.acc_floats),
        scores_(ws_.scores),
        modified_(args_.softcap != 0 || args_.alibi_slopes != nullptr) {}

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
  // Whether rows end so early in a tile that its values are added at once.
  HWY_INLINE bool EndsEarly(int tile) const {
    return place_[0].high - TileBegin(tile) <= kHardlySeen;
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
      return;
    }
    Span spans[R];
    FindSpans(tile, spans);
    AddRagged(tile, spans, true);
  }
  // Whether all rows see all of a tile.
  HWY_INLINE bool SeesAll(int tile) const {
    const int64_t begin = TileBegin(tile);
    return place_[R - 1].low <= begin && begin + kKeyTile <= place_[0].high;
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
      return;
    }
    Span spans[R];
    FindSpans(tile, spans);
    const bool all = DropUnseen(ws_.rows + local_, R, spans);
    AddRagged(tile, spans, all);
  }

 private:
  static constexpr int kPack = Ops::kPack;
  // Keys of a last tile that are not worth computing all of it.
  static constexpr int kHardlySeen = kKeyTile / 2;
  // Whether softmax hides behind no scores: of so many rows on Zen 5 it would
  // gain nothing (8 rows from DRAM even to 3% slower).
  static constexpr bool kSoftensApart =
      kPassesByTile || kVecsBeside<R> != kTileVecs;

  // Whether weights of a tile in which windows begin wait for the scores of the
  // next one.
  static constexpr bool kEdgesWait = !kSoftensApart && !IsNear(kFetch);

  // A single tile, whose weights wait where its scores stood.
  HWY_INLINE void Hold(int tile) {
    holds_ = true;
    added_ = steps_ = tile * kTileSteps<Ops>;
    p_at_ = slot_ * kMostRows<Ops> * ws_.p_stride - steps_;
    scores_ = reinterpret_cast<float*>(Weights(steps_));
  }

  // The rows' weights of the run's step `step`, p_stride apart.
  HWY_INLINE typename Ops::Operand* Weights(int step) const {
    return ws_.p + (p_at_ + step);
  }

  // Ends never fall with the row: the first and the last bound them all. From
  // the first key of a tile that any row sees to the last one,
  HWY_INLINE Span SeenKeys(int tile) const {
    return OfTile(place_[0].low, place_[R - 1].high, TileBegin(tile));
  }
  // those that every row sees,
  HWY_INLINE Span CommonKeys(int tile) const {
    return OfTile(place_[R - 1].low, place_[0].high, TileBegin(tile));
  }
  // and whether all of them see all of it, or end in it alike.
  HWY_INLINE bool EndsAlike(int tile) const {
    const Span common = CommonKeys(tile);
    return common.begin == 0 && common.end == SeenKeys(tile).end;
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

  // A tile whose scores are computed and of which all rows see what is before
  // `end`: weights and values at once.
  HWY_NOINLINE void PassAlike(int tile, int end) {
    Span spans[R];
    for (Span& span : spans) span = {0, end};
    const bool all = RowsOf(tile).WeighSpans(spans, AddsBefore(tile));
    if (HWY_UNLIKELY(!all) || holds_) {
      AddOrHold(tile, spans, all);
      return;
    }
    SetWeighed(tile, CommonKeys(tile).end);
    CallAddValues(steps_);
    if (HWY_UNLIKELY(half_)) AddHalf();
  }

  // Scores of all of a tile and, beside them or before, the weights that wait.
  // True where no row's maximum moves.
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
  HWY_NOINLINE bool CallScoresOfWhole(int tile) { return ScoresOfWhole(tile); }
  HWY_INLINE bool SteadyBeside(int tile) {
    if constexpr (!kSoftensApart) {
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
      constexpr int kSteps = kGroupTokens / kPack;
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

  // The last tile of rows that all end at its token `end`, but a whole one.
  // Most of one waits as a whole one does and, where heads are read tile by
  // tile, any part of one: what is done at once is hidden behind nothing
  // (contexts of 120 keys from DRAM, Zen 5: 10 to 24% slower).
  HWY_NOINLINE void LastTile(int tile, int end) {
    if (!holds_ && (end > kHardlySeen || kFetch == kFetchPaced)) {
      Span spans[R];
      for (Span& span : spans) span = {0, end};
      WeighEdgeLater(tile, spans);
      return;
    }
    waiting_.Finish();
    ScoresOf(tile, 0, end);
    PassAlike(tile, end);
  }

  // A tile that some row sees nothing or a part of.
  HWY_NOINLINE void RaggedTile(int tile) {
    Span spans[R];
    FindSpans(tile, spans);
    const auto [begin, end] = SeenKeys(tile);
    if constexpr (kFetch == kFetchPaced || kFetch == kFetchFar) {
      if (beside_ && (kFetch == kFetchPaced || end - begin > kHardlySeen)) {
        WeighEdgeLater(tile, spans);
        return;
      }
    }
    if constexpr (kEdgesWait) {
      if (!beside_ && tile + 1 < run_.tiles && SeesAll(tile + 1)) {
        WeighEdgeLater(tile, spans);
        edge_ = waiting_.any();
        return;
      }
    }
    waiting_.Finish();
    if (end != 0) ScoresOf(tile, begin, end);
    PassSpans(tile, spans);
  }

  // Scores of what rows see of a tile, whose weights wait as a whole one's do,
  // and without what they do not see.
  HWY_NOINLINE void WeighEdgeLater(int tile, Span* spans) {
    const Span seen = SeenKeys(tile);
    bool steady = false;
    if ((beside_ || waiting_.any()) && seen.end - seen.begin > kHardlySeen) {
      steady = CallScoresOfWhole(tile);
      waiting_.Clear();
    } else {
      waiting_.Finish();
      if (seen.end != 0) ScoresOf(tile, seen.begin, seen.end);
    }
    MaskOutside(spans, R, scores_);
    if (HWY_LIKELY(steady) || MoveMaxima(tile)) {
      waiting_.Set(UnweighedOf(tile), R);
      SetWeighed(tile, EndsAlike(tile) ? seen.end : kKeyTile);
      return;
    }
    PassSpans(tile, spans);
  }

  // What each row sees of a tile whose scores are computed.
  HWY_INLINE void PassSpans(int tile, Span* spans) {
    const bool all = RowsOf(tile).WeighSpans(spans, AddsBefore(tile));
    AddOrHold(tile, spans, all);
  }

  HWY_INLINE void FindSpans(int tile, Span* spans) const {
    VARLANE_NS::FindSpans(place_, R, TileBegin(tile), spans);
  }

  // Scores of a part of a tile. Called: it is long, and most are whole.
  HWY_NOINLINE void ScoresOf(int tile, int begin, int end) {
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

  // True where no row's maximum moves.
  HWY_INLINE bool Modify(int tile) {
    return ModifyTile(args_, place_, ws_.rows + local_, R, TileBegin(tile),
                      scores_);
  }

  // Of a tile whose scores are computed.
  HWY_INLINE ScoredRows<Ops> RowsOf(int tile) const {
    return {R, UnweighedOf(tile), acc_, ws_.acc_floats};
  }
  // What adds the values of the tiles before.
  HWY_INLINE auto AddsBefore(int tile) {
    return [this, tile]() HWY_ATTR { CallAddValues(tile * kTileSteps<Ops>); };
  }
  HWY_NOINLINE bool MoveMaxima(int tile) {
    return RowsOf(tile).MoveMaxima(AddsBefore(tile));
  }

  HWY_INLINE void AddOrHold(int tile, const Span* spans, bool all) {
    if (holds_) {
      ragged_ = true;
    } else {
      AddRagged(tile, spans, all);
    }
  }

  // What all rows see whole goes with the tiles before where it begins with
  // this one; what only some see comes before and after it. Each row keeps its
  // token order. `all` rows have weights, or else spans tell which.
  HWY_NOINLINE void AddRagged(int tile, const Span* spans, bool all) {
    const int first = tile * kTileSteps<Ops>;
    const Span keys = CommonKeys(tile);
    const Span common = {(keys.begin + kPack - 1) / kPack, keys.end / kPack};
    const Span seen = SeenKeys(tile);
    const Span some = {seen.begin / kPack, (seen.end + kPack - 1) / kPack};
    const bool any = all && common.begin < common.end;
    if (!any || common.begin != 0) {
      CallAddValues(first);
      AddEdge(tile, spans, {some.begin, any ? common.begin : some.end});
      if (!any) BeginSums();
      added_ = first + common.begin;
    }
    if (any) {
      CallAddValues(first + common.end);
      AddEdge(tile, spans, {common.end, some.end});
    }
    added_ = steps_ = first + kTileSteps<Ops>;
  }

  // Of a tile in which windows begin, all rows of which see the next one: what
  // comes before its first step that all of them see whole.
  HWY_NOINLINE void AddLowEdge() {
    edge_ = false;
    const int tile = added_ / kTileSteps<Ops>;
    Span spans[R];
    FindSpans(tile, spans);
    const auto last = static_cast<int>(place_[R - 1].low - TileBegin(tile));
    const int end = (last + kPack - 1) / kPack;
    AddEdge(tile, spans, {SeenKeys(tile).begin / kPack, end});
    added_ += end;
  }

  // What rows see of these steps of a tile, if anything.
  HWY_INLINE void AddEdge(int tile, const Span* spans, Span steps) {
    if (steps.begin >= steps.end) return;
    ValuesOfEdge<Ops, R>(Weights(tile * kTileSteps<Ops>), ws_.p_stride,
                         pages_.v + tile * kGroups, spans, steps.begin,
                         steps.end, acc_, ws_.acc_floats, fresh_);
    fresh_ = false;
  }

  HWY_INLINE Unweighed<Ops> UnweighedOf(int tile) const {
    return {scores_,
            Scale(),
            ws_.rows + local_,
            ws_.lanes + local_ * kLanes,
            Weights(tile * kTileSteps<Ops>),
            ws_.p_stride};
  }

  // Adds the values of steps [added_, end), which have weights.
  HWY_INLINE void AddValues(int end) {
    if constexpr (kEdgesWait) {
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

  // Called where it is rare: it is long.
  HWY_NOINLINE void CallAddValues(int end) { AddValues(end); }

  // Rows have weights up to `end` of a tile.
  HWY_INLINE void SetWeighed(int tile, int end) {
    steps_ = tile * kTileSteps<Ops> + end / kPack;
    half_ = end % kPack != 0;
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
  // The even one of a pair of tokens, rows' last.
  HWY_NOINLINE void AddHalf() {
    const int step = steps_ % kTileSteps<Ops>;
    Span spans[R];
    for (Span& span : spans) span = {0, step * kPack + 1};
    AddEdge(steps_ / kTileSteps<Ops>, spans, {step, step + 1});
    half_ = false;
  }

  // Of rows that see nothing of a run, which those of another may follow.
  HWY_INLINE void BeginSums() {
    if (!fresh_) return;
    ZeroFloats(acc_, R * ws_.acc_floats);
    fresh_ = false;
  }

  HWY_INLINE int64_t TileBegin(int tile) const {
    return run_.begin + int64_t{tile} * kKeyTile;
  }

  HWY_INLINE float Scale() const { return modified_ ? 1.0f : args_.scale_log2; }

  RunContext<Ops>& run_;
  const RunPages& pages_;
  Waiting<Ops>& waiting_;
  const Workspace<Ops>& ws_;
  const AttendArgs& args_;
  int local_;
  int slot_;
  const typename Ops::Operand* q_;
  const RowPlace* place_;
  float* acc_;
  float* scores_;  // [R][kKeyTile]
  bool modified_;
  int steps_ = 0;        // of values that have weights, or will
  int added_ = 0;        // of values
  bool half_ = false;    // whether the first one of a pair follows steps_
  bool fresh_ = false;   // nothing stands in acc_ yet, nor ever where no row
                         // sees a key
  int p_at_ = 0;         // where the run's weights would begin, in ws_.p
  bool beside_ = false;  // a single tile, whose values are added later,
  bool holds_ = false;   // the same, its weights where its scores stood,
  bool ragged_ = false;  // not the same ones for all rows
  bool edge_ = false;    // windows begin in the first tile to be added
};

}  // namespace VARLANE_NS
}  // namespace varlane
