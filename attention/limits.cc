// The limits over a runtime's workers: include/varlane/limits.h.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/limits.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "attention/kernels_of.h"
#include "attention/kv_blocks.h"
#include "attention/shards.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/math.h"
#include "kernels/kernel_table.h"

namespace varlane {
namespace {

Result<const LimitKernels*> FindLimits(const Runtime* runtime) {
  VARLANE_REQUIRE_ARG(runtime != nullptr, "runtime is null");
  const Result<const KernelTable*> table = KernelsOf(*runtime);
  if (!table.ok()) return table.status();
  return (*table)->limits;
}

// One way to read.
struct Loop {
  int streams;
  int prefetch;     // into L1 or L2; 0 = none
  bool shared_out;  // small threadgroups as workers come; else equal shares
  bool by_block;    // whole blocks; else one KV head after the other
};

std::vector<Loop> AllLoops() {
  std::vector<Loop> loops;
  for (const bool by_block : {false, true}) {
    for (const bool shared_out : {false, true}) {
      for (const int streams : {1, 2, 4, 8}) {
        for (const int prefetch : {0, 1, 2}) {
          loops.push_back({streams, prefetch, shared_out, by_block});
        }
      }
    }
  }
  return loops;
}

// Bytes of a threadgroup that is shared out: some ten microseconds.
constexpr int64_t kSharedBytes = int64_t{256} << 10;

// The read order of one layer's K/V, as chunks of one size.
class ChunkLists {
 public:
  ChunkLists(const KvView& kv, int layer)
      : kv_(kv),
        layer_(layer),
        chunk_bytes_(
            std::gcd(kv.layout.k_head_bytes(), kv.layout.v_head_bytes())) {}

  // The blocks of one sequence.
  void Add(std::span<const int32_t> blocks) {
    for (int head = 0; head < kv_.layout.num_kv_heads; ++head) {
      for (const int32_t block : blocks) {
        AddRange(kv_.k(block, layer_, head), kv_.layout.k_head_bytes(),
                 &by_head_);
        AddRange(kv_.v(block, layer_, head), kv_.layout.v_head_bytes(),
                 &by_head_);
      }
    }
    for (const int32_t block : blocks) {
      for (int shard = 0; shard < kv_.num_shards; ++shard) {
        AddRange(kv_.k(block, layer_, shard * kv_.shard_heads()),
                 kv_.layout.layer_bytes() / kv_.num_shards, &by_block_);
      }
    }
  }

  int64_t chunk_bytes() const { return chunk_bytes_; }
  const std::vector<const std::byte*>& Get(bool by_block) const {
    return by_block ? by_block_ : by_head_;
  }

 private:
  void AddRange(const std::byte* from, int64_t bytes,
                std::vector<const std::byte*>* to) const {
    for (int64_t at = 0; at < bytes; at += chunk_bytes_) {
      to->push_back(from + at);
    }
  }

  KvView kv_;
  int layer_;
  int64_t chunk_bytes_;
  std::vector<const std::byte*> by_head_;
  std::vector<const std::byte*> by_block_;
};

Status Validate(const KvView& kv, int layer, const Batch& batch) {
  VARLANE_RETURN_IF_ERROR(kv.layout.Validate());
  VARLANE_RETURN_IF_ERROR(ValidateShards(kv));
  VARLANE_REQUIRE_ARG(kv.base != nullptr, "the KV view's base is null");
  VARLANE_REQUIRE_ARG(layer >= 0 && layer < kv.layout.num_layers,
                      "layer = ", layer, ", but the layout has ",
                      kv.layout.num_layers, " layers");
  for (int64_t i = 0; i < batch.num_seqs(); ++i) {
    const int64_t length = batch.seq_lens[static_cast<size_t>(i)];
    VARLANE_REQUIRE_ARG(length >= 0, "seq_lens[", i, "] = ", length,
                        ", must not be negative");
    const int64_t blocks = DivCeil<int64_t>(length, kv.layout.block_size);
    VARLANE_REQUIRE_ARG(
        blocks <= batch.block_table_stride, "seq_lens[", i, "] = ", length,
        " needs ", blocks,
        " blocks, but block_table_stride = ", batch.block_table_stride);
    for (int64_t j = 0; j < blocks; ++j) {
      const int64_t at = i * batch.block_table_stride + j;
      VARLANE_REQUIRE_ARG(std::cmp_less(at, batch.block_tables.size()),
                          "block_tables has ", batch.block_tables.size(),
                          " entries, but block_tables[", i, "][", j,
                          "] is needed");
      const int32_t block = batch.block_tables[static_cast<size_t>(at)];
      VARLANE_REQUIRE_ARG(kv.contains(block), "block_tables[", i, "][", j,
                          "] = ", block, ", but ",
                          WhereBlocksEnd(kv, block, "pool"));
    }
  }
  return {};
}

}  // namespace

// --- ReadProbe ---------------------------------------------------------------

class ReadProbe::Impl {
 public:
  Impl(Runtime* runtime, const LimitKernels* kernels, const KvView& kv,
       int layer, const Batch& batch)
      : runtime_(runtime),
        kernels_(kernels),
        lists_(kv, layer),
        loops_(AllLoops()) {
    for (int64_t i = 0; i < batch.num_seqs(); ++i) {
      const int64_t length = batch.seq_lens[static_cast<size_t>(i)];
      lists_.Add(batch.block_tables.subspan(
          static_cast<size_t>(i * batch.block_table_stride),
          static_cast<size_t>(DivCeil<int64_t>(length, kv.layout.block_size))));
    }
  }

  // Of all chunks in either order.
  int64_t bytes(bool by_block) const {
    return static_cast<int64_t>(lists_.Get(by_block).size()) *
           lists_.chunk_bytes();
  }
  const std::vector<Loop>& loops() const { return loops_; }

  Result<double> Run(const Loop& loop) {
    const std::vector<const std::byte*>& chunks = lists_.Get(loop.by_block);
    const auto count = static_cast<int64_t>(chunks.size());
    const int64_t share =
        loop.shared_out
            ? std::max<int64_t>(1, kSharedBytes / lists_.chunk_bytes())
            : std::max<int64_t>(
                  1, DivCeil<int64_t>(count, runtime_->num_workers()));
    const auto body = [&](const Threadgroup& tg) {
      const int64_t begin = tg.index() * share;
      ReadArgs args;
      args.chunks = chunks.data() + begin;
      args.num_chunks = std::min(share, count - begin);
      args.chunk_bytes = lists_.chunk_bytes();
      args.streams = loop.streams;
      args.prefetch = loop.prefetch;
      sink_.fetch_xor(kernels_->read(args), std::memory_order_relaxed);
    };
    const Clock::time_point start = Clock::now();
    VARLANE_RETURN_IF_ERROR(
        runtime_->Launch(Grid{DivCeil<int64_t>(count, share)}, body));
    return SecondsSince(start);
  }

 private:
  Runtime* runtime_;
  const LimitKernels* kernels_;
  ChunkLists lists_;
  std::vector<Loop> loops_;
  std::atomic<uint32_t> sink_{0};  // keeps the reads alive
};

ReadProbe::ReadProbe(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ReadProbe::~ReadProbe() = default;

Result<std::unique_ptr<ReadProbe>> ReadProbe::Create(Runtime* runtime,
                                                     const KvView& kv,
                                                     int layer,
                                                     const Batch& batch) {
  const Result<const LimitKernels*> kernels = FindLimits(runtime);
  if (!kernels.ok()) return kernels.status();
  VARLANE_RETURN_IF_ERROR(Validate(kv, layer, batch));
  try {
    auto impl = std::make_unique<Impl>(runtime, *kernels, kv, layer, batch);
    VARLANE_ENSURE(impl->bytes(true) == impl->bytes(false), "by block ",
                   impl->bytes(true), " bytes are read, by head ",
                   impl->bytes(false));
    return std::unique_ptr<ReadProbe>(new ReadProbe(std::move(impl)));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "no memory for ReadProbe");
  }
}

int64_t ReadProbe::bytes() const noexcept { return impl_->bytes(false); }
int ReadProbe::num_loops() const noexcept {
  return static_cast<int>(impl_->loops().size());
}

std::string ReadProbe::LoopName(int loop) const {
  if (loop < 0 || loop >= num_loops()) return "?";
  const Loop& l = impl_->loops()[static_cast<size_t>(loop)];
  return StrCat(l.streams, l.streams == 1 ? " stream" : " streams",
                l.prefetch == 0 ? "" : StrCat(", prefetch to L", l.prefetch),
                l.shared_out ? ", shared out" : ", equal shares",
                l.by_block ? ", by block" : ", by head");
}

Result<double> ReadProbe::Run(int loop) {
  VARLANE_REQUIRE(loop >= 0 && loop < num_loops(), StatusCode::kOutOfRange,
                  "loop = ", loop, ", but there are ", num_loops());
  return impl_->Run(impl_->loops()[static_cast<size_t>(loop)]);
}

// --- multiply peak -----------------------------------------------------------

namespace {

// The rate of multiply(steps, sink), which returns flops.
template <class Multiply>
Result<double> MeasureRate(Runtime* runtime, double seconds,
                           const Multiply& multiply) {
  VARLANE_REQUIRE_ARG(seconds > 0 && seconds <= 60, "seconds = ", seconds,
                      ", must be in (0, 60]");
  // Small threadgroups until the time is up: no worker idles at the end.
  constexpr int64_t kSteps = 20000;
  float warm = 0;
  const Clock::time_point before = Clock::now();
  (void)multiply(kSteps, &warm);
  const double step_seconds = std::max(SecondsSince(before), 1e-7);
  const int workers = runtime->num_workers();
  const auto groups = static_cast<int64_t>(
      std::clamp(seconds / step_seconds * workers, double(workers), 1e7));
  std::atomic<int64_t> flops{0};
  std::atomic<float> sink{warm};
  const auto body = [&](const Threadgroup&) {
    float sum = 0;
    flops.fetch_add(multiply(kSteps, &sum), std::memory_order_relaxed);
    sink.store(sum, std::memory_order_relaxed);
  };
  const Clock::time_point start = Clock::now();
  VARLANE_RETURN_IF_ERROR(runtime->Launch(Grid{groups}, body));
  return static_cast<double>(flops.load()) / SecondsSince(start);
}

auto FedOf(const LimitKernels& kernels, DType dtype, int64_t weigh_steps) {
  const auto fed = dtype == DType::kBF16 ? kernels.fed_bf16 : kernels.fed_f32;
  return
      [=](int64_t steps, float* sink) { return fed(steps, weigh_steps, sink); };
}

}  // namespace

Result<double> MeasureMultiplyPeak(Runtime* runtime, DType dtype,
                                   double seconds, Operands operands) {
  const Result<const LimitKernels*> kernels = FindLimits(runtime);
  if (!kernels.ok()) return kernels.status();
  if (operands == Operands::kL1) {
    return MeasureRate(runtime, seconds, FedOf(**kernels, dtype, 0));
  }
  return MeasureRate(runtime, seconds,
                     dtype == DType::kBF16 ? (*kernels)->multiply_bf16
                                           : (*kernels)->multiply_f32);
}

Result<double> MeasureAttentionPeak(Runtime* runtime, DType dtype,
                                    int head_size, double seconds) {
  const Result<const LimitKernels*> kernels = FindLimits(runtime);
  if (!kernels.ok()) return kernels.status();
  VARLANE_REQUIRE_ARG(head_size >= kMinHeadSize && head_size <= kMaxHeadSize &&
                          head_size % 8 == 0,
                      "head_size = ", head_size,
                      ", must be a multiple of 8 in [", kMinHeadSize, ", ",
                      kMaxHeadSize, "]");
  const int pack = dtype == DType::kBF16 ? (*kernels)->bf16_pack : 1;
  return MeasureRate(runtime, seconds,
                     FedOf(**kernels, dtype, 2 * head_size / pack));
}

double LimitSeconds(const LaunchReport& report,
                    const MachineRates& rates) noexcept {
  const auto time = [](int64_t amount, double rate) {
    return rate > 0 ? static_cast<double>(amount) / rate : 0;
  };
  return std::max(time(report.kv_bytes, rates.bytes_per_second),
                  time(report.flops, rates.flops_per_second));
}

}  // namespace varlane
