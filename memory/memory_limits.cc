// MemoryLimits::Detect: host RAM, every cgroup ancestor, and the rlimits.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/strings.h"
#include "memory/cgroup.h"
#include "memory/node_memory.h"
#include "memory/proc_file.h"
#include "varlane/memory_budget.h"

namespace varlane {
namespace {

// cgroup v1 says "unlimited" as 2^63 - 1 rounded down to a page, be it of 4 KiB
// (9223372036854771712) or of 64 KiB.
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max() - 65535;

// Which limits bind. `limits` has at least one.
void Conclude(MemoryLimits* out) {
  const auto smallest = [&](const auto& bytes) {
    const auto& limits = out->limits;
    return static_cast<int>(
        std::min_element(limits.begin(), limits.end(),
                         [&](const MemoryLimit& a, const MemoryLimit& b) {
                           return bytes(a) < bytes(b);
                         }) -
        limits.begin());
  };
  const auto at = [&](int index) -> const MemoryLimit& {
    return out->limits[static_cast<size_t>(index)];
  };
  out->binding_total =
      smallest([](const MemoryLimit& limit) { return limit.limit_bytes; });
  out->binding_available =
      smallest([](const MemoryLimit& limit) { return limit.available_bytes; });
  out->binding_room =
      smallest([](const MemoryLimit& limit) { return limit.room_bytes(); });
  out->total_bytes = at(out->binding_total).limit_bytes;
  out->available_bytes = at(out->binding_available).available_bytes;
  out->room_bytes = at(out->binding_room).room_bytes();
}

class Detector {
 public:
  explicit Detector(const std::string& root) : root_(root) {}

  Result<MemoryLimits> Run() {
    if (Status status = AddHost(); !status.ok()) return status;
    MemoryCgroups cgroups = FindMemoryCgroups(root_);
    VARLANE_RETURN_IF_ERROR(cgroups.exhausted);
    for (std::string& warning : cgroups.warnings) Warn(std::move(warning));
    AddV1(cgroups);
    for (const MemoryCgroup& cgroup : cgroups.levels) {
      if (cgroup.version == 2) AddV2(cgroup);
    }
    AddNodes();
    AddRlimits();
    VARLANE_RETURN_IF_ERROR(exhausted_);
    Conclude(&out_);
    return std::move(out_);
  }

 private:
  void Warn(std::string warning) {
    out_.warnings.push_back(std::move(warning));
  }

  void Add(std::string name, int64_t limit, int64_t used) {
    if (limit >= kUnlimited) return;
    out_.limits.push_back({std::move(name), limit, used,
                           std::max<int64_t>(limit - used, 0),
                           LimitReserveBytes(limit)});
  }

  // A limit that could not be read for want of a file descriptor is not a limit
  // that is not there: the whole answer fails then.
  Result<std::string> Read(const std::string& path) {
    Result<std::string> text = ReadProcFile(path);
    if (text.status().code() == StatusCode::kResourceExhausted) {
      exhausted_ = text.status();
    }
    return text;
  }

  Status AddHost() {
    const std::string path = root_ + "/proc/meminfo";
    const Result<std::string> text = Read(path);
    if (!text.ok()) {
      VARLANE_RETURN_IF_ERROR(exhausted_);
      return {StatusCode::kUnavailable,
              StrCat("host RAM is unknown: ", text.status().message())};
    }
    const std::optional<int64_t> total = FindKilobytes(*text, "MemTotal:");
    if (!total || *total == 0 || *total >= kUnlimited) {
      return {StatusCode::kUnavailable,
              StrCat("host RAM is unknown: no sane MemTotal in ", path)};
    }
    std::optional<int64_t> available = FindKilobytes(*text, "MemAvailable:");
    if (!available) {
      Warn(StrCat(path, ": no MemAvailable; MemFree is taken instead"));
      available = FindKilobytes(*text, "MemFree:");
    }
    Add("host RAM", *total, *total - std::min(available.value_or(0), *total));
    return {};
  }

  // A number from a cgroup file: nothing where the file is not there (v2: the
  // controller is off at that level) or, with a warning, not readable.
  std::optional<int64_t> ReadCount(const std::string& path,
                                   std::string_view consequence,
                                   bool required = false) {
    const Result<std::string> text = Read(path);
    if (text.ok()) {
      if (text->substr(0, 3) == "max") return kUnlimited;
      const std::optional<int64_t> count = ParseCount(*text);
      if (!count) Warn(StrCat(path, ": no number; ", consequence));
      return count;
    }
    if (required || text.status().code() != StatusCode::kNotFound) {
      Warn(StrCat(text.status().message(), "; ", consequence));
    }
    return std::nullopt;
  }

  // What a cgroup has in use and cannot simply drop. The kernel charges page
  // cache to it too; that part comes back when somebody needs the memory.
  int64_t NonReclaimable(const MemoryCgroup& cgroup, const char* usage_file,
                         std::initializer_list<std::string_view> reclaimable) {
    const Result<std::string> usage = Read(cgroup.directory + usage_file);
    const std::optional<int64_t> current =
        usage.ok() ? ParseCount(*usage) : std::nullopt;
    if (!current) {
      Warn(StrCat(cgroup.directory, usage_file,
                  ": cannot be read; its use counts as 0"));
      return 0;
    }
    const Result<std::string> stat = Read(cgroup.directory + "/memory.stat");
    if (!stat.ok()) {
      Warn(StrCat(stat.status().message(), "; its page cache counts as used"));
      return *current;
    }
    int64_t used = *current;
    for (const std::string_view key : reclaimable) {
      used -= std::min(used, FindCount(*stat, key).value_or(0));
    }
    return used;
  }

  void AddV2(const MemoryCgroup& cgroup) {
    for (const char* file : {"memory.max", "memory.high"}) {
      // Above memory.high the kernel throttles us nearly to a halt, so it is a
      // limit like the other.
      const std::optional<int64_t> limit = ReadCount(
          StrCat(cgroup.directory, "/", file), "this limit is unknown");
      if (!limit || *limit >= kUnlimited) continue;
      Add(StrCat("cgroup v2 ", file, " ", cgroup.path), *limit,
          NonReclaimable(cgroup, "/memory.current",
                         {"inactive_file", "slab_reclaimable"}));
    }
  }

  void AddV1(const MemoryCgroups& cgroups) {
    const MemoryCgroup* own = nullptr;
    int64_t smallest = kUnlimited;
    for (const MemoryCgroup& cgroup : cgroups.levels) {
      if (cgroup.version != 1) continue;
      if (own == nullptr) {
        own = &cgroup;
      } else if (ReadCount(cgroup.directory + "/memory.use_hierarchy",
                           "taken as 1") == 0) {
        continue;  // old kernels: this ancestor does not bound its children
      }
      const std::optional<int64_t> limit = ReadCount(
          cgroup.directory + "/memory.limit_in_bytes", "this limit is unknown",
          /*required=*/true);
      if (!limit) continue;
      if (*limit >= kUnlimited) continue;
      smallest = std::min(smallest, *limit);
      Add(StrCat("cgroup v1 memory ", cgroup.path), *limit, UsedV1(cgroup));
    }
    if (own != nullptr) AddHiddenV1(*own, smallest);
  }

  int64_t UsedV1(const MemoryCgroup& cgroup) {
    return NonReclaimable(cgroup, "/memory.usage_in_bytes",
                          {"total_inactive_file"});
  }

  // v1 tells the true bound even where a namespace hides the ancestor that
  // sets it. What that ancestor has in use is hidden too: at least our own.
  void AddHiddenV1(const MemoryCgroup& own, int64_t smallest_visible) {
    const Result<std::string> stat = Read(own.directory + "/memory.stat");
    if (!stat.ok()) return;
    const std::optional<int64_t> limit =
        FindCount(*stat, "hierarchical_memory_limit");
    if (!limit || *limit >= smallest_visible) return;
    Add(StrCat("cgroup v1 memory above ", own.path,
               " (hierarchical_memory_limit)"),
        *limit, UsedV1(own));
  }

  // A cpuset that leaves some nodes out bounds us to what the others have.
  void AddNodes() {
    out_.nodes = ReadNodeMemory(root_, &out_.warnings, &exhausted_);
    int64_t total = 0;
    int64_t available = 0;
    std::string names;
    for (const NodeMemory& node : out_.nodes) {
      if (!node.allowed) continue;
      total += node.total_bytes;
      available += node.available_bytes;
      names += StrCat(names.empty() ? "" : ",", node.os_index);
    }
    const bool all =
        std::all_of(out_.nodes.begin(), out_.nodes.end(),
                    [](const NodeMemory& node) { return node.allowed; });
    if (all || total == 0) return;
    Add(StrCat("NUMA nodes ", names, " (Mems_allowed_list)"), total,
        total - available);
  }

  // "Max data size             unlimited            unlimited            bytes"
  void AddRlimits() {
    const Result<std::string> text = Read(root_ + "/proc/self/limits");
    if (!text.ok()) {
      if (text.status().code() != StatusCode::kNotFound || root_.empty()) {
        Warn(StrCat(text.status().message(),
                    "; RLIMIT_AS and RLIMIT_DATA are unknown"));
      }
      return;
    }
    Result<std::string> status = std::string();  // read where a limit is set
    bool is_read = false;
    const auto used = [&](const char* field) {
      if (!std::exchange(is_read, true)) {
        status = Read(root_ + "/proc/self/status");
        if (!status.ok()) {
          Warn(StrCat(status.status().message(),
                      "; the use under RLIMIT_AS and RLIMIT_DATA counts as 0"));
        }
      }
      return status.ok() ? FindKilobytes(*status, field).value_or(0) : 0;
    };
    const auto add = [&](const char* name, const char* row, const char* field) {
      const std::optional<int64_t> limit = FindCount(*text, row);
      if (!limit || *limit >= kUnlimited) return;
      Add(name, *limit, used(field));
    };
    add("RLIMIT_AS", "Max address space", "VmSize:");
    add("RLIMIT_DATA", "Max data size", "VmData:");
  }

  const std::string& root_;
  MemoryLimits out_;
  Status exhausted_;
};

}  // namespace

int64_t LimitReserveBytes(int64_t limit_bytes) noexcept {
  constexpr int64_t kUsual = int64_t{64} << 20;
  return std::max(limit_bytes / 50, std::min(kUsual, limit_bytes / 8));
}

void MemoryLimits::Add(MemoryLimit limit) {
  limits.push_back(std::move(limit));
  Conclude(this);
}

Result<MemoryLimits> MemoryLimits::Detect(const std::string& root) try {
  return Detector(root).Run();
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kResourceExhausted,
                "no memory to read the memory limits");
}

}  // namespace varlane
