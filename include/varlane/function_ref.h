// FunctionRef: a non-owning callable, for bodies that only run inside a call.
//
// Two pointers, no allocation. The callable must outlive the FunctionRef.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_FUNCTION_REF_H_
#define VARLANE_FUNCTION_REF_H_

#include <memory>
#include <type_traits>
#include <utility>

namespace varlane {

template <typename Signature>
class FunctionRef;

template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<
                            std::remove_cvref_t<F>, FunctionRef>>>
  FunctionRef(F&& f) noexcept  // NOLINT(*explicit*)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(
              std::forward<Args>(args)...);
        }) {}

  R operator()(Args... args) const {
    return call_(object_, std::forward<Args>(args)...);
  }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

}  // namespace varlane

#endif  // VARLANE_FUNCTION_REF_H_
