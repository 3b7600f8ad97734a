// The header of a session file: what stands where, and what is believed of it.
//
//   byte 0        header, 128 bytes (kSessionHeaderBytes)
//        128      tokens: i32 [num_tokens]
//                 block checksums: u64 [num_blocks], XXH64 of each block
//                 XXH64 of all tokens and block checksums: u64
//                 zeros up to a multiple of 4096
//        data     blocks, block_bytes each, in the sequence's order
//
//   header: 0 "VARLKV\r\n"  8 u32 version  12 u32 dtype  16 u32 num_layers
//           20 u32 num_kv_heads  24 u32 head_size  28 u32 v_head_size
//           32 u32 block_size  36 u32 pack  40 u64 block_bytes  48 u64 length
//           56 u64 num_tokens (0 or length)  64 u64 file_bytes  72 zeros
//           120 u64 XXH64 of bytes [0, 120)
//
// The magic holds CR LF, so that a transfer as text shows at once. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_SESSION_HEADER_H_
#define VARLANE_MEMORY_SESSION_HEADER_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/math.h"
#include "varlane/kv_layout.h"
#include "varlane/status.h"

namespace varlane {

inline constexpr uint32_t kSessionVersion = 1;
inline constexpr int64_t kSessionHeaderBytes = 128;
// Where its own checksum stands.
inline constexpr int64_t kSessionHeaderChecksumAt = 120;
// What the data begins on a multiple of: a page, for direct and mapped reads.
inline constexpr int64_t kSessionDataAlignment = 4096;

struct SessionHeader {
  KvLayout layout;
  int64_t length = 0;
  int64_t num_tokens = 0;

  int64_t num_blocks() const {
    return DivCeil<int64_t>(length, layout.block_size);
  }
  // Offsets in the file. Checked headers only: these cannot overflow then.
  int64_t index_bytes() const {
    return num_tokens * int64_t{sizeof(int32_t)} +
           (num_blocks() + 1) * int64_t{sizeof(uint64_t)};
  }
  int64_t data_begin() const {
    return RoundUp(kSessionHeaderBytes + index_bytes(), kSessionDataAlignment);
  }
  int64_t file_bytes() const {
    return data_begin() + num_blocks() * layout.block_bytes();
  }
};

using SessionHeaderBytes =
    std::array<std::byte, static_cast<size_t>(kSessionHeaderBytes)>;

SessionHeaderBytes EncodeSessionHeader(const SessionHeader& header);

// Errors: kInvalidArgument naming the field, its value and what is expected.
Result<SessionHeader> DecodeSessionHeader(const SessionHeaderBytes& bytes,
                                          int64_t file_bytes);

// Errors: kInvalidArgument naming the first field that differs and both values.
Status CheckSameLayout(const KvLayout& file, const KvLayout& pool);

}  // namespace varlane

#endif  // VARLANE_MEMORY_SESSION_HEADER_H_
