// Address space and pages: reserve once, commit in slabs, give pages back.
//
// Placement is by first touch: call PopulateMemory inside Runtime::RunOnNode
// and the pages land on that node, without any privilege; PreferNode asks for
// the same where the kernel lets us. All calls are safe from any thread on
// disjoint ranges. Every error carries the size, the
// address range's purpose and the kernel's own words (errno text).
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_NUMA_MEMORY_H_
#define VARLANE_RUNTIME_NUMA_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "varlane/runtime.h"
#include "varlane/status.h"

namespace varlane {

// Slabs should be multiples of this: it is the huge page that x86-64 and arm64
// with 4 KiB base pages share, and the only explicit size we ask for.
inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// The machine's base page (4 KiB on x86); a power of two.
int64_t BasePageBytes() noexcept;

// Reserves `bytes` of address space that costs no memory until committed
// (PROT_NONE, not counted by overcommit) and faults when touched.
//
// Requires: bytes > 0; `alignment` a power of two. Both are rounded up to base
//           pages. Reserve with kHugePageBytes to be able to get huge pages.
// Errors:   kInvalidArgument; kResourceExhausted (RLIMIT_AS, map count).
Result<std::byte*> ReserveAddressSpace(int64_t bytes, int64_t alignment);

// Makes [data, data + bytes) readable and writable; zero when first touched.
// No page is touched here: memory is taken by PopulateMemory or by use.
//
// Returns:  the kind of page that was arranged, which may be less than asked:
//           kExplicit needs free pages in the hugetlb pool (these are then set
//           aside for the range at once) and a range of whole huge pages, else
//           kTransparent is tried; kTransparent needs a kernel with THP, else
//           kOff. Whether transparent pages really came: see HugePageBytes.
// Requires: a range inside one reservation, in whole base pages; committing
//           what is committed already keeps its contents unless kExplicit.
// Errors:   kInvalidArgument; kResourceExhausted (overcommit, RLIMIT_DATA).
Result<HugePages> CommitMemory(std::byte* data, int64_t bytes, HugePages want);

// Takes physical pages for a committed range now, on the calling thread's NUMA
// node (first touch); contents are kept. A memory cgroup's limit does NOT show
// as an error here: the kernel kills the process. Budget first.
//
// Errors:   kResourceExhausted where the kernel has no page to give;
//           kFailedPrecondition where the range is not committed.
Status PopulateMemory(std::byte* data, int64_t bytes);

// Gives the pages back (RSS falls at once) and makes the range reserved again,
// so that a stray access faults; it can be committed again, and is then zero.
// Hugetlb pages return to their pool.
//
// Requires: whole base pages; for a range committed as kExplicit, whole huge
//           pages.
Status DecommitMemory(std::byte* data, int64_t bytes);

// Ends a reservation, whatever part of it is committed. Null is allowed.
void ReleaseAddressSpace(std::byte* data, int64_t bytes) noexcept;

// A file in memory of `bytes`, no page of it taken yet, for CommitFileMemory.
// The caller closes it.
// Errors:   kResourceExhausted (descriptors), kInternal.
Result<int> CreateMemoryFile(int64_t bytes);

// CommitMemory with the file's pages from `offset` on behind the range: every
// mapping of them, in whichever process, shows the same bytes. Explicit huge
// pages are not for files, and transparent ones come only where
// /sys/kernel/mm/transparent_hugepage/shmem_enabled lets them.
Result<HugePages> CommitFileMemory(std::byte* data, int64_t bytes, int fd,
                                   int64_t offset, HugePages want);

// DecommitMemory of such a range: the file's pages are given back too.
Status DecommitFileMemory(std::byte* data, int64_t bytes, int fd,
                          int64_t offset);

// Has the kernel take pages of a committed range, those it has not touched yet,
// from the node of this OS index while that has any: whoever touches them.
// First touch by a worker of the node does the same without the system call,
// which containers often refuse. Returns 0, or the errno of mbind (EPERM and
// ENOSYS: refused).
int PreferNode(std::byte* data, int64_t bytes, int os_node) noexcept;

// Where a range's pages are, in bytes.
struct PagePlacement {
  int64_t on_node = 0;    // on the node asked about
  int64_t elsewhere = 0;  // on another one
  int64_t absent = 0;     // not touched yet
  int64_t unknown = 0;    // the kernel does not tell
  int error = 0;          // errno of the first refusal; 0 = none
};

// Asks the kernel, page by page (move_pages(2) as a query, which moves nothing
// and needs no privilege, but which containers may refuse). With os_node = -1
// every node will do.
// Requires: whole base pages. Cost: about 0.1 us a page.
PagePlacement QueryPlacement(const std::byte* data, int64_t bytes,
                             int os_node) noexcept;

// Keeps a committed range's pages in RAM until it is decommitted. Returns 0, or
// the errno of mlock (ENOMEM and EPERM: RLIMIT_MEMLOCK).
int LockMemory(std::byte* data, int64_t bytes) noexcept;

// How many bytes of the range sit on huge pages now, transparent or explicit.
// From /proc/self/smaps, which counts by mapping: where a mapping reaches over
// the range's ends the answer may count huge pages outside it, but is never
// more than `bytes`.
//
// Errors:   kUnavailable where /proc cannot be read.
// Cost:     walks the process's page tables; for reports, not for hot paths.
Result<int64_t> HugePageBytes(const std::byte* data, int64_t bytes);

}  // namespace varlane

#endif  // VARLANE_RUNTIME_NUMA_MEMORY_H_
