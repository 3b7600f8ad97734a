// Rows on the prefix cache: looking up, sharing and committing blocks, and the
// hit rates of a trace.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tools/bench_session.h"
#include "tools/clock.h"
#include "tools/prefix_hits.h"
#include "tools/status_util.h"
#include "tools/trace.h"
#include "varlane/kv_pool.h"

namespace varlane::tools {
namespace {

using Tokens = std::vector<int32_t>;

// 32768 blocks in all: what is known of them does not fit a core's own cache.
constexpr int kPrompts = 128;
constexpr int kPromptBlocks = 256;

// `blocks` blocks and the one token more that is never looked up.
Tokens RandomPrompt(std::mt19937* random, int blocks) {
  Tokens prompt(static_cast<size_t>(blocks) * kSmallBlockTokens + 1);
  for (int32_t& token : prompt) token = static_cast<int32_t>((*random)() >> 1);
  return prompt;
}

std::span<const int32_t> Blocks(const Tokens& prompt) {
  return std::span(prompt).first(prompt.size() - 1);
}

// Finds what is known of the prompt and computes the rest of its blocks, whose
// sequence it returns.
Result<SeqId> Compute(KvPool* pool, const Tokens& prompt, PrefixMatch* match) {
  VARLANE_TOOLS_ASSIGN(*match, pool->MatchPrefix({}, prompt));
  const std::span<const int32_t> rest =
      Blocks(prompt).subspan(static_cast<size_t>(match->tokens));
  VARLANE_TOOLS_ASSIGN(const Admission admission,
                       pool->Append(match->seq, std::ssize(rest)));
  if (!admission.admitted()) {
    return Fail(StatusCode::kInternal, "a prompt of {} blocks was refused",
                prompt.size() / kSmallBlockTokens);
  }
  VARLANE_TOOLS_TRY(pool->CommitTokens(match->seq, match->tokens, rest));
  return match->seq;
}

// --- time --------------------------------------------------------------------

// A pool whose every block is cached, a prompt's each.
class CachedPrompts {
 public:
  static Result<std::unique_ptr<CachedPrompts>> Create(Runtime* runtime) {
    std::unique_ptr<CachedPrompts> made(new CachedPrompts);
    VARLANE_TOOLS_ASSIGN(
        made->pool_, MakeSmallPool(runtime, kPrompts * kPromptBlocks, true));
    for (int i = 0; i < kPrompts; ++i) {
      made->prompts_.push_back(RandomPrompt(&made->random_, kPromptBlocks));
      PrefixMatch match;
      VARLANE_TOOLS_ASSIGN(
          const SeqId seq,
          Compute(made->pool_.get(), made->prompts_.back(), &match));
      VARLANE_TOOLS_TRY(made->pool_->Free(seq));
    }
    made->copies_ = made->prompts_;
    std::shuffle(made->prompts_.begin(), made->prompts_.end(), made->random_);
    std::sort(made->copies_.begin(), made->copies_.end());
    return made;
  }

  // Nanoseconds a block.
  Result<double> Look() {
    const Clock::time_point start = Clock::now();
    for (const Tokens& prompt : prompts_) {
      VARLANE_TOOLS_ASSIGN(const PrefixMatch match,
                           pool_->FindPrefix(0, prompt));
      if (match.shared_blocks != kPromptBlocks) return Missed(match);
    }
    return NanosABlock(start);
  }
  Result<double> Share() {
    const Clock::time_point start = Clock::now();
    for (const Tokens& prompt : prompts_) {
      VARLANE_TOOLS_ASSIGN(const PrefixMatch match,
                           pool_->MatchPrefix({}, prompt));
      if (match.shared_blocks != kPromptBlocks) return Missed(match);
      VARLANE_TOOLS_TRY(pool_->Free(match.seq));
    }
    return NanosABlock(start);
  }
  // The tokens alone, block by block, at places just as far apart.
  Result<double> Compare() {
    constexpr size_t kBytes = kSmallBlockTokens * sizeof(int32_t);
    const Clock::time_point start = Clock::now();
    int64_t equal = 0;
    for (const Tokens& prompt : prompts_) {
      const Tokens& copy =
          *std::lower_bound(copies_.begin(), copies_.end(), prompt);
      for (size_t i = 0; i + 1 < prompt.size(); i += kSmallBlockTokens) {
        equal += std::memcmp(&prompt[i], &copy[i], kBytes) == 0;
      }
    }
    if (equal == kPrompts * kPromptBlocks) return NanosABlock(start);
    return Fail(StatusCode::kInternal, "{} blocks are equal", equal);
  }
  // Evicts as many blocks as it commits.
  Result<double> Commit() {
    const Tokens prompt = RandomPrompt(&random_, kPromptBlocks);
    const SeqId seq = pool_->CreateSequence();
    VARLANE_TOOLS_TRY(pool_->Append(seq, std::ssize(Blocks(prompt))).status());
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(pool_->CommitTokens(seq, 0, Blocks(prompt)));
    const double seconds = SecondsSince(start);
    VARLANE_TOOLS_TRY(pool_->Free(seq));
    return seconds / kPromptBlocks * 1e9;
  }

 private:
  CachedPrompts() = default;

  static double NanosABlock(Clock::time_point start) {
    return SecondsSince(start) / (kPrompts * kPromptBlocks) * 1e9;
  }
  static Status Missed(const PrefixMatch& match) {
    return Fail(StatusCode::kInternal, "{} of {} blocks were found",
                match.shared_blocks, kPromptBlocks);
  }

  std::mt19937 random_{7};
  std::unique_ptr<KvPool> pool_;
  std::vector<Tokens> prompts_;
  std::vector<Tokens> copies_;  // sorted
};

// One of its members, beside the comparison of the tokens.
using PrefixOperation = Result<double> (CachedPrompts::*)();

Status MeasureOperation(BenchSession* session, PrefixOperation operation,
                        bool has_limit, BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<CachedPrompts> prompts,
                       CachedPrompts::Create(session->runtime()));
  std::vector<Sampler> samplers = {
      {[&] { return (prompts.get()->*operation)(); }}};
  if (has_limit) samplers.push_back({[&] { return prompts->Compare(); }});
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  SetValues(samples.of[0], samples.disturbed, row);
  if (!has_limit) return {};
  row->limit = Median(samples.of[1]);
  std::vector<double> ratios;
  for (size_t i = 0; i < samples.of[0].size(); ++i) {
    ratios.push_back(samples.of[1][i] / samples.of[0][i]);
  }
  SetRatios(ratios, samples.disturbed, row);
  return {};
}

// --- hit rates ---------------------------------------------------------------

struct Oracle {
  const char* file;
  std::array<double, 7> percent;
};
// Block hit rates of prefix-aware LRU at these capacities, as published for
// these traces: docs/prefix_cache.md.
constexpr std::array<int64_t, 7> kCapacities = {1000,   3000,    10'000, 30'000,
                                                50'000, 100'000, 0};  // 0: all
constexpr std::array<Oracle, 2> kOracles = {
    Oracle{"mooncake_conversation_trace.jsonl",
           {4.45, 6.53, 21.16, 32.57, 35.46, 36.37, 36.64}},
    Oracle{"mooncake_synthetic_trace.jsonl",
           {8.41, 19.06, 42.39, 62.42, 63.96, 63.96, 63.96}}};

const Oracle* OracleOf(const std::string& path) {
  for (const Oracle& oracle : kOracles) {
    if (path.ends_with(oracle.file)) return &oracle;
  }
  return nullptr;
}

// Per cent, in hundredths as the oracle's.
Status MeasureHits(BenchSession* session, const Trace& trace, size_t which,
                   BenchRow* row) {
  const int64_t capacity =
      kCapacities[which] == 0 ? DistinctHashIds(trace) : kCapacities[which];
  VARLANE_TOOLS_ASSIGN(const PrefixHits hits,
                       MeasurePrefixHits(trace, capacity, session->runtime()));
  row->value = std::round(hits.rate() * 1e4) / 100;
  row->detail = fmt::format("{} of {} blocks", hits.hit_blocks, hits.blocks);
  const Oracle* const oracle = OracleOf(session->options().trace);
  if (oracle == nullptr) return {};
  row->limit = oracle->percent[which];
  row->ratio = *row->value / *row->limit;
  row->detail += "; limit: the published rate, to be met exactly";
  row->holds = *row->value == *row->limit;
  return {};
}

std::string NameOf(int64_t capacity) {
  return capacity == 0 ? "unlimited" : fmt::format("{}", capacity);
}

void AddHitRows(BenchSession* session, const std::string& path) {
  const Result<Trace> trace = ReadTrace(path, 0);
  for (size_t which = 0; which < kCapacities.size(); ++which) {
    BenchRow row;
    row.name =
        fmt::format("prefix hits of {} blocks", NameOf(kCapacities[which]));
    row.unit = "% of blocks";
    session->Add(std::move(row), [&, which](BenchRow* out) -> Status {
      if (!trace.ok()) return trace.status();
      return MeasureHits(session, *trace, which, out);
    });
  }
}

}  // namespace

void AddPrefixRows(BenchSession* session) {
  const struct {
    const char* name;
    PrefixOperation operation;
    bool has_limit;
    const char* detail;
  } rows[] = {{"prefix lookup", &CachedPrompts::Look, true,
               "limit: comparing the tokens alone"},
              {"prefix match and free", &CachedPrompts::Share, true,
               "limit: comparing the tokens alone"},
              {"commit of computed tokens", &CachedPrompts::Commit, false,
               "the block evicted for it not included"}};
  for (const auto& it : rows) {
    BenchRow row;
    row.name = it.name;
    row.unit = "ns/block";
    row.detail = it.detail;
    session->Add(std::move(row), [=](BenchRow* out) {
      return MeasureOperation(session, it.operation, it.has_limit, out);
    });
  }
  if (!session->options().trace.empty()) {
    AddHitRows(session, session->options().trace);
  }
}

}  // namespace varlane::tools
