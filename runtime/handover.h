// What ThreadSanitizer must be told where a library hands over a task.
//
// TBB hands a task from thread to thread inside a library that ThreadSanitizer
// does not see. These two tell it, so that no suppression is needed that would
// hide races in the bodies a task runs.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_RUNTIME_HANDOVER_H_
#define VARLANE_RUNTIME_HANDOVER_H_

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace varlane {

inline void HandedOver([[maybe_unused]] const void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(const_cast<void*>(object));
#endif
}
inline void TakenOver([[maybe_unused]] const void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(const_cast<void*>(object));
#endif
}

}  // namespace varlane

#endif  // VARLANE_RUNTIME_HANDOVER_H_
