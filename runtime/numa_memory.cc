// SPDX-License-Identifier: Apache-2.0

#include "runtime/numa_memory.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "base/check.h"
#include "base/math.h"
#include "base/os_calls.h"
#include "base/strings.h"

// Kernel numbers that older C libraries do not name.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif

namespace varlane {
namespace {

constexpr int kReservedFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr int kHugeTlb2MiB = MAP_HUGETLB | (21 << MAP_HUGE_SHIFT);

// Linux builds have 1024 nodes at most.
constexpr int kMaxNodes = 1024;

Status SystemError(std::string_view what, int64_t bytes, int error,
                   std::string_view hint) {
  const StatusCode code = error == ENOMEM || error == EAGAIN
                              ? StatusCode::kResourceExhausted
                              : StatusCode::kInternal;
  return {code, StrCat(what, " ", FormatBytes(bytes), " (", bytes,
                       " bytes) failed: ", ErrnoText(error), hint)};
}

Status CheckRange(std::string_view what, const std::byte* data, int64_t bytes) {
  const int64_t page = BasePageBytes();
  VARLANE_REQUIRE_ARG(data != nullptr, what, ": the range is null");
  VARLANE_REQUIRE_ARG(bytes > 0 && bytes % page == 0, what, ": bytes = ", bytes,
                      ", must be a positive multiple of the page size ", page);
  VARLANE_REQUIRE_ARG(
      reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(page) == 0,
      what, ": the range does not start on a page of ", page, " bytes");
  return {};
}

bool IsWholeHugePages(const std::byte* data, int64_t bytes) {
  return bytes % kHugePageBytes == 0 &&
         reinterpret_cast<uintptr_t>(data) %
                 static_cast<uintptr_t>(kHugePageBytes) ==
             0;
}

// Lays a fresh PROT_NONE mapping over the range.
bool MapReserved(std::byte* data, int64_t bytes) {
  return os::Mmap(data, static_cast<size_t>(bytes), PROT_NONE,
                  kReservedFlags | MAP_FIXED, -1, 0) != MAP_FAILED;
}

// True when hugetlb pages now back the range. The kernel takes them out of the
// pool before it replaces the old mapping, so that failure leaves the range as
// it was; it is laid again all the same, since that order is no promise.
bool MapHugeTlb(std::byte* data, int64_t bytes) {
  if (!IsWholeHugePages(data, bytes)) return false;
  if (os::Mmap(data, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | kHugeTlb2MiB, -1,
               0) != MAP_FAILED) {
    return true;
  }
  (void)MapReserved(data, bytes);  // mprotect reports it if this failed
  return false;
}

// Asked on a page of our own: on a caller's range EINVAL may also mean that it
// is not committed, and touching that would be fatal.
bool KernelPopulates() {
  static const bool populates = [] {
    const auto size = static_cast<size_t>(BasePageBytes());
    void* const page = os::Mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return true;  // the real call will say why
    const bool ok =
        os::Madvise(page, size, MADV_POPULATE_WRITE) == 0 || errno != EINVAL;
    os::Munmap(page, size);
    return ok;
  }();
  return populates;
}

// For kernels before 5.14. Adding zero keeps the contents, atomically, so that
// another thread that already writes there loses nothing.
void TouchPages(std::byte* data, int64_t bytes) {
  const int64_t page = BasePageBytes();
  for (int64_t offset = 0; offset < bytes; offset += page) {
    auto* word = reinterpret_cast<uint32_t*>(data + offset);
    std::atomic_ref<uint32_t>(*word).fetch_add(0, std::memory_order_relaxed);
  }
}

// One "7f12-7f34 rw-p ..." line of smaps: the mapping's range, or false.
bool ParseMappingLine(std::string_view line, uintptr_t* begin, uintptr_t* end) {
  const char* const last = line.data() + line.size();
  const auto first = std::from_chars(line.data(), last, *begin, 16);
  if (first.ec != std::errc() || first.ptr == last || *first.ptr != '-') {
    return false;
  }
  return std::from_chars(first.ptr + 1, last, *end, 16).ec == std::errc();
}

// "AnonHugePages:   4096 kB" -> bytes; 0 for the fields that do not matter.
int64_t ParseHugeField(std::string_view line) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return 0;
  const std::string_view name = line.substr(0, colon);
  if (name != "AnonHugePages" && name != "Private_Hugetlb" &&
      name != "Shared_Hugetlb") {
    return 0;
  }
  const size_t digit = line.find_first_of("0123456789", colon);
  if (digit == std::string_view::npos) return 0;
  int64_t kib = 0;
  std::from_chars(line.data() + digit, line.data() + line.size(), kib);
  return kib * 1024;
}

}  // namespace

int64_t BasePageBytes() noexcept {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  return page;
}

Result<std::byte*> ReserveAddressSpace(int64_t bytes, int64_t alignment) {
  VARLANE_REQUIRE_ARG(bytes > 0, "address space: bytes = ", bytes,
                      ", must be positive");
  VARLANE_REQUIRE_ARG(IsPowerOfTwo(alignment),
                      "address space: alignment = ", alignment,
                      ", must be a power of two");
  const int64_t page = BasePageBytes();
  alignment = std::max(alignment, page);
  const auto padded = CheckedAdd(bytes, alignment + page);
  VARLANE_REQUIRE_ARG(padded.has_value(), "address space: bytes = ", bytes,
                      " with alignment ", alignment, " overflows 64 bits");
  bytes = RoundUp(bytes, page);
  // mmap aligns to base pages only: take enough and cut off both ends.
  const int64_t total = bytes + alignment - page;
  void* const map = os::Mmap(nullptr, static_cast<size_t>(total), PROT_NONE,
                             kReservedFlags, -1, 0);
  if (map == MAP_FAILED) {
    return SystemError("reserving address space of", total, errno,
                       "; see ulimit -v (RLIMIT_AS) and vm.max_map_count");
  }
  auto* const base = static_cast<std::byte*>(map);
  const int64_t misalignment =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) &
                           static_cast<uintptr_t>(alignment - 1));
  const int64_t head = misalignment == 0 ? 0 : alignment - misalignment;
  const int64_t tail = total - head - bytes;
  const auto cut = [](std::byte* data, int64_t size) {
    return size == 0 || os::Munmap(data, static_cast<size_t>(size)) == 0;
  };
  if (!cut(base, head) || !cut(base + head + bytes, tail)) {
    const int error = errno;  // no map entry left for the pieces
    ReleaseAddressSpace(base, total);
    return SystemError("aligning address space of", total, error,
                       "; see vm.max_map_count");
  }
  return base + head;
}

Result<HugePages> CommitMemory(std::byte* data, int64_t bytes, HugePages want) {
  VARLANE_RETURN_IF_ERROR(CheckRange("CommitMemory", data, bytes));
  if (want == HugePages::kExplicit) {
    if (MapHugeTlb(data, bytes)) return HugePages::kExplicit;
    want = HugePages::kTransparent;
  }
  const auto size = static_cast<size_t>(bytes);
  if (os::Mprotect(data, size, PROT_READ | PROT_WRITE) != 0) {
    return SystemError("committing", bytes, errno,
                       "; see vm.overcommit_memory, ulimit -d (RLIMIT_DATA) "
                       "and vm.max_map_count");
  }
  if (want == HugePages::kTransparent) {
    // A kernel without THP answers EINVAL: base pages then, and we say so.
    return os::Madvise(data, size, MADV_HUGEPAGE) == 0 ? HugePages::kTransparent
                                                       : HugePages::kOff;
  }
  // The system's default may be "always"; off means off. EINVAL without THP.
  (void)os::Madvise(data, size, MADV_NOHUGEPAGE);
  return HugePages::kOff;
}

Status PopulateMemory(std::byte* data, int64_t bytes) {
  VARLANE_RETURN_IF_ERROR(CheckRange("PopulateMemory", data, bytes));
  if (!KernelPopulates()) {
    TouchPages(data, bytes);
    return {};
  }
  while (os::Madvise(data, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) !=
         0) {
    const int error = errno;
    if (error == EINTR || error == EAGAIN) continue;
    VARLANE_REQUIRE(error != EINVAL, StatusCode::kFailedPrecondition,
                    "populating ", FormatBytes(bytes),
                    ": the range is not wholly committed");
    // EFAULT: a touch would have raised SIGBUS, for want of a page.
    return SystemError("populating", bytes, error == EFAULT ? ENOMEM : error,
                       "; the system has no page to give");
  }
  return {};
}

// A fresh mapping rather than MADV_DONTNEED and mprotect: it gives back the
// commit charge of strict overcommit and the hugetlb reservation too, works on
// locked memory, and is one call.
Status DecommitMemory(std::byte* data, int64_t bytes) {
  VARLANE_RETURN_IF_ERROR(CheckRange("DecommitMemory", data, bytes));
  if (!MapReserved(data, bytes)) {
    return SystemError("decommitting", bytes, errno, "; see vm.max_map_count");
  }
  return {};
}

Result<int> CreateMemoryFile(int64_t bytes) {
  const int fd = os::MemfdCreate("varlane-kv", MFD_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    return Status(error == EMFILE || error == ENFILE || error == ENOMEM
                      ? StatusCode::kResourceExhausted
                      : StatusCode::kInternal,
                  MessageCat("memfd_create failed: ", ErrnoText(error)));
  }
  if (os::Ftruncate(fd, bytes) != 0) {
    const int error = errno;
    (void)os::Close(fd);
    return SystemError("sizing a file in memory to", bytes, error, "");
  }
  return fd;
}

Result<HugePages> CommitFileMemory(std::byte* data, int64_t bytes, int fd,
                                   int64_t offset, HugePages want) {
  VARLANE_RETURN_IF_ERROR(CheckRange("CommitFileMemory", data, bytes));
  const auto size = static_cast<size_t>(bytes);
  if (os::Mmap(data, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
               offset) == MAP_FAILED) {
    return SystemError("committing", bytes, errno, "; see vm.max_map_count");
  }
  if (want == HugePages::kOff) {
    (void)os::Madvise(data, size, MADV_NOHUGEPAGE);
    return HugePages::kOff;
  }
  return os::Madvise(data, size, MADV_HUGEPAGE) == 0 ? HugePages::kTransparent
                                                     : HugePages::kOff;
}

Status DecommitFileMemory(std::byte* data, int64_t bytes, int fd,
                          int64_t offset) {
  // First, so that a failure of either leaves the range committed.
  while (os::Fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                       bytes) != 0) {
    if (errno == EINTR) continue;
    return SystemError("giving back the file's", bytes, errno, "");
  }
  return DecommitMemory(data, bytes);
}

int PreferNode(std::byte* data, int64_t bytes, int os_node) noexcept {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kMaxNodes / kBits> mask = {};
  if (os_node < 0 || os_node >= kMaxNodes) return EINVAL;
  const auto bit = static_cast<size_t>(os_node);
  mask[bit / kBits] = 1UL << (bit % kBits);
  // One more than there are: the kernel takes the last one off.
  return os::Mbind(data, static_cast<size_t>(bytes), MPOL_PREFERRED,
                   mask.data(), kMaxNodes + 1) == 0
             ? 0
             : errno;
}

PagePlacement QueryPlacement(const std::byte* data, int64_t bytes,
                             int os_node) noexcept {
  constexpr size_t kBatch = 512;
  std::array<void*, kBatch> pages = {};
  std::array<int, kBatch> nodes = {};
  const int64_t page = BasePageBytes();
  PagePlacement placement;
  for (int64_t at = 0; at < bytes;) {
    size_t count = 0;
    for (; count < kBatch && at < bytes; ++count, at += page) {
      pages[count] = const_cast<std::byte*>(data + at);
    }
    if (os::QueryPages(count, pages.data(), nodes.data()) != 0) {
      if (placement.error == 0) placement.error = errno;
      placement.unknown += static_cast<int64_t>(count) * page;
      continue;
    }
    for (size_t i = 0; i < count; ++i) {
      // EFAULT: the zero page, or nothing is mapped there.
      const bool is_absent = nodes[i] == -ENOENT || nodes[i] == -EFAULT;
      const bool is_there =
          nodes[i] >= 0 && (os_node < 0 || nodes[i] == os_node);
      int64_t& bytes_there = is_there        ? placement.on_node
                             : nodes[i] >= 0 ? placement.elsewhere
                             : is_absent     ? placement.absent
                                             : placement.unknown;
      bytes_there += page;
    }
  }
  return placement;
}

int LockMemory(std::byte* data, int64_t bytes) noexcept {
  return os::Mlock(data, static_cast<size_t>(bytes)) == 0 ? 0 : errno;
}

void ReleaseAddressSpace(std::byte* data, int64_t bytes) noexcept {
  if (data == nullptr || bytes <= 0) return;
  const auto size = static_cast<size_t>(RoundUp(bytes, BasePageBytes()));
  if (os::Munmap(data, size) == 0) return;
  // For want of a map entry, where the kernel had merged the reservation with a
  // neighbour's. The pages go back in any case; others may have freed an entry
  // since, and if not it is address space alone that is lost.
  (void)os::Madvise(data, size, MADV_DONTNEED);
  (void)os::Munmap(data, size);
}

Result<int64_t> HugePageBytes(const std::byte* data, int64_t bytes) {
  VARLANE_REQUIRE_ARG(data != nullptr && bytes >= 0,
                      "HugePageBytes: bytes = ", bytes);
  std::ifstream smaps("/proc/self/smaps");
  VARLANE_REQUIRE(smaps.is_open(), StatusCode::kUnavailable,
                  "cannot read /proc/self/smaps: ", ErrnoText(errno));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  int64_t total = 0;
  int64_t overlap = 0;  // of the mapping being read with the range
  std::string line;
  while (std::getline(smaps, line)) {
    uintptr_t map_begin = 0;
    uintptr_t map_end = 0;
    if (ParseMappingLine(line, &map_begin, &map_end)) {
      const uintptr_t from = std::max(begin, map_begin);
      const uintptr_t to = std::min(end, map_end);
      overlap = from < to ? static_cast<int64_t>(to - from) : 0;
    } else if (overlap > 0) {
      total += std::min(overlap, ParseHugeField(line));
    }
  }
  return std::min(total, bytes);
}

}  // namespace varlane
