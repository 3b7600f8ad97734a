// Every pair of settings meets: a seeded covering design over all that can be
// combined, held to the fp64 oracle; and the full product of what matters most,
// too long to run by default (ctest -C full -L full).
//
// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/testing/attention_case.h"
#include "tests/testing/engines.h"
#include "tests/testing/launch_modes.h"
#include "tests/testing/testing.h"

namespace varlane::testing {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr std::pair<int, int> kHeadSizes[] = {{8, 24},    {32, 32},   {64, 64},
                                              {80, 80},   {128, 128}, {40, 136},
                                              {192, 128}, {576, 512}};
constexpr int kGroups[] = {1, 2, 3, 4, 5, 8, 12};
constexpr int kBlockSizes[] = {16, 32, 64, 256};
// KV heads, and how many of them a threadgroup computes.
constexpr std::pair<int, int> kKvHeads[] = {{1, 1}, {2, 1}, {2, 2}, {3, 3}};
const char* const kMaskNames[] = {"causal",    "window", "bidirectional",
                                  "two-sided", "prefix", "mixed"};

enum Factor : int {
  kKv,
  kQ,
  kOut,
  kHeadSize,
  kGroup,
  kHeads,
  kBlockSize,
  kMask,
  kSoftcap,
  kAlibi,
  kSink,
  kPartitions,
  kOwner,
  kTarget,
  kFactors
};
using Row = std::array<int, kFactors>;  // the level of each factor

Row Levels() {
  return {3,
          3,
          3,
          int(std::size(kHeadSizes)),
          int(std::size(kGroups)),
          int(std::size(kKvHeads)),
          int(std::size(kBlockSizes)),
          int(std::size(kMaskNames)),
          2,
          2,
          2,
          int(std::size(kPartitionModes)),
          int(std::size(kOwnerPatterns)),
          int(EnginesOfAllTargets().size())};
}

SequenceMask MaskOf(int kind, int seq) {
  switch (kind) {
    case 1:
      return {true, 37 + 977 * (seq % 2), -1, 0};
    case 2:
      return {false, -1, -1, 0};
    case 3:
      return {false, 21, 6, 0};
    case 4:
      return {true, -1, -1, 50};
    case 5:
      return MaskOf(seq % 5, seq);
    default:
      return {};
  }
}

// Ragged, with an empty sequence, q > kv, and more than one partition.
CaseSpec SpecOf(const Row& row) {
  CaseSpec spec;
  spec.kv_dtype = kDTypes[row[kKv]];
  spec.q_dtype = kDTypes[row[kQ]];
  spec.out_dtype = kDTypes[row[kOut]];
  std::tie(spec.head_size, spec.v_head_size) = kHeadSizes[row[kHeadSize]];
  spec.kv_heads = kKvHeads[row[kHeads]].first;
  spec.q_heads = spec.kv_heads * kGroups[row[kGroup]];
  spec.block_size = kBlockSizes[row[kBlockSize]];
  spec.seqs = {{1, 1060}, {13, 67}, {0, 3}, {5, 3}, {2, 130}};
  for (int s = 0; s < int(spec.seqs.size()); ++s) {
    spec.masks.push_back(MaskOf(row[kMask], s));
  }
  if (row[kSoftcap] != 0) spec.softcap = 8;
  for (int h = 0; h < spec.q_heads; ++h) {
    if (row[kAlibi] != 0) spec.alibi_slopes.push_back(std::exp2(-float(h + 2)));
    if (row[kSink] != 0) spec.sinks.push_back(float(h % 5) - 1.5f);
  }
  return spec;
}

PlanOptions OptionsOf(const Row& row) {
  return {.owner = kOwnerPatterns[row[kOwner]],
          .partitions = kPartitionModes[row[kPartitions]],
          .kv_heads_per_threadgroup = kKvHeads[row[kHeads]].second};
}

std::string Describe(const Row& row) {
  const CaseSpec spec = SpecOf(row);
  const PlanOptions options = OptionsOf(row);
  std::ostringstream out;
  out << EnginesOfAllTargets()[size_t(row[kTarget])].attention->simd_target()
      << " kv=" << DTypeName(spec.kv_dtype) << " q=" << DTypeName(spec.q_dtype)
      << " out=" << DTypeName(spec.out_dtype) << " D=" << spec.head_size << "/"
      << spec.v_size() << " heads=" << spec.q_heads << "/" << spec.kv_heads
      << " together=" << options.kv_heads_per_threadgroup
      << " block=" << spec.block_size << " mask=" << kMaskNames[row[kMask]]
      << " softcap=" << row[kSoftcap] << " alibi=" << row[kAlibi]
      << " sink=" << row[kSink] << " " << PartitionModeName(options.partitions)
      << " " << OwnerPatternName(options.owner);
  return out.str();
}

void Check(const Row& row, const AttentionCase& c) {
  SCOPED_TRACE(Describe(row));
  const Engine& engine = EnginesOfAllTargets()[size_t(row[kTarget])];
  c.ExpectMatchesReference(c.Run(*engine.attention, OptionsOf(row)));
}

// --- the covering design -----------------------------------------------------

using Pair = std::array<int, 4>;  // factor, level, factor, level

std::set<Pair> AllPairs(const Row& levels) {
  std::set<Pair> pairs;
  for (int a = 0; a < kFactors; ++a) {
    for (int b = a + 1; b < kFactors; ++b) {
      for (int i = 0; i < levels[size_t(a)]; ++i) {
        for (int j = 0; j < levels[size_t(b)]; ++j) pairs.insert({a, i, b, j});
      }
    }
  }
  return pairs;
}

std::vector<Pair> PairsOf(const Row& row) {
  std::vector<Pair> pairs;
  for (int a = 0; a < kFactors; ++a) {
    for (int b = a + 1; b < kFactors; ++b) {
      pairs.push_back({a, row[size_t(a)], b, row[size_t(b)]});
    }
  }
  return pairs;
}

// Greedy: of some random rows through a pair not covered yet, the one that
// covers most others.
std::vector<Row> CoveringDesign(uint32_t seed) {
  constexpr int kCandidates = 30;
  const Row levels = Levels();
  std::mt19937 rng(seed);
  std::set<Pair> open = AllPairs(levels);
  std::vector<Row> design;
  while (!open.empty()) {
    const Pair must = *open.begin();
    Row best = {};
    int most = -1;
    for (int candidate = 0; candidate < kCandidates; ++candidate) {
      Row row;
      for (size_t f = 0; f < kFactors; ++f) {
        row[f] = int(rng() % uint32_t(levels[f]));
      }
      row[size_t(must[0])] = must[1];
      row[size_t(must[2])] = must[3];
      int gain = 0;
      for (const Pair& pair : PairsOf(row)) gain += int(open.count(pair));
      if (gain > most) {
        most = gain;
        best = row;
      }
    }
    for (const Pair& pair : PairsOf(best)) open.erase(pair);
    design.push_back(best);
  }
  return design;
}

TEST(MatrixTest, EveryPairOfSettingsMatchesTheReference) {
  const std::vector<Row> design = CoveringDesign(20261121);
  RecordProperty("cases", int(design.size()));
  std::set<Pair> open = AllPairs(Levels());
  for (const Row& row : design) {
    CaseSpec spec = SpecOf(row);
    spec.seed = 1 + open.size();
    Check(row, AttentionCase(spec));
    if (HasFailure()) return;
    for (const Pair& pair : PairsOf(row)) open.erase(pair);
  }
  EXPECT_TRUE(open.empty()) << "the design does not cover";
}

// --- the full product --------------------------------------------------------

// KV type, head size, group, block size, mask, modifiers, partition mode and
// target; q and out types, KV heads and the owner pattern take turns.
TEST(MatrixTest, DISABLED_TheFullProductMatchesTheReference) {
  const Row levels = Levels();
  uint64_t cases = 0;
  Row row = {};
  const auto next = [&] {  // the next combination, as an odometer
    for (const Factor f :
         {kBlockSize, kSink, kAlibi, kSoftcap, kMask, kGroup, kHeadSize, kKv}) {
      // Every other size: the covering design has them all.
      const bool sizes = f == kBlockSize || f == kGroup || f == kHeadSize;
      row[f] += sizes ? 2 : 1;
      if (row[f] < levels[f]) return true;
      row[f] = 0;
    }
    return false;
  };
  do {
    row[kQ] = int(cases % 3);
    row[kOut] = int(cases / 3 % 3);
    row[kHeads] = int(cases / 9 % std::size(kKvHeads));
    CaseSpec spec = SpecOf(row);
    // The long sequence at every mask and modifier, but not at every size.
    if (spec.head_size > 64) spec.seqs[0].kv_len = 90;
    spec.seed = ++cases;
    const AttentionCase c(spec);
    for (row[kTarget] = 0; row[kTarget] < levels[kTarget]; ++row[kTarget]) {
      for (row[kPartitions] = 0; row[kPartitions] < 2; ++row[kPartitions]) {
        row[kOwner] = (row[kTarget] + 2 * row[kPartitions]) % 4;
        Check(row, c);
        if (HasFailure()) return;
      }
    }
    row[kTarget] = row[kPartitions] = row[kOwner] = 0;
  } while (next());
  RecordProperty("cases", int(cases));
}

}  // namespace
}  // namespace varlane::testing
