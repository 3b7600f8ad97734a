// Fuzzes the session reader. Checksums would turn nearly every mutation away at
// the door, so the first byte says which of them are made right again: bit 0
// the header's, bit 1 the index's and the blocks'. The rest is the file.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/session.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/xxhash64.h"
#include "memory/session_header.h"
#include "tests/fuzz/fuzz_file.h"
#include "varlane/runtime.h"

namespace {

using varlane::fuzzing::FuzzFile;
using varlane::fuzzing::Require;

struct Service {
  std::unique_ptr<varlane::Runtime> runtime;
  std::unique_ptr<varlane::KvPool> pool;
};

const Service& TheService() {
  static const Service service = [] {
    varlane::RuntimeOptions options;
    options.num_threads = 1;
    options.pin = false;
    Service made;
    auto runtime = varlane::Runtime::Create(options);
    Require(runtime.ok());
    made.runtime = std::move(runtime).value();
    varlane::KvPoolOptions pool_options;
    pool_options.layout = {.dtype = varlane::DType::kF32,
                           .num_layers = 1,
                           .num_kv_heads = 1,
                           .head_size = 8,
                           .v_head_size = 16,
                           .block_size = 16};
    pool_options.num_blocks = 8;
    pool_options.huge_pages = varlane::HugePages::kOff;
    auto pool = varlane::KvPool::Create(pool_options, made.runtime.get());
    Require(pool.ok());
    made.pool = std::move(pool).value();
    return made;
  }();
  return service;
}

void RepairHeader(std::span<std::byte> file) {
  constexpr auto kAt = size_t(varlane::kSessionHeaderChecksumAt);
  if (file.size() < size_t(varlane::kSessionHeaderBytes)) return;
  varlane::StoreU64(varlane::XxHash64(file.first(kAt)), &file[kAt]);
}

void RepairContents(std::span<std::byte> file) {
  varlane::SessionHeaderBytes bytes;
  if (file.size() < bytes.size()) return;
  std::copy_n(file.begin(), bytes.size(), bytes.begin());
  const auto header = varlane::DecodeSessionHeader(bytes, int64_t(file.size()));
  if (!header.ok()) return;
  const auto index = file.subspan(bytes.size(), size_t(header->index_bytes()));
  const auto block_bytes = size_t(header->layout.block_bytes());
  for (size_t i = 0; i < size_t(header->num_blocks()); ++i) {
    const auto block = file.subspan(
        size_t(header->data_begin()) + i * block_bytes, block_bytes);
    varlane::StoreU64(varlane::XxHash64(block),
                      &index[size_t(header->num_tokens) * 4 + i * 8]);
  }
  const auto covered = index.first(index.size() - 8);
  varlane::StoreU64(varlane::XxHash64(covered), &index[covered.size()]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  std::vector<uint8_t> contents(data + 1, data + size);
  const auto bytes = std::as_writable_bytes(std::span(contents));
  if ((data[0] & 1) != 0) RepairHeader(bytes);
  if ((data[0] & 2) != 0) RepairContents(bytes);
  const FuzzFile file(contents);
  varlane::KvPool* const pool = TheService().pool.get();
  (void)varlane::ReadSessionInfo(file.path());
  const auto loaded = varlane::LoadSession(pool, file.path());
  if (loaded.ok()) {
    const auto length = pool->Length(loaded->sequence);
    Require(length.ok() && *length == loaded->length);
    Require(loaded->tokens.empty() ||
            int64_t(loaded->tokens.size()) == loaded->length);
    Require(pool->Free(loaded->sequence).ok());
  } else {
    Require(!loaded.status().message().empty());
  }
  Require(pool->free_blocks() == pool->capacity_blocks());
  Require(pool->CheckInvariants().ok());
  return 0;
}
