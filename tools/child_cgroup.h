// ChildCgroup: a memory cgroup below our own, for as long as the object lives.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_CHILD_CGROUP_H_
#define VARLANE_TOOLS_CHILD_CGROUP_H_

#include <cstdint>
#include <memory>
#include <string>

#include "varlane/status.h"

namespace varlane::tools {

// Not thread-safe.
class ChildCgroup {
 public:
  // Makes one, cgroup v1 where memory is there, else v2, and removes what runs
  // that were killed have left.
  // Errors: kUnavailable with the reason of each version.
  static Result<std::unique_ptr<ChildCgroup>> Create(int64_t limit_bytes);
  // Removes it, if Remove has not; nobody may be in it any more.
  ~ChildCgroup();
  ChildCgroup(const ChildCgroup&) = delete;
  ChildCgroup& operator=(const ChildCgroup&) = delete;

  int version() const { return version_; }
  const std::string& path() const { return path_; }
  int64_t limit_bytes() const { return limit_bytes_; }

  // Moves the calling process into it. Errors: kUnavailable.
  Status Join() const;
  // Processes that the kernel killed in it for want of memory; -1 = unknown.
  int64_t oom_kills() const;
  int64_t peak_bytes() const;  // page cache included; -1 = unknown
  // Times that the limit was hit and the kernel had to reclaim; -1 = unknown.
  int64_t limit_hits() const;
  // Errors: kInternal when it cannot be removed within a few seconds.
  Status Remove();

 private:
  ChildCgroup(int version, std::string path, int64_t limit_bytes)
      : version_(version), path_(std::move(path)), limit_bytes_(limit_bytes) {}
  // "" or why not.
  static std::string Make(int version, const std::string& leaf,
                          int64_t limit_bytes,
                          std::unique_ptr<ChildCgroup>* made);

  int version_;
  std::string path_;  // empty: removed
  int64_t limit_bytes_;
};

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_CHILD_CGROUP_H_
