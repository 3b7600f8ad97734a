// SPDX-License-Identifier: Apache-2.0

#include "memory/session_header.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/check.h"
#include "base/xxhash64.h"

namespace varlane {
namespace {

constexpr std::string_view kMagic = "VARLKV\r\n";

// Where each field stands.
enum At : size_t {
  kVersionAt = 8,
  kDTypeAt = 12,
  kNumLayersAt = 16,
  kNumKvHeadsAt = 20,
  kHeadSizeAt = 24,
  kVHeadSizeAt = 28,
  kBlockSizeAt = 32,
  kPackAt = 36,
  kBlockBytesAt = 40,
  kLengthAt = 48,
  kNumTokensAt = 56,
  kFileBytesAt = 64,
  kZerosAt = 72,
  kChecksumAt = static_cast<size_t>(kSessionHeaderChecksumAt),
};

uint64_t Checksum(const SessionHeaderBytes& bytes) {
  return XxHash64(std::span(bytes).first(kChecksumAt));
}

// A number of the file as an int; what does not fit becomes the largest, which
// no check accepts.
int IntAt(const SessionHeaderBytes& bytes, size_t at) {
  return static_cast<int>(std::min<uint32_t>(LoadU32(bytes.data() + at),
                                             std::numeric_limits<int>::max()));
}
int64_t Int64At(const SessionHeaderBytes& bytes, size_t at) {
  return static_cast<int64_t>(std::min<uint64_t>(
      LoadU64(bytes.data() + at), std::numeric_limits<int64_t>::max()));
}

Result<KvLayout> DecodeLayout(const SessionHeaderBytes& bytes) {
  KvLayout layout;
  const int dtype = IntAt(bytes, kDTypeAt);
  VARLANE_REQUIRE_ARG(dtype <= 255, "dtype = ", dtype, ", expected a byte");
  layout.dtype = static_cast<DType>(dtype);
  layout.num_layers = IntAt(bytes, kNumLayersAt);
  layout.num_kv_heads = IntAt(bytes, kNumKvHeadsAt);
  layout.head_size = IntAt(bytes, kHeadSizeAt);
  layout.v_head_size = IntAt(bytes, kVHeadSizeAt);
  layout.block_size = IntAt(bytes, kBlockSizeAt);
  VARLANE_RETURN_IF_ERROR(layout.Validate());
  const int pack = IntAt(bytes, kPackAt);
  VARLANE_REQUIRE_ARG(pack == layout.pack(), "pack = ", pack, ", expected ",
                      layout.pack(), " with ", DTypeName(layout.dtype));
  const int64_t block_bytes = Int64At(bytes, kBlockBytesAt);
  VARLANE_REQUIRE_ARG(block_bytes == layout.block_bytes(),
                      "block_bytes = ", block_bytes, ", expected ",
                      layout.block_bytes());
  return layout;
}

}  // namespace

SessionHeaderBytes EncodeSessionHeader(const SessionHeader& header) {
  SessionHeaderBytes bytes = {};
  std::byte* const to = bytes.data();
  const KvLayout& layout = header.layout;
  std::memcpy(to, kMagic.data(), kMagic.size());
  StoreU32(kSessionVersion, to + kVersionAt);
  StoreU32(static_cast<uint32_t>(layout.dtype), to + kDTypeAt);
  StoreU32(static_cast<uint32_t>(layout.num_layers), to + kNumLayersAt);
  StoreU32(static_cast<uint32_t>(layout.num_kv_heads), to + kNumKvHeadsAt);
  StoreU32(static_cast<uint32_t>(layout.head_size), to + kHeadSizeAt);
  StoreU32(static_cast<uint32_t>(layout.v_head_size), to + kVHeadSizeAt);
  StoreU32(static_cast<uint32_t>(layout.block_size), to + kBlockSizeAt);
  StoreU32(static_cast<uint32_t>(layout.pack()), to + kPackAt);
  StoreU64(static_cast<uint64_t>(layout.block_bytes()), to + kBlockBytesAt);
  StoreU64(static_cast<uint64_t>(header.length), to + kLengthAt);
  StoreU64(static_cast<uint64_t>(header.num_tokens), to + kNumTokensAt);
  StoreU64(static_cast<uint64_t>(header.file_bytes()), to + kFileBytesAt);
  StoreU64(Checksum(bytes), to + kChecksumAt);
  return bytes;
}

Result<SessionHeader> DecodeSessionHeader(const SessionHeaderBytes& bytes,
                                          int64_t file_bytes) {
  VARLANE_REQUIRE_ARG(
      std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0,
      "it is no session file: it does not begin with \"VARLKV\\r\\n\"");
  // Before the checksum: another version may have another.
  const uint32_t version = LoadU32(bytes.data() + kVersionAt);
  VARLANE_REQUIRE_ARG(version == kSessionVersion, "version = ", version,
                      ", expected ", kSessionVersion);
  VARLANE_REQUIRE_ARG(LoadU64(bytes.data() + kChecksumAt) == Checksum(bytes),
                      "bytes [0, ", kSessionHeaderBytes,
                      ") are damaged: the header's checksum differs");
  const Result<KvLayout> layout = DecodeLayout(bytes);
  VARLANE_RETURN_IF_ERROR(layout.status());
  SessionHeader header;
  header.layout = *layout;
  header.length = Int64At(bytes, kLengthAt);
  header.num_tokens = Int64At(bytes, kNumTokensAt);
  // A token has bytes, so this bounds every product below by the file's size.
  VARLANE_REQUIRE_ARG(header.length <= file_bytes, "length = ", header.length,
                      " tokens, but the file has ", file_bytes, " bytes");
  VARLANE_REQUIRE_ARG(
      header.num_tokens == 0 || header.num_tokens == header.length,
      "num_tokens = ", header.num_tokens,
      ", expected 0 or length = ", header.length);
  const std::optional<int64_t> data_bytes =
      CheckedMul(header.num_blocks(), header.layout.block_bytes());
  VARLANE_REQUIRE_ARG(data_bytes && *data_bytes <= file_bytes,
                      "length = ", header.length, " needs ",
                      header.num_blocks(), " blocks of ",
                      header.layout.block_bytes(), " bytes, but the file has ",
                      file_bytes, " bytes");
  VARLANE_REQUIRE_ARG(header.file_bytes() == file_bytes &&
                          Int64At(bytes, kFileBytesAt) == file_bytes,
                      "file_bytes = ", Int64At(bytes, kFileBytesAt),
                      ", expected ", header.file_bytes(),
                      " for length = ", header.length, ", but the file has ",
                      file_bytes);
  VARLANE_REQUIRE_ARG(
      std::all_of(bytes.begin() + kZerosAt, bytes.begin() + kChecksumAt,
                  [](std::byte b) { return b == std::byte{0}; }),
      "bytes [", int{kZerosAt}, ", ", int{kChecksumAt}, ") are not zero");
  return header;
}

Status CheckSameLayout(const KvLayout& file, const KvLayout& pool) {
  VARLANE_REQUIRE_ARG(file.dtype == pool.dtype,
                      "dtype = ", DTypeName(file.dtype),
                      ", but the pool has dtype = ", DTypeName(pool.dtype));
  struct Field {
    const char* name;
    int file;
    int pool;
  };
  const Field fields[] = {
      {"num_layers", file.num_layers, pool.num_layers},
      {"num_kv_heads", file.num_kv_heads, pool.num_kv_heads},
      {"head_size", file.head_size, pool.head_size},
      {"v_head_size", file.v_head_size, pool.v_head_size},
      {"block_size", file.block_size, pool.block_size},
  };
  for (const Field& field : fields) {
    VARLANE_REQUIRE_ARG(field.file == field.pool, field.name, " = ", field.file,
                        ", but the pool has ", field.name, " = ", field.pool);
  }
  return {};
}

}  // namespace varlane
