// Reading the small text files of /proc and /sys, under a root of choice.
//
// Every file that the memory layer reads about the system goes through here,
// so a test can lay out a whole machine in a temporary directory. Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_PROC_FILE_H_
#define VARLANE_MEMORY_PROC_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "varlane/status.h"

namespace varlane {

// The whole file. Sizes are not trusted: files of /proc say 0.
//
// Errors: kNotFound; kPermissionDenied; kResourceExhausted, where the process
//         or the system is short of file descriptors or memory and trying again
//         may help; kUnavailable. The message is the path and the system's
//         reason. Throws std::bad_alloc.
Result<std::string> ReadProcFile(const std::string& path);

// The first whitespace-separated word of `text` as a non-negative integer;
// values beyond int64 saturate. Nothing where it is no number.
std::optional<int64_t> ParseCount(std::string_view text);

// The number after `key` at the start of a line, as in "inactive_file 4096"
// or "MemTotal:  24684092 kB"; `key` includes the colon if there is one.
std::optional<int64_t> FindCount(std::string_view text, std::string_view key);

// FindCount of a field in kB, in bytes; saturates.
std::optional<int64_t> FindKilobytes(std::string_view text,
                                     std::string_view key);

// Pieces between separators; empty ones are kept.
std::vector<std::string_view> Split(std::string_view text, char separator);

}  // namespace varlane

#endif  // VARLANE_MEMORY_PROC_FILE_H_
