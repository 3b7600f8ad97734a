// SharedPage<T>: one T that a process and its forked children see.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_SHARED_PAGE_H_
#define VARLANE_TOOLS_SHARED_PAGE_H_

#include <sys/mman.h>

#include <new>
#include <type_traits>

namespace varlane::tools {

// T: what may be shared: lock-free atomics and plain arrays.
template <typename T>
class SharedPage {
 public:
  static_assert(std::is_trivially_destructible_v<T>);

  // Null on want of memory.
  SharedPage()
      : address_(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (address_ != MAP_FAILED) new (address_) T();
  }
  ~SharedPage() {
    if (address_ != MAP_FAILED) munmap(address_, sizeof(T));
  }
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  T* get() const {
    return address_ == MAP_FAILED ? nullptr : static_cast<T*>(address_);
  }

 private:
  void* address_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_SHARED_PAGE_H_
