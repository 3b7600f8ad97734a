// SPDX-License-Identifier: Apache-2.0

#include "memory/cgroup.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/strings.h"
#include "memory/proc_file.h"

namespace varlane {
namespace {

constexpr int kMaxDirectoriesSearched = 4096;

// A cgroup path relative to the namespace's root: "/../../a" is two up, then
// down into a.
struct Path {
  size_t up = 0;
  std::vector<std::string> down;

  bool IsRoot() const { return up == 0 && down.empty(); }
};

struct Mount {
  std::string point;
  Path root;  // the cgroup that the mount point shows
};

Path ParsePath(std::string_view text) {
  Path path;
  for (const std::string_view piece : Split(text, '/')) {
    if (piece == ".." && path.down.empty()) {
      ++path.up;
    } else if (!piece.empty() && piece != ".") {
      path.down.emplace_back(piece);
    }
  }
  return path;
}

std::string PathName(size_t up, const std::vector<std::string>& down,
                     size_t depth) {
  std::string name;
  for (size_t i = 0; i < up; ++i) name += "/..";
  for (size_t i = 0; i < depth; ++i) name += "/" + down[i];
  return name.empty() ? "/" : name;
}

std::string PathName(const Path& path) {
  return PathName(path.up, path.down, path.down.size());
}

// mountinfo writes blank, tab, newline and backslash as \ooo.
std::string Unescape(std::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      int value = 0;
      for (size_t k = 1; k <= 3; ++k) value = value * 8 + (text[i + k] - '0');
      plain += static_cast<char>(value);
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

bool Lists(std::string_view comma_separated, std::string_view word) {
  const auto words = Split(comma_separated, ',');
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Our own cgroup in the hierarchy that `version` keeps memory in.
std::optional<Path> OwnPath(std::string_view proc_self_cgroup, int version) {
  constexpr std::string_view kDeleted = " (deleted)";
  for (const std::string_view line : Split(proc_self_cgroup, '\n')) {
    const size_t first = line.find(':');  // id:controllers:path
    if (first == std::string_view::npos) continue;
    const size_t second = line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers =
        line.substr(first + 1, second - first - 1);
    std::string_view path = line.substr(second + 1);
    if (path.ends_with(kDeleted)) path.remove_suffix(kDeleted.size());
    const bool ours = version == 2
                          ? controllers.empty() && line.substr(0, first) == "0"
                          : Lists(controllers, "memory");
    if (ours) return ParsePath(path);
  }
  return std::nullopt;
}

// Where the hierarchy that `version` keeps memory in is mounted.
std::vector<Mount> FindMounts(std::string_view mountinfo, int version) {
  std::vector<Mount> mounts;
  for (const std::string_view line : Split(mountinfo, '\n')) {
    // id parent major:minor root point options [tags] - type source options
    const auto fields = Split(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (dash - fields.begin() < 6 || fields.end() - dash < 4) continue;
    const bool ours = version == 2
                          ? dash[1] == "cgroup2"
                          : dash[1] == "cgroup" && Lists(dash[3], "memory");
    if (!ours) continue;
    mounts.push_back({Unescape(fields[4]), ParsePath(Unescape(fields[3]))});
  }
  return mounts;
}

// How the cgroup that a mount shows relates to our own.
enum class Relation {
  kAncestor,  // our own lies in it, and its path down is known
  kAbove,     // it lies above the namespace: an ancestor, some names unknown
  kOther,     // by its path not an ancestor, but chosen by whoever mounted it
  kNone,      // the namespace's root, and we are outside of it
};

Relation Relate(const Mount& mount, const Path& own) {
  const Path& root = mount.root;
  if (root.up == own.up && root.down.size() <= own.down.size() &&
      std::equal(root.down.begin(), root.down.end(), own.down.begin())) {
    return Relation::kAncestor;
  }
  if (root.up > own.up && root.down.empty()) return Relation::kAbove;
  return root.IsRoot() ? Relation::kNone : Relation::kOther;
}

bool IsDirectory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

// Walks one hierarchy and collects its levels.
class Finder {
 public:
  Finder(const std::string& root, int version, MemoryCgroups* out)
      : root_(root), version_(version), out_(out) {}

  void Find(const std::vector<Mount>& mounts, const Path& own) {
    if (mounts.empty()) return;
    const Mount& mount = *std::min_element(mounts.begin(), mounts.end(),
                                           [&](const Mount& a, const Mount& b) {
                                             return Rank(a, own) < Rank(b, own);
                                           });
    switch (Relate(mount, own)) {
      case Relation::kAncestor:
        AddAncestors(mount, own);
        break;
      case Relation::kAbove:
        AddThroughNamespace(mount, own);
        break;
      case Relation::kOther:
        // A runtime that mounts a part of the tree mounts the container's own.
        Warn("cgroup ", PathName(own), " does not lie in ",
             PathName(mount.root), ", which ", mount.point,
             " shows; taking the latter's limit");
        Add(PathName(mount.root), root_ + mount.point);
        break;
      case Relation::kNone:
        Warn("cgroup ", PathName(own), " lies outside of what ", mount.point,
             " shows; its limit is unknown");
        break;
    }
  }

 private:
  // The best mount shows the most of our ancestors.
  static std::pair<Relation, size_t> Rank(const Mount& mount, const Path& own) {
    const Relation relation = Relate(mount, own);
    return {relation, relation == Relation::kAbove ? 1000 - mount.root.up
                                                   : mount.root.down.size()};
  }

  template <typename... Args>
  void Warn(const Args&... args) {
    out_->warnings.push_back(StrCat("cgroup v", version_, ": ", args...));
  }

  void Add(std::string path, std::string directory) {
    out_->levels.push_back({version_, std::move(path), std::move(directory)});
  }

  void AddAncestors(const Mount& mount, const Path& own) {
    const size_t top = mount.root.down.size();
    size_t missing = 0;
    for (size_t depth = own.down.size() + 1; depth-- > top;) {
      std::string directory = root_ + mount.point;
      for (size_t i = top; i < depth; ++i) directory += "/" + own.down[i];
      if (IsDirectory(directory)) {
        Add(PathName(own.up, own.down, depth), directory);
      } else {
        ++missing;
      }
    }
    if (missing > 0) {
      Warn(missing, " of ", own.down.size() + 1 - top, " levels of ",
           PathName(own), " are not there below ", mount.point,
           "; their limits are unknown");
    }
  }

  // The mount shows an ancestor of the namespace's root, so the names on the
  // way down to us are hidden: look for the directory that lists our process.
  void AddThroughNamespace(const Mount& mount, const Path& own) {
    const size_t hidden = mount.root.up - own.up;
    const Result<std::string> status =
        ReadProcFile(root_ + "/proc/self/status");
    std::optional<int64_t> pid;
    if (status.ok()) pid = FindCount(*status, "Pid:");
    const std::string top = root_ + mount.point;
    std::string below;
    for (const std::string& name : own.down) below += "/" + name;
    std::vector<std::string> found;  // from just below `top` downwards
    if (!pid || !Search(top, hidden, below, StrCat(*pid), &found)) {
      Warn("the levels between ", mount.point, " (", PathName(mount.root),
           ") and our own cgroup ", PathName(own),
           " cannot be told; their limits are unknown");
      Add(PathName(mount.root), top);
      return;
    }
    std::string directory = found.back();
    for (size_t depth = own.down.size(); depth > 0; --depth) {
      std::string level = directory;
      for (size_t i = 0; i < depth; ++i) level += "/" + own.down[i];
      Add(PathName(own.up, own.down, depth), level);
    }
    for (size_t k = found.size(); k > 0; --k) {
      Add(PathName(mount.root.up - k, {}, 0), found[k - 1]);
    }
    Add(PathName(mount.root), top);
  }

  // Descends `levels` unknown names below `directory` to one that has our
  // process in `below`; `found` then holds the directories passed.
  bool Search(const std::string& directory, size_t levels,
              const std::string& below, const std::string& pid,
              std::vector<std::string>* found) {
    if (levels == 0) {
      const Result<std::string> processes =
          ReadProcFile(directory + below + "/cgroup.procs");
      if (!processes.ok()) return false;
      const auto lines = Split(*processes, '\n');
      return std::find(lines.begin(), lines.end(), pid) != lines.end();
    }
    std::error_code error;
    std::filesystem::directory_iterator entry(directory, error);
    for (; !error && entry != std::filesystem::directory_iterator();
         entry.increment(error)) {
      std::error_code type_error;
      if (!entry->is_directory(type_error)) continue;
      if (++searched_ > kMaxDirectoriesSearched) return false;
      found->push_back(entry->path().string());
      if (Search(found->back(), levels - 1, below, pid, found)) return true;
      found->pop_back();
    }
    return false;
  }

  const std::string& root_;
  const int version_;
  MemoryCgroups* const out_;
  int searched_ = 0;
};

}  // namespace

MemoryCgroups FindMemoryCgroups(const std::string& root) {
  MemoryCgroups out;
  const Result<std::string> own = ReadProcFile(root + "/proc/self/cgroup");
  const Result<std::string> mountinfo =
      ReadProcFile(root + "/proc/self/mountinfo");
  if (!own.ok() || !mountinfo.ok()) {
    const Status& status = own.ok() ? mountinfo.status() : own.status();
    if (status.code() == StatusCode::kResourceExhausted) out.exhausted = status;
    out.warnings.push_back(
        StrCat(status.message(), "; cgroup limits are unknown"));
    return out;
  }
  for (const int version : {1, 2}) {
    const std::optional<Path> path = OwnPath(*own, version);
    if (!path) continue;
    const std::vector<Mount> mounts = FindMounts(*mountinfo, version);
    if (mounts.empty() && !path->IsRoot()) {
      out.warnings.push_back(StrCat("cgroup v", version, ": ", PathName(*path),
                                    " is mounted nowhere that we see; its "
                                    "limit is unknown"));
    }
    Finder(root, version, &out).Find(mounts, *path);
  }
  return out;
}

}  // namespace varlane
