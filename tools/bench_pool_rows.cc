// Rows on the pool's bookkeeping: blocks taken and given back by one thread and
// by several at once, and forks.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tools/bench_session.h"
#include "tools/clock.h"
#include "tools/status_util.h"
#include "varlane/kv_pool.h"

namespace varlane::tools {
namespace {

constexpr int64_t kForkedBlocks = 4096;
// Eight threads on two cores take turns of some milliseconds: all of them must
// get several in one go, or they would never meet. Less only where there is no
// time for anything.
int64_t BlocksPerGo(const BenchSession& session) {
  return static_cast<int64_t>(
      std::clamp(session.options().seconds * 5e6, 2e4, 1e6));
}

// --- taking and giving back --------------------------------------------------

// `count` times: a sequence gets `blocks` blocks and gives them back.
Status TakeAndGive(KvPool* pool, SeqId seq, int64_t blocks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    VARLANE_TOOLS_ASSIGN(const Admission admission,
                         pool->Append(seq, blocks * kSmallBlockTokens));
    if (!admission.admitted()) {
      return Fail(StatusCode::kInternal, "{} blocks were refused", blocks);
    }
    VARLANE_TOOLS_TRY(pool->Truncate(seq, 0));
  }
  return {};
}

// Seconds until `threads` threads, each with a sequence of its own, have taken
// and given back `total` blocks together.
Result<double> TakeAndGiveTogether(KvPool* pool, int threads, int64_t blocks,
                                   int64_t total) {
  const int64_t count = total / blocks / threads;
  std::vector<SeqId> seqs(static_cast<size_t>(threads));
  std::vector<Status> results(seqs.size());
  std::vector<std::thread> others;
  std::atomic<int> waiting{threads};
  for (size_t t = 0; t < seqs.size(); ++t) {
    seqs[t] = pool->CreateSequence();
    others.emplace_back([&, t] {
      waiting.fetch_sub(1);
      while (waiting.load() > 0) std::this_thread::yield();
      results[t] = TakeAndGive(pool, seqs[t], blocks, count);
    });
  }
  while (waiting.load() > 0) std::this_thread::yield();
  const Clock::time_point start = Clock::now();
  for (std::thread& other : others) other.join();
  const double seconds = SecondsSince(start);
  for (size_t t = 0; t < seqs.size(); ++t) {
    VARLANE_TOOLS_TRY(results[t]);
    VARLANE_TOOLS_TRY(pool->Free(seqs[t]));
  }
  return seconds;
}

// Nanoseconds a block, of all threads together; the limit is one thread alone,
// and the ratio how many times as much they do.
Status MeasureTaking(BenchSession* session, int threads, int64_t blocks,
                     BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(
      const std::unique_ptr<KvPool> pool,
      MakeSmallPool(session->runtime(), 4 * threads * blocks + 4096));
  const int64_t total = BlocksPerGo(*session);
  const auto sampler = [&](int count) {
    return Sampler{[&pool, count, blocks, total] {
                     return TakeAndGiveTogether(pool.get(), count, blocks,
                                                total);
                   },
                   false};
  };
  std::vector<Sampler> samplers = {sampler(threads)};
  if (threads > 1) samplers.push_back(sampler(1));
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> nanos;
  std::vector<double> ratios;
  for (size_t i = 0; i < samples.of[0].size(); ++i) {
    nanos.push_back(samples.of[0][i] / double(total) * 1e9);
    if (threads > 1) ratios.push_back(samples.of[1][i] / samples.of[0][i]);
  }
  SetValues(nanos, samples.disturbed, row);
  if (threads == 1) return {};
  row->limit = Median(samples.of[1]) / double(total) * 1e9;
  // Threads beyond the cores take each other's: every round is disturbed.
  SetRatios(ratios, 0, row);
  return pool->CheckInvariants();
}

// --- forks -------------------------------------------------------------------

Result<double> ForkOnce(KvPool* pool, SeqId seq) {
  const Clock::time_point start = Clock::now();
  VARLANE_TOOLS_ASSIGN(const SeqId fork, pool->Fork(seq));
  const double seconds = SecondsSince(start);
  VARLANE_TOOLS_TRY(pool->Free(fork));
  return seconds;
}

// As many counters, one atomic addition each, and a copy of the table.
double CountOnce(std::vector<std::atomic<uint32_t>>* counters,
                 const std::vector<int32_t>& table) {
  const Clock::time_point start = Clock::now();
  // The copy is what is measured.
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const std::vector<int32_t> copy = table;
  for (const int32_t block : copy) {
    (*counters)[static_cast<size_t>(block)].fetch_add(
        1, std::memory_order_relaxed);
  }
  return SecondsSince(start);
}

Status MeasureFork(BenchSession* session, double unit_seconds, BenchRow* row) {
  VARLANE_TOOLS_ASSIGN(const std::unique_ptr<KvPool> pool,
                       MakeSmallPool(session->runtime(), kForkedBlocks));
  const SeqId seq = pool->CreateSequence();
  VARLANE_TOOLS_ASSIGN(const Admission admission,
                       pool->Append(seq, kForkedBlocks * kSmallBlockTokens));
  if (!admission.admitted()) {
    return Fail(StatusCode::kInternal, "the sequence was refused");
  }
  std::vector<int32_t> table(kForkedBlocks);
  VARLANE_TOOLS_TRY(pool->CopyBlockTable(seq, table).status());
  std::vector<std::atomic<uint32_t>> counters(kForkedBlocks);
  const std::vector<Sampler> samplers = {
      {[&] { return ForkOnce(pool.get(), seq); }},
      {[&]() -> Result<double> { return CountOnce(&counters, table); }}};
  VARLANE_TOOLS_ASSIGN(const Samples samples,
                       Interleave(samplers, session->budget()));
  std::vector<double> values;
  std::vector<double> ratios;
  for (size_t i = 0; i < samples.of[0].size(); ++i) {
    values.push_back(samples.of[0][i] / unit_seconds);
    ratios.push_back(samples.of[1][i] / samples.of[0][i]);
  }
  SetValues(values, samples.disturbed, row);
  row->limit = Median(samples.of[1]) / unit_seconds;
  SetRatios(ratios, samples.disturbed, row);
  if (pool->stats().references == kForkedBlocks) return {};
  return Fail(StatusCode::kInternal, "forks have left references");
}

}  // namespace

void AddPoolRows(BenchSession* session) {
  for (const int64_t blocks : {1, 64}) {
    for (const int threads : {1, 2, 4, 8}) {
      BenchRow row;
      row.name = fmt::format("take and give back {} block{}, {} thread{}",
                             blocks, blocks == 1 ? "" : "s at once", threads,
                             threads == 1 ? "" : "s");
      row.unit = "ns/block";
      if (threads > 1) {
        row.detail = "limit: one thread";
        row.must = 1;  // together no less than one alone: no convoy
      }
      session->Add(std::move(row), [=](BenchRow* out) {
        return MeasureTaking(session, threads, blocks, out);
      });
    }
  }
  BenchRow fork;
  fork.name = "fork of 4096 blocks";
  fork.unit = "us";
  fork.detail = "limit: a copy of the table, one atomic addition a block";
  session->Add(fork,
               [=](BenchRow* out) { return MeasureFork(session, 1e-6, out); });
  fork.name = "fork of 4096 blocks, a block";
  fork.unit = "ns/block";
  session->Add(fork, [=](BenchRow* out) {
    return MeasureFork(session, 1e-9 * double(kForkedBlocks), out);
  });
}

}  // namespace varlane::tools
