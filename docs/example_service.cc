// A complete small service: two requests through one pool, chunk by chunk.
//
// Build it against the installed package (tests/consumer/project shows the
// CMakeLists.txt). A real service has a model: its projections give Q, K and V,
// and its sampling the next token. Here both are made up, so that the program
// can check what Varlane promises; it exits 0 only if every check holds.
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <varlane/attention.h>
#include <varlane/kv_pool.h>
#include <varlane/runtime.h>
#include <varlane/scheduler.h>

namespace {

using varlane::Result;
using varlane::Status;

constexpr int kLayers = 2;
constexpr int kQueryHeads = 8;
constexpr int kKvHeads = 2;
constexpr int kHeadSize = 64;

// Stands for the model: one number in [-1, 1) for each element of Q, K and V,
// a function of whose token it is and where, as a model's would be.
float ModelValue(char tensor, int64_t request, int64_t position, int layer,
                 int element) {
  uint64_t x = static_cast<uint64_t>(tensor) * 0x9e3779b97f4a7c15u;
  for (int64_t part : {request, position, int64_t{layer}, int64_t{element}}) {
    x = (x ^ static_cast<uint64_t>(part)) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
  }
  return static_cast<float>(x >> 40) * 0x1p-23f - 1.0f;
}

// The attention output of one token, all layers: what chunking must not change.
using Row = std::vector<float>;
// (request, position) -> its row.
using Rows = std::map<std::pair<int64_t, int64_t>, Row>;

class Service {
 public:
  static Result<std::unique_ptr<Service>> Create() {
    auto service = std::make_unique<Service>();
    auto options = varlane::RuntimeOptions::FromEnvironment();
    if (!options.ok()) return options.status();
    auto runtime = varlane::Runtime::Create(*options);
    if (!runtime.ok()) return runtime.status();
    service->runtime_ = *std::move(runtime);

    varlane::KvPoolOptions pool_options;
    pool_options.layout = {.dtype = varlane::DType::kBF16,
                           .num_layers = kLayers,
                           .num_kv_heads = kKvHeads,
                           .head_size = kHeadSize,
                           .v_head_size = kHeadSize,
                           .block_size = 16};
    pool_options.num_blocks = 64;
    auto pool = varlane::KvPool::Create(pool_options, service->runtime_.get());
    if (!pool.ok()) return pool.status();
    service->pool_ = *std::move(pool);

    auto attention = varlane::Attention::Create(service->runtime_.get());
    if (!attention.ok()) return attention.status();
    service->attention_ = *std::move(attention);

    std::printf("runtime  %d workers, kernels %s\n",
                service->runtime_->num_workers(),
                service->attention_->simd_target());
    std::printf("pool     %lld blocks of %d tokens\n",
                static_cast<long long>(service->pool_->capacity_blocks()),
                pool_options.layout.block_size);
    return service;
  }

  varlane::KvPool& pool() { return *pool_; }

  // Runs one step through every layer: writes its K/V to the cache, then one
  // attention launch a layer, whatever mix of prefill and decode it is.
  Status Compute(const varlane::Step& step, Rows* rows) {
    const varlane::AttentionShape shape{.num_q_heads = kQueryHeads};
    const varlane::KvView kv = pool_->view();
    // Planned and validated once a step, run once a layer.
    Status status = attention_->Plan(step.batch(), shape, kv, {}, &plan_);
    if (!status.ok()) return status;

    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> q = Project('q', step, layer, kQueryHeads);
      std::vector<float> k = Project('k', step, layer, kKvHeads);
      std::vector<float> v = Project('v', step, layer, kKvHeads);
      std::vector<float> out(q.size());
      status = attention_->WriteKv(kv, layer, {.data = k.data()},
                                   {.data = v.data()}, step.slot_mapping);
      if (!status.ok()) return status;
      status = attention_->Run(
          &plan_, kv, layer,
          {.q = {.data = q.data()}, .out = {.data = out.data()}});
      if (!status.ok()) return status;
      Collect(step, out, rows);
    }
    return {};
  }

  // A step made by hand, for callers that schedule by themselves: the last
  // `count` tokens of each named sequence.
  struct Part {
    varlane::SeqId sequence;
    int64_t request;  // whose tokens, for the made-up model
    int64_t count;
  };
  Result<varlane::Step> MakeStep(const std::vector<Part>& parts) {
    varlane::Step step;
    step.block_table_stride = pool_->capacity_blocks();
    step.cu_seqlens_q.push_back(0);
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto length = pool_->Length(parts[i].sequence);
      if (!length.ok()) return length.status();
      const int64_t begin = *length - parts[i].count;
      step.entries.push_back({.request = parts[i].request,
                              .sequence = parts[i].sequence,
                              .begin = begin,
                              .count = parts[i].count});
      step.seq_lens.push_back(static_cast<int32_t>(*length));
      step.cu_seqlens_q.push_back(step.cu_seqlens_q.back() +
                                  static_cast<int32_t>(parts[i].count));
      const size_t row = i * step.block_table_stride;
      step.block_tables.resize(row + step.block_table_stride);
      const auto copied = pool_->CopyBlockTable(
          parts[i].sequence, std::span(step.block_tables).subspan(row));
      if (!copied.ok()) return copied.status();
      std::vector<int64_t> slots(parts[i].count);
      Status status = pool_->CopySlotMapping(parts[i].sequence, begin, slots);
      if (!status.ok()) return status;
      step.slot_mapping.insert(step.slot_mapping.end(), slots.begin(),
                               slots.end());
    }
    return step;
  }

 private:
  // [total_q, heads, kHeadSize] of one projection.
  static std::vector<float> Project(char tensor, const varlane::Step& step,
                                    int layer, int heads) {
    std::vector<float> values;
    for (const varlane::StepEntry& entry : step.entries) {
      for (int64_t t = entry.begin; t < entry.begin + entry.count; ++t) {
        for (int e = 0; e < heads * kHeadSize; ++e) {
          values.push_back(ModelValue(tensor, entry.request, t, layer, e));
        }
      }
    }
    return values;
  }

  static void Collect(const varlane::Step& step, const std::vector<float>& out,
                      Rows* rows) {
    auto next = out.begin();
    for (const varlane::StepEntry& entry : step.entries) {
      for (int64_t t = entry.begin; t < entry.begin + entry.count; ++t) {
        Row& row = (*rows)[{entry.request, t}];
        row.insert(row.end(), next, next + kQueryHeads * kHeadSize);
        next += kQueryHeads * kHeadSize;
      }
    }
  }

  // In this order: the pool and attention use the runtime until they end.
  std::unique_ptr<varlane::Runtime> runtime_;
  std::unique_ptr<varlane::KvPool> pool_;
  std::unique_ptr<varlane::Attention> attention_;
  varlane::AttentionPlan plan_;
};

// Continuous batching: admits two requests and steps until both have ended.
Status ServeTwoRequests(Service* service, Rows* rows) {
  auto scheduler = varlane::Scheduler::Create(
      {.token_budget = 48, .max_chunk = 32}, &service->pool());
  if (!scheduler.ok()) return scheduler.status();

  const varlane::Request requests[] = {
      {.id = 1, .prompt_tokens = 100, .max_new_tokens = 4},
      {.id = 2, .prompt_tokens = 37, .max_new_tokens = 6}};
  for (const varlane::Request& request : requests) {
    const auto answer = (*scheduler)->Submit(request);
    if (!answer.ok()) return answer.status();
    std::printf("submit   request %lld, %lld prompt tokens: %s\n",
                static_cast<long long>(request.id),
                static_cast<long long>(request.prompt_tokens),
                answer->admitted() ? "admitted" : "has to wait");
  }

  varlane::Step step;
  std::vector<varlane::RequestId> ended;
  for (int number = 1; !(*scheduler)->idle(); ++number) {
    Status status = (*scheduler)->Schedule(&step);
    if (!status.ok()) return status;
    status = service->Compute(step, rows);
    if (!status.ok()) return status;
    std::printf("step %-3d", number);
    for (const varlane::StepEntry& entry : step.entries) {
      std::printf(" request %lld %s [%lld, %lld)%s",
                  static_cast<long long>(entry.request),
                  entry.is_prefill ? "prefills" : "decodes",
                  static_cast<long long>(entry.begin),
                  static_cast<long long>(entry.begin + entry.count),
                  &entry == &step.entries.back() ? "\n" : ",");
    }
    // A service samples here, and names the requests that produced their EOS.
    ended.clear();
    status = (*scheduler)->Complete(step, {}, &ended);
    if (!status.ok()) return status;
    for (varlane::RequestId id : ended) {
      std::printf("ended    request %lld, its blocks are free again\n",
                  static_cast<long long>(id));
    }
  }
  return {};
}

bool Check(bool holds, const char* what) {
  std::printf("check    %s: %s\n", what, holds ? "yes" : "NO");
  return holds;
}

// The same pool without the scheduler: one-shot prefill, fork, decode, free.
// `chunked` holds what request 1 gave when it was prefilled in chunks.
Result<bool> UsePoolDirectly(Service* service, const Rows& chunked) {
  varlane::KvPool& pool = service->pool();
  const int64_t length = 101;  // not a multiple of 16: the tail is shared
  const varlane::SeqId parent = pool.CreateSequence();
  const auto admission = pool.Append(parent, length);
  if (!admission.ok()) return admission.status();
  if (!Check(admission->admitted(), "101 tokens fit the pool")) return false;
  auto step = service->MakeStep({{parent, 1, length}});
  if (!step.ok()) return step.status();
  Rows one_shot;
  Status status = service->Compute(*step, &one_shot);
  if (!status.ok()) return status;
  bool good = true;
  for (const auto& [token, row] : one_shot) {
    const auto found = chunked.find(token);
    good = good && found != chunked.end() && found->second == row;
  }
  good = Check(good, "chunked prefill and decode == one shot, bit for bit");

  // A fork shares every block; the first write to the shared tail copies it.
  const auto child = pool.Fork(parent);
  if (!child.ok()) return child.status();
  for (varlane::SeqId sequence : {parent, *child}) {
    const auto grown = pool.Append(sequence, 1);
    if (!grown.ok()) return grown.status();
    good = Check(grown->admitted(), "one more token fits") && good;
  }
  good =
      Check(pool.stats().cow_copies == 1, "the fork copied one block") && good;
  // Parent and child decode different tokens in one launch.
  step = service->MakeStep({{parent, 1, 1}, {*child, 3, 1}});
  if (!step.ok()) return step.status();
  Rows together;
  status = service->Compute(*step, &together);
  if (!status.ok()) return status;
  good = Check(together[{1, length}] == chunked.at({1, length}),
               "the parent does not see its fork, bit for bit") &&
         Check(together[{3, length}] != together[{1, length}],
               "the fork went its own way") &&
         good;

  for (varlane::SeqId sequence : {parent, *child}) {
    status = pool.Free(sequence);
    if (!status.ok()) return status;
  }
  return good;
}

Result<bool> Main() {
  auto service = Service::Create();
  if (!service.ok()) return service.status();
  Rows rows;
  Status status = ServeTwoRequests(service->get(), &rows);
  if (!status.ok()) return status;
  const auto good = UsePoolDirectly(service->get(), rows);
  if (!good.ok()) return good.status();
  const varlane::KvPool& pool = (*service)->pool();
  return Check(pool.free_blocks() == pool.capacity_blocks(),
               "every block is free again") &&
         *good;
}

}  // namespace

int main() {
  const Result<bool> good = Main();
  if (!good.ok()) {
    std::fprintf(stderr, "error: %s\n", good.status().ToString().c_str());
    return 1;
  }
  return *good ? 0 : 1;
}
