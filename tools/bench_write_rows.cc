// Rows on writing a step's K and V to the cache, beside plain copies of as many
// bytes to the same blocks.
//
// SPDX-License-Identifier: Apache-2.0

#include <cstring>
#include <vector>

#include "tools/bench_session.h"
#include "tools/clock.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::Heads;
using bench::KvFixture;

// A prompt's K and V, which stand in a cache, and cold blocks for them: each go
// has the next ones, in the order of the fixture.
class KvWrites {
 public:
  KvWrites(BenchSession* session, const KvFixture* fixture, int num_tokens)
      : session_(session),
        fixture_(fixture),
        num_tokens_(num_tokens),
        rows_(static_cast<size_t>(num_tokens) * Heads{}.kv * Heads{}.size) {
    for (const int32_t block : fixture->blocks()) {
      for (int i = 0; i < bench::kBlockTokens; ++i) {
        slots_.push_back(int64_t{block} * bench::kBlockTokens + i);
      }
    }
  }

  int64_t bytes() const {
    return 2 * static_cast<int64_t>(rows_.size() * sizeof(BF16));
  }

  Result<double> Write() {
    const ConstTensor rows = {rows_.data(), DType::kBF16};
    const std::span<const int64_t> slots = std::span(slots_).subspan(
        NextToken(), static_cast<size_t>(num_tokens_));
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(
        session_->attention()->WriteKv(fixture_->view(), 0, rows, rows, slots));
    return SecondsSince(start);
  }

  Result<double> Copy() {
    const KvView kv = fixture_->view();
    const auto block_bytes = static_cast<size_t>(kv.layout.block_bytes());
    const int32_t* blocks =
        fixture_->blocks().data() + NextToken() / bench::kBlockTokens;
    const auto* from = reinterpret_cast<const std::byte*>(rows_.data());
    const size_t row_bytes = rows_.size() * sizeof(BF16);
    const Clock::time_point start = Clock::now();
    VARLANE_TOOLS_TRY(session_->runtime()->Launch(
        Grid{num_tokens_ / bench::kBlockTokens}, [&](const Threadgroup& tg) {
          const auto i = static_cast<size_t>(tg.index());
          std::memcpy(kv.base + blocks[i] * kv.layout.block_bytes(),
                      from + i * block_bytes % row_bytes, block_bytes);
        }));
    return SecondsSince(start);
  }

 private:
  size_t NextToken() {
    const size_t first = next_;
    const auto step = static_cast<size_t>(num_tokens_);
    next_ += step;
    if (next_ + step > slots_.size()) next_ = 0;
    return first;
  }

  BenchSession* session_;
  const KvFixture* fixture_;
  int num_tokens_;
  HugePageVector<BF16> rows_;  // K's and V's [num_tokens, Hkv, D]
  std::vector<int64_t> slots_;
  size_t next_ = 0;
};

Status MeasureWrite(BenchSession* session, int num_tokens, BenchRow* row) {
  const int64_t bytes = num_tokens / bench::kBlockTokens *
                        bench::KvBlockBytes(Heads{}, DType::kBF16);
  const int64_t num_blocks =
      int64_t{num_tokens} / bench::kBlockTokens * ColdCopies(bytes);
  VARLANE_TOOLS_ASSIGN(const KvFixture* const fixture,
                       session->Fixture(DType::kBF16, Heads{}, num_blocks));
  KvWrites writes(session, fixture, num_tokens);
  const std::vector<Sampler> samplers = {{[&] { return writes.Write(); }},
                                         {[&] { return writes.Copy(); }}};
  VARLANE_TOOLS_ASSIGN(const auto samples,
                       Interleave(samplers, session->budget()));
  row->detail = fmt::format(
      "limit: copies to the same blocks; {:.1f} GB/s",
      static_cast<double>(writes.bytes()) / Median(samples.of[0]) * 1e-9);
  SetPair(samples, true, row);
  return {};
}

}  // namespace

void AddWriteRows(BenchSession* session) {
  for (const int num_tokens : {512, 4096}) {
    BenchRow row;
    row.name =
        fmt::format("write of {} tokens bf16 {}", num_tokens, Heads{}.Name());
    row.unit = "us";
    session->Add(std::move(row), [=](BenchRow* to) {
      return MeasureWrite(session, num_tokens, to);
    });
  }
}

}  // namespace varlane::tools
