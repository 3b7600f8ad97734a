// Sessions: saving and loading.
//
// SPDX-License-Identifier: Apache-2.0

#include "varlane/session.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/os_calls.h"
#include "base/xxhash64.h"
#include "memory/block_parts.h"
#include "memory/file.h"
#include "memory/session_header.h"
#include "memory/step_pin.h"

namespace varlane {
namespace {

Status OutOfMemory() {
  return {StatusCode::kResourceExhausted,
          "no memory for a session (not KV: the process's heap)"};
}

// A message about a file names it first.
Status InFile(const std::string& path, const Status& status) {
  return {status.code(), StrCat(path, ": ", status.message())};
}

// Owns a sequence until Keep.
class OwnedSequence {
 public:
  OwnedSequence(KvPool* pool, SeqId sequence)
      : pool_(pool), sequence_(sequence) {}
  ~OwnedSequence() {
    if (sequence_ >= 0) (void)pool_->Free(sequence_);
  }
  OwnedSequence(const OwnedSequence&) = delete;
  OwnedSequence& operator=(const OwnedSequence&) = delete;

  SeqId get() const { return sequence_; }
  SeqId Keep() { return std::exchange(sequence_, -1); }

 private:
  KvPool* pool_;
  SeqId sequence_;
};

Result<std::vector<int32_t>> BlocksOf(const KvPool& pool, SeqId sequence,
                                      int64_t num_blocks) {
  std::vector<int32_t> blocks(static_cast<size_t>(num_blocks));
  VARLANE_RETURN_IF_ERROR(pool.CopyBlockTable(sequence, blocks).status());
  return blocks;
}

// A block where it stands, for a pool whose blocks are whole.
std::span<std::byte> BlockData(const KvPool& pool, int32_t block) {
  return {pool.view().part(block, 0),
          static_cast<size_t>(pool.layout().block_bytes())};
}

// Zeroes the slots [used, block_size) of a block, all layers and heads.
void ClearSlotsFrom(int used, const KvLayout& layout, std::byte* block) {
  const KvView view{block, 1, layout};
  const size_t size = SizeOf(layout.dtype);
  const auto clear = [size](std::byte* head, int64_t offset) {
    std::memset(head + offset * static_cast<int64_t>(size), 0, size);
  };
  for (int layer = 0; layer < layout.num_layers; ++layer) {
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      for (int t = used; t < layout.block_size; ++t) {
        for (int d = 0; d < layout.head_size; ++d) {
          clear(view.k(0, layer, head), layout.k_offset(t, d));
        }
        for (int d = 0; d < layout.v_head_size_padded(); ++d) {
          clear(view.v(0, layer, head), layout.v_offset(t, d));
        }
      }
    }
  }
}

// The bytes between header and data, without the zeros that fill it up.
class Index {
 public:
  explicit Index(const SessionHeader& header)
      : checksums_at_(static_cast<size_t>(header.num_tokens) * sizeof(int32_t)),
        bytes_(static_cast<size_t>(header.index_bytes())) {}

  std::span<std::byte> bytes() { return bytes_; }
  void SetTokens(std::span<const int32_t> tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      StoreU32(static_cast<uint32_t>(tokens[i]), &bytes_[i * sizeof(int32_t)]);
    }
  }
  std::vector<int32_t> Tokens() const {
    std::vector<int32_t> tokens(checksums_at_ / sizeof(int32_t));
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<int32_t>(LoadU32(&bytes_[i * sizeof(int32_t)]));
    }
    return tokens;
  }
  void SetChecksum(size_t block, uint64_t checksum) {
    StoreU64(checksum, &bytes_[checksums_at_ + block * sizeof(uint64_t)]);
  }
  uint64_t Checksum(size_t block) const {
    return LoadU64(&bytes_[checksums_at_ + block * sizeof(uint64_t)]);
  }
  // Its own checksum stands last.
  void Seal() {
    StoreU64(XxHash64(Contents()), bytes_.data() + Contents().size());
  }
  bool IsIntact() const {
    return XxHash64(Contents()) == LoadU64(bytes_.data() + Contents().size());
  }

 private:
  std::span<const std::byte> Contents() const {
    return std::span(bytes_).first(bytes_.size() - sizeof(uint64_t));
  }

  size_t checksums_at_;
  std::vector<std::byte> bytes_;
};

// A file beside `path` that takes its place, or vanishes.
class Replacement {
 public:
  static Result<Replacement> Create(const std::string& path) {
    // Two writers of one path, in this process or others, do not meet.
    static std::atomic<uint64_t> count{0};
    Replacement replacement;
    replacement.path_ = path;
    std::string name =
        StrCat(path, ".", getpid(), ".", count.fetch_add(1), ".tmp");
    Result<File> file =
        File::Open(name, O_CREAT | O_EXCL | O_WRONLY, S_IRUSR | S_IWUSR);
    VARLANE_RETURN_IF_ERROR(file.status());
    replacement.file_ = *std::move(file);
    replacement.name_ = std::move(name);  // nothing fails from the open on
    return replacement;
  }
  Replacement(Replacement&&) = default;
  Replacement& operator=(Replacement&&) = delete;
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;
  ~Replacement() {
    if (!name_.empty()) (void)os::Unlink(name_.c_str());
  }

  const File& file() const { return file_; }

  // On the disk first, then visible: never a file with holes after a crash.
  Status Commit() {
    VARLANE_RETURN_IF_ERROR(file_.Sync());
    if (os::Rename(name_.c_str(), path_.c_str()) != 0) {
      return FileError("cannot replace", path_, errno);
    }
    name_.clear();
    // The name too. A folder that cannot be synced (some network file systems)
    // takes nothing back: the file is there and whole.
    const int folder =
        os::Open(FolderOf(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
      (void)os::Fsync(folder);
      (void)os::Close(folder);
    }
    return {};
  }

 private:
  Replacement() = default;

  std::string path_;
  std::string name_;  // empty = nothing to remove
  File file_;
};

Status WriteSession(const KvPool& pool, SeqId sequence,
                    const SessionHeader& header,
                    std::span<const int32_t> tokens, const File& file) {
  const auto blocks = BlocksOf(pool, sequence, header.num_blocks());
  VARLANE_RETURN_IF_ERROR(blocks.status());
  const KvLayout& layout = header.layout;
  const int tail = static_cast<int>(header.length % layout.block_size);
  const bool is_whole = pool.num_shards() == 1;
  std::vector<std::byte> packed;  // of a sharded block, or the tail
  Index index(header);
  index.SetTokens(tokens);
  int64_t offset = header.data_begin();
  for (size_t i = 0; i < blocks->size(); ++i) {
    const bool is_tail = tail != 0 && i + 1 == blocks->size();
    std::span<const std::byte> data;
    if (is_whole && !is_tail) {
      data = BlockData(pool, (*blocks)[i]);
    } else {
      packed.resize(static_cast<size_t>(layout.block_bytes()));
      PackBlock(pool.view(), (*blocks)[i], packed.data());
      if (is_tail) ClearSlotsFrom(tail, layout, packed.data());
      data = packed;
    }
    index.SetChecksum(i, XxHash64(data));
    VARLANE_RETURN_IF_ERROR(file.WriteAt(offset, data));
    offset += layout.block_bytes();
  }
  index.Seal();
  VARLANE_RETURN_IF_ERROR(file.WriteAt(0, EncodeSessionHeader(header)));
  // With the zeros up to the data: where there is no block, nothing else makes
  // the file that long.
  const std::span<const std::byte> used = index.bytes();
  std::vector<std::byte> bytes(used.begin(), used.end());
  bytes.resize(static_cast<size_t>(header.data_begin() - kSessionHeaderBytes));
  return file.WriteAt(kSessionHeaderBytes, bytes);
}

// An open session file whose header was believed.
struct OpenSession {
  File file;
  SessionHeader header;
};

Result<OpenSession> OpenSessionFile(const std::string& path) {
  VARLANE_REQUIRE(std::endian::native == std::endian::little,
                  StatusCode::kUnimplemented,
                  "sessions hold little-endian blocks");
  Result<File> file = File::Open(path, O_RDONLY);
  VARLANE_RETURN_IF_ERROR(file.status());
  const Result<int64_t> size = file->Size();
  VARLANE_RETURN_IF_ERROR(size.status());
  VARLANE_REQUIRE_ARG(*size >= kSessionHeaderBytes, path,
                      ": it is no session file: ", *size,
                      " bytes, but a header has ", kSessionHeaderBytes);
  SessionHeaderBytes bytes;
  VARLANE_RETURN_IF_ERROR(file->ReadAt(0, bytes));
  const Result<SessionHeader> header = DecodeSessionHeader(bytes, *size);
  if (!header.ok()) return InFile(path, header.status());
  return OpenSession{*std::move(file), *header};
}

Status ReadBlocks(const KvPool& pool, const OpenSession& session,
                  const Index& index, std::span<const int32_t> blocks) {
  const bool is_whole = pool.num_shards() == 1;
  std::vector<std::byte> packed(
      is_whole ? 0 : static_cast<size_t>(pool.layout().block_bytes()));
  int64_t offset = session.header.data_begin();
  for (size_t i = 0; i < blocks.size(); ++i) {
    const std::span<std::byte> data =
        is_whole ? BlockData(pool, blocks[i]) : std::span(packed);
    const auto end = offset + static_cast<int64_t>(data.size());
    VARLANE_RETURN_IF_ERROR(session.file.ReadAt(offset, data));
    VARLANE_REQUIRE_ARG(XxHash64(data) == index.Checksum(i),
                        session.file.path(), ": bytes [", offset, ", ", end,
                        ") are damaged: the checksum of block ", i, " differs");
    if (!is_whole) UnpackBlock(packed.data(), pool.view(), blocks[i]);
    offset = end;
  }
  return {};
}

}  // namespace

Status SaveSession(KvPool* pool, SeqId sequence,
                   std::span<const int32_t> tokens,
                   const std::string& path) try {
  VARLANE_REQUIRE_ARG(pool != nullptr, "pool is null");
  // Holds the blocks: whoever appends meanwhile copies the shared tail first.
  const Result<SeqId> fork = pool->Fork(sequence);
  VARLANE_RETURN_IF_ERROR(fork.status());
  const OwnedSequence held(pool, *fork);
  const StepPin pin(pool);
  const Result<int64_t> length = pool->Length(held.get());
  VARLANE_RETURN_IF_ERROR(length.status());
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  VARLANE_REQUIRE_ARG(num_tokens == 0 || num_tokens == *length, "tokens has ",
                      num_tokens, " entries, but seq = ", sequence, " has ",
                      *length, " tokens");
  const SessionHeader header{pool->layout(), *length, num_tokens};
  Result<Replacement> replacement = Replacement::Create(path);
  VARLANE_RETURN_IF_ERROR(replacement.status());
  VARLANE_RETURN_IF_ERROR(
      WriteSession(*pool, held.get(), header, tokens, replacement->file()));
  return replacement->Commit();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Result<LoadedSession> LoadSession(KvPool* pool, const std::string& path) try {
  VARLANE_REQUIRE_ARG(pool != nullptr, "pool is null");
  const Result<OpenSession> session = OpenSessionFile(path);
  VARLANE_RETURN_IF_ERROR(session.status());
  const SessionHeader& header = session->header;
  if (Status s = CheckSameLayout(header.layout, pool->layout()); !s.ok()) {
    return InFile(path, s);
  }
  // Blocks before heap: the pool bounds what a hostile length can ask for.
  OwnedSequence loaded(pool, pool->CreateSequence());
  if (loaded.get() < 0) return OutOfMemory();
  const Result<Admission> room = pool->Append(loaded.get(), header.length);
  VARLANE_RETURN_IF_ERROR(room.status());
  VARLANE_REQUIRE(room->admitted(), StatusCode::kResourceExhausted, path, ": ",
                  room->needed_blocks, " blocks are needed, but ",
                  room->free_blocks, " of ", room->capacity_blocks,
                  " are free");
  Index index(header);
  VARLANE_RETURN_IF_ERROR(
      session->file.ReadAt(kSessionHeaderBytes, index.bytes()));
  VARLANE_REQUIRE_ARG(index.IsIntact(), path, ": bytes [", kSessionHeaderBytes,
                      ", ", kSessionHeaderBytes + header.index_bytes(),
                      ") are damaged: the index's checksum differs");
  const StepPin pin(pool);
  const auto blocks = BlocksOf(*pool, loaded.get(), header.num_blocks());
  VARLANE_RETURN_IF_ERROR(blocks.status());
  VARLANE_RETURN_IF_ERROR(ReadBlocks(*pool, *session, index, *blocks));
  LoadedSession result;
  result.length = header.length;
  result.tokens = index.Tokens();
  result.sequence = loaded.Keep();
  return result;
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

Result<SessionInfo> ReadSessionInfo(const std::string& path) try {
  const Result<OpenSession> session = OpenSessionFile(path);
  VARLANE_RETURN_IF_ERROR(session.status());
  const SessionHeader& header = session->header;
  return SessionInfo{header.layout, header.length, header.num_tokens != 0,
                     header.file_bytes()};
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace varlane
