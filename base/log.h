// The library's side of varlane/log.h.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_LOG_H_
#define VARLANE_BASE_LOG_H_

#include <initializer_list>
#include <string_view>

#include "varlane/log.h"

namespace varlane {

// Whether somebody wants to hear records of this level: one relaxed load, so
// that what a record needs is only put together for somebody.
bool IsLogged(LogLevel level) noexcept;

// Hands a record to the callback, if there is one for its level. Call it with
// no lock held that a callback could want: it may use the library.
void Log(LogLevel level, std::string_view event, std::string_view message,
         std::initializer_list<LogField> fields = {}) noexcept;

}  // namespace varlane

#endif  // VARLANE_BASE_LOG_H_
