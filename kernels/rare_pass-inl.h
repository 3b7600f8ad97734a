// What a register group seldom does with a tile: maxima move, windows begin or
// contexts end in it, or rows end in it one by one.
//
// Interior tiles take no masks. At the edges of what a row sees its P.V stops
// where the row does, half a step where a pair is cut.
//
// Included once per pass by pass-inl.h, hence no guard.
// SPDX-License-Identifier: Apache-2.0

namespace varlane {
namespace VARLANE_NS {

// What GroupPass has of a register group, and what of it need not be compiled
// for each number of rows and each way of fetching: the loops that must are
// called.
template <class Ops>
class RarePass {
 public:
  RarePass(const RarePass&) = delete;
  RarePass& operator=(const RarePass&) = delete;

  // Whether all rows see all of a tile.
  HWY_INLINE bool SeesAll(int tile) const {
    const int64_t begin = TileBegin(tile);
    return last_row().low <= begin && begin + kKeyTile <= place_[0].high;
  }
  // Whether rows end so early in a tile that its values are added at once.
  HWY_INLINE bool EndsEarly(int tile) const {
    return place_[0].high - TileBegin(tile) <= kHardlySeen;
  }

 protected:
  static constexpr int kPack = Ops::kPack;
  // Keys of a last tile that are not worth computing all of it.
  static constexpr int kHardlySeen = kKeyTile / 2;

  HWY_INLINE RarePass(RunContext<Ops>& run, const RunPages& pages,
                      const Group& group, Waiting<Ops>& waiting, int rows,
                      FetchMode fetch, bool edges_wait)
      : run_(run),
        pages_(pages),
        waiting_(waiting),
        ws_(*run.ws),
        args_(*run.args),
        local_(group.local),
        slot_(group.slot),
        rows_(rows),
        fetch_(fetch),
        edges_wait_(edges_wait),
        q_(ws_.q +
           static_cast<size_t>(group.row) * static_cast<size_t>(ws_.steps)),
        place_(ws_.places + group.row),
        acc_(ws_.acc + group.local * ws_.acc_floats),
        scores_(ws_.scores),
        modified_(args_.softcap != 0 || args_.alibi_slopes != nullptr) {}
  ~RarePass() = default;

  // --- loops -----------------------------------------------------------------

  // Scores of all of a tile and, beside them or before, the weights that wait.
  // True where no row's maximum moves.
  virtual bool CallScoresOfWhole(int tile) = 0;
  // Scores of a part of a tile.
  virtual void ScoresOf(int tile, int begin, int end) = 0;
  // Adds the values of steps [added_, end), which have weights.
  virtual void CallAddValues(int end) = 0;
  // Adds what rows see of steps [begin, end) of the tile at `groups`, whose
  // weights stand at `p`.
  virtual void AddEdgeValues(const typename Ops::Operand* p,
                             const std::byte* const* groups, const Span* spans,
                             int begin, int end) = 0;

  // --- a tile ----------------------------------------------------------------

  // Whose scores are computed and of which all rows see what is before `end`:
  // weights and values at once.
  HWY_NOINLINE void PassAlike(int tile, int end) {
    Span spans[kMostRows<Ops>];
    SetSpans(end, spans);
    const bool all = RowsOf(tile).WeighSpans(spans, AddsBefore(tile));
    if (HWY_UNLIKELY(!all) || holds_) {
      AddOrHold(tile, spans, all);
      return;
    }
    SetWeighed(tile, CommonKeys(tile).end);
    CallAddValues(steps_);
    if (HWY_UNLIKELY(half_)) AddHalf();
  }

  // The last tile of rows that all end at its token `end`, but a whole one.
  // Most of one waits as a whole one does and, where heads are read tile by
  // tile, any part of one: what is done at once is hidden behind nothing
  // (contexts of 120 keys from DRAM, Zen 5: 10 to 24% slower).
  HWY_NOINLINE void LastTile(int tile, int end) {
    if (!holds_ && (end > kHardlySeen || fetch_ == kFetchPaced)) {
      Span spans[kMostRows<Ops>];
      SetSpans(end, spans);
      WeighEdgeLater(tile, spans);
      return;
    }
    waiting_.Finish();
    ScoresOf(tile, 0, end);
    PassAlike(tile, end);
  }

  // A tile that some row sees nothing or a part of.
  HWY_NOINLINE void RaggedTile(int tile) {
    Span spans[kMostRows<Ops>];
    FindSpans(tile, spans);
    const auto [begin, end] = SeenKeys(tile);
    if (beside_ && (fetch_ == kFetchPaced ||
                    (fetch_ == kFetchFar && end - begin > kHardlySeen))) {
      WeighEdgeLater(tile, spans);
      return;
    }
    if (edges_wait_ && !beside_ && tile + 1 < run_.tiles && SeesAll(tile + 1)) {
      WeighEdgeLater(tile, spans);
      edge_ = waiting_.any();
      return;
    }
    waiting_.Finish();
    if (end != 0) ScoresOf(tile, begin, end);
    PassSpans(tile, spans);
  }

  // True where no row's maximum moves.
  HWY_INLINE bool Modify(int tile) {
    return ModifyTile(args_, place_, ws_.rows + local_, rows_, TileBegin(tile),
                      scores_);
  }

  // Moves maxima where scores that are computed demand it; false where a row
  // has seen none above -inf yet.
  HWY_NOINLINE bool MoveMaxima(int tile) {
    return RowsOf(tile).MoveMaxima(AddsBefore(tile));
  }

  // --- its values ------------------------------------------------------------

  // Of a tile that has weights, what each row sees.
  HWY_NOINLINE void AddRagged(int tile) {
    Span spans[kMostRows<Ops>];
    FindSpans(tile, spans);
    const bool all = DropUnseen(ws_.rows + local_, rows_, spans);
    AddSpans(tile, spans, all);
  }

  // Of a tile in which windows begin, all rows of which see the next one: what
  // comes before its first step that all of them see whole.
  HWY_NOINLINE void AddLowEdge() {
    edge_ = false;
    const int tile = added_ / kTileSteps<Ops>;
    Span spans[kMostRows<Ops>];
    FindSpans(tile, spans);
    const auto last = static_cast<int>(last_row().low - TileBegin(tile));
    const int end = (last + kPack - 1) / kPack;
    AddEdge(tile, spans, {SeenKeys(tile).begin / kPack, end});
    added_ += end;
  }

  // The even one of a pair of tokens, rows' last.
  HWY_NOINLINE void AddHalf() {
    const int step = steps_ % kTileSteps<Ops>;
    Span spans[kMostRows<Ops>];
    SetSpans(step * kPack + 1, spans);
    AddEdge(steps_ / kTileSteps<Ops>, spans, {step, step + 1});
    half_ = false;
  }

  // --- what stands where -----------------------------------------------------

  // The rows' weights of the run's step `step`, p_stride apart.
  HWY_INLINE typename Ops::Operand* Weights(int step) const {
    return ws_.p + (p_at_ + step);
  }

  HWY_INLINE int64_t TileBegin(int tile) const {
    return run_.begin + int64_t{tile} * kKeyTile;
  }

  // Ends never fall with the row: the first and the last bound them all. From
  // the first key of a tile that any row sees to the last one,
  HWY_INLINE Span SeenKeys(int tile) const {
    return OfTile(place_[0].low, last_row().high, TileBegin(tile));
  }
  // those that every row sees,
  HWY_INLINE Span CommonKeys(int tile) const {
    return OfTile(last_row().low, place_[0].high, TileBegin(tile));
  }
  // and whether all of them see all of it, or end in it alike.
  HWY_INLINE bool EndsAlike(int tile) const {
    const Span common = CommonKeys(tile);
    return common.begin == 0 && common.end == SeenKeys(tile).end;
  }

  HWY_INLINE Unweighed<Ops> UnweighedOf(int tile) const {
    return {scores_,
            modified_ ? 1.0f : args_.scale_log2,
            ws_.rows + local_,
            ws_.lanes + local_ * kLanes,
            Weights(tile * kTileSteps<Ops>),
            ws_.p_stride};
  }

  // Rows have weights up to `end` of a tile.
  HWY_INLINE void SetWeighed(int tile, int end) {
    steps_ = tile * kTileSteps<Ops> + end / kPack;
    half_ = end % kPack != 0;
  }

  RunContext<Ops>& run_;
  const RunPages& pages_;
  Waiting<Ops>& waiting_;
  const Workspace<Ops>& ws_;
  const AttendArgs& args_;
  const int local_;
  const int slot_;
  const int rows_;
  const FetchMode fetch_;
  const bool edges_wait_;  // those of windows for the scores of the next tile
  const typename Ops::Operand* const q_;
  const RowPlace* const place_;
  float* const acc_;
  float* scores_;  // [rows_][kKeyTile]
  const bool modified_;
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

 private:
  HWY_INLINE const RowPlace& last_row() const { return place_[rows_ - 1]; }

  HWY_INLINE void SetSpans(int end, Span* spans) const {
    HWY_UNROLL(1) for (int r = 0; r < rows_; ++r) spans[r] = {0, end};
  }
  HWY_INLINE void FindSpans(int tile, Span* spans) const {
    VARLANE_NS::FindSpans(place_, rows_, TileBegin(tile), spans);
  }

  // Of a tile whose scores are computed.
  HWY_INLINE ScoredRows<Ops> RowsOf(int tile) const {
    return {rows_, UnweighedOf(tile), acc_, ws_.acc_floats};
  }
  // What adds the values of the tiles before.
  HWY_INLINE auto AddsBefore(int tile) {
    return [this, tile]() HWY_ATTR { CallAddValues(tile * kTileSteps<Ops>); };
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
    MaskOutside(spans, rows_, scores_);
    if (HWY_LIKELY(steady) || MoveMaxima(tile)) {
      waiting_.Set(UnweighedOf(tile), rows_);
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

  HWY_INLINE void AddOrHold(int tile, const Span* spans, bool all) {
    if (holds_) {
      ragged_ = true;
    } else {
      AddSpans(tile, spans, all);
    }
  }

  // What all rows see whole goes with the tiles before where it begins with
  // this one; what only some see comes before and after it. Each row keeps its
  // token order. `all` rows have weights, or else spans tell which.
  HWY_NOINLINE void AddSpans(int tile, const Span* spans, bool all) {
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

  // What rows see of these steps of a tile, if anything.
  HWY_INLINE void AddEdge(int tile, const Span* spans, Span steps) {
    if (steps.begin >= steps.end) return;
    AddEdgeValues(Weights(tile * kTileSteps<Ops>), pages_.v + tile * kGroups,
                  spans, steps.begin, steps.end);
    fresh_ = false;
  }

  // Of rows that see nothing of a run, which those of another may follow.
  HWY_INLINE void BeginSums() {
    if (!fresh_) return;
    ZeroFloats(acc_, rows_ * ws_.acc_floats);
    fresh_ = false;
  }
};

}  // namespace VARLANE_NS
}  // namespace varlane
