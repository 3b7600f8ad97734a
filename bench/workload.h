// Workload: a named batch over a paged pool, ready to be launched and read.
//
// What the Google Benchmarks here and `varlane bench kernels` both measure.
// Public API only.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BENCH_WORKLOAD_H_
#define VARLANE_BENCH_WORKLOAD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "varlane/attention.h"
#include "varlane/huge_page_allocator.h"
#include "varlane/kv_pool.h"
#include "varlane/limits.h"
#include "varlane/runtime.h"

namespace varlane::bench {

inline constexpr int kBlockTokens = 16;

// Of a pool, and the tokens of one of its blocks.
struct Heads {
  int q = 16;
  int kv = 4;
  int size = 128;
  int block_size = kBlockTokens;

  std::string Name() const;  // "16/4/128", "16/4/128, blocks of 64"

  friend bool operator==(const Heads&, const Heads&) = default;
};

// `count` sequences of q_len query tokens at a context of `context` tokens.
struct Group {
  int count = 1;
  int q_len = 1;
  int context = 1;
};

struct Shape {
  std::string name;  // "decode 64x1@2048"
  std::vector<Group> groups;
  SequenceMask mask = {};
  double softcap = 0;
  bool alibi = false;  // with the usual slopes

  int64_t num_blocks(int block_size = kBlockTokens) const;
  int64_t total_q() const;
};

// A pool of one layer full of numbers, whose blocks are handed out in a random
// order.
class KvFixture {
 public:
  // Errors: those of KvPool::Create.
  static Result<std::unique_ptr<KvFixture>> Create(Runtime* runtime,
                                                   DType dtype,
                                                   const Heads& heads,
                                                   int64_t num_blocks);

  const Heads& heads() const { return heads_; }
  DType dtype() const { return pool_->layout().dtype; }
  KvView view() const { return pool_->view(); }
  // [num_blocks], a permutation.
  const std::vector<int32_t>& blocks() const { return blocks_; }

 private:
  KvFixture() = default;
  Status Fill(Runtime* runtime);

  Heads heads_;
  std::unique_ptr<KvPool> pool_;
  std::vector<int32_t> blocks_;
};

struct WorkloadOptions {
  int copies = 1;
  std::optional<DType> out_dtype = {};  // else the fixture's
  int64_t first_block = 0;              // into KvFixture::blocks()
  // > 0: the tables name only so many blocks, over and over, so that K/V is in
  // the nearest caches from the second run on: what a launch costs but reading.
  int64_t distinct_blocks = 0;
  PlanOptions plan = {};
};

// A shape on a fixture, as several copies over different blocks that runs and
// reads take in turn: with enough of them every run finds its pages cold.
class Workload {
 public:
  // Lifetime: `attention` and `fixture` outlive it.
  // Errors: kOutOfRange when the fixture has too few blocks; those of Plan.
  static Result<std::unique_ptr<Workload>> Create(
      Attention* attention, const KvFixture* fixture, const Shape& shape,
      const WorkloadOptions& options = {});

  // Wall seconds of one launch of the next copy.
  Result<double> Run();
  // Plain reads of the next copy's pages; probes are made on first use.
  Result<double> Read(Runtime* runtime, int loop);
  Result<ReadProbe*> Probe(Runtime* runtime);  // of copy 0

  const Shape& shape() const { return shape_; }
  const KvFixture& fixture() const { return *fixture_; }
  std::span<const int32_t> BlockTable(int64_t seq) const;  // of copy 0
  const LaunchReport& report() const { return report_; }   // of the last Run
  // [total_q, Hq, D]
  std::span<const std::byte> out() const { return out_; }
  const HugePageVector<BF16>& q() const { return q_; }
  int64_t kv_bytes() const { return report_.kv_bytes; }

 private:
  Workload() = default;
  Batch BatchOf(size_t copy) const;
  size_t NextCopy();

  Attention* attention_ = nullptr;
  const KvFixture* fixture_ = nullptr;
  Shape shape_;
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<int32_t> seq_lens_;
  int64_t stride_ = 0;
  std::vector<std::vector<int32_t>> tables_;  // [copies]
  std::vector<AttentionPlan> plans_;          // [copies]
  std::vector<std::unique_ptr<ReadProbe>> probes_;
  size_t next_ = 0;
  HugePageVector<BF16> q_;     // [total_q, Hq, D]
  std::vector<float> slopes_;  // [Hq], or empty
  DType out_dtype_ = DType::kF32;
  HugePageVector<std::byte> out_;
  LaunchReport report_;
};

// Bytes of K/V the shape has, whole blocks.
int64_t KvBytes(const Shape& shape, const Heads& heads, DType dtype);
int64_t KvBlockBytes(const Heads& heads, DType dtype);

}  // namespace varlane::bench

#endif  // VARLANE_BENCH_WORKLOAD_H_
