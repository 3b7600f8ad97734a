// SPDX-License-Identifier: Apache-2.0

#include "tools/child_cgroup.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>

#include "tools/parse.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

constexpr const char* kPrefix = "varlane_stress_";

std::string ErrorText(int error) {
  return std::generic_category().message(error);
}

// Returns errno. The kernel wants the whole text in one write.
int WriteText(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return errno;
  const ssize_t written = write(fd, text.data(), text.size());
  const int error = written == static_cast<ssize_t>(text.size()) ? 0 : errno;
  close(fd);
  return error;
}

// The number after `key`, or, without a key, the file's first; -1 = none.
int64_t ReadCount(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  if (key.empty()) {
    int64_t value = -1;
    return in >> value ? value : -1;
  }
  std::string word;
  int64_t value = 0;
  while (in >> word >> value) {
    if (word == key) return value;
  }
  return -1;
}

// Our own cgroup's directory where the hierarchy is mounted as usual; "" =
// none.
std::string OwnDirectory(int version) {
  std::ifstream cgroups("/proc/self/cgroup");
  const std::string marker = version == 1 ? ":memory:" : "0::";
  for (std::string line; std::getline(cgroups, line);) {
    const size_t at = line.find(marker);
    if (at == std::string::npos || (version == 2 && at != 0)) continue;
    const std::string path = line.substr(at + marker.size());
    return (version == 1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup") +
           (path == "/" ? "" : path);
  }
  return "";
}

// Those whose maker is no more: it was killed.
void RemoveLeftOvers(const std::string& own) {
  DIR* const directory = opendir(own.c_str());
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.rfind(kPrefix, 0) != 0) continue;
    const auto pid =
        ParseNumber<pid_t>(std::string_view(name).substr(strlen(kPrefix)));
    if (pid && kill(*pid, 0) != 0 && errno == ESRCH) {
      rmdir((own + "/" + name).c_str());
    }
  }
  closedir(directory);
}

}  // namespace

std::string ChildCgroup::Make(int version, const std::string& leaf,
                              int64_t limit_bytes,
                              std::unique_ptr<ChildCgroup>* made) {
  const std::string name = fmt::format("cgroup v{}: ", version);
  const std::string own = OwnDirectory(version);
  if (own.empty()) return name + "we are in none";
  RemoveLeftOvers(own);
  const std::string path = own + "/" + leaf;
  if (mkdir(path.c_str(), 0755) != 0) {
    return fmt::format("{}cannot make {}: {}", name, path, ErrorText(errno));
  }
  const std::string limit =
      path + (version == 1 ? "/memory.limit_in_bytes" : "/memory.max");
  if (const int error = WriteText(limit, std::to_string(limit_bytes));
      error != 0) {
    rmdir(path.c_str());
    return fmt::format("{}cannot write {}: {}", name, limit, ErrorText(error));
  }
  made->reset(new ChildCgroup(version, path, limit_bytes));
  return "";
}

Result<std::unique_ptr<ChildCgroup>> ChildCgroup::Create(int64_t limit_bytes) {
  const std::string leaf = kPrefix + std::to_string(getpid());
  std::unique_ptr<ChildCgroup> made;
  const std::string v1 = Make(1, leaf, limit_bytes, &made);
  if (made) return made;
  const std::string v2 = Make(2, leaf, limit_bytes, &made);
  if (made) return made;
  return Fail(StatusCode::kUnavailable,
              "no memory cgroup can be made here: {}; {}", v1, v2);
}

ChildCgroup::~ChildCgroup() { (void)Remove(); }

Status ChildCgroup::Join() const {
  const std::string file = path_ + "/cgroup.procs";
  const int error = WriteText(file, "0");
  if (error == 0) return {};
  return Fail(StatusCode::kUnavailable, "cannot write {}: {}", file,
              ErrorText(error));
}

int64_t ChildCgroup::oom_kills() const {
  return ReadCount(
      path_ + (version_ == 1 ? "/memory.oom_control" : "/memory.events"),
      "oom_kill");
}

int64_t ChildCgroup::peak_bytes() const {
  return ReadCount(
      path_ + (version_ == 1 ? "/memory.max_usage_in_bytes" : "/memory.peak"),
      "");
}

int64_t ChildCgroup::limit_hits() const {
  return version_ == 1 ? ReadCount(path_ + "/memory.failcnt", "")
                       : ReadCount(path_ + "/memory.events", "max");
}

Status ChildCgroup::Remove() {
  if (path_.empty()) return {};
  const std::string path = std::exchange(path_, "");
  // A process that has just ended may still be on its way out of it.
  for (int i = 0; i < 5000; ++i) {
    if (rmdir(path.c_str()) == 0 || errno == ENOENT) return {};
    if (errno != EBUSY) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Fail(StatusCode::kInternal, "cannot remove {}: {}", path,
              ErrorText(errno));
}

}  // namespace varlane::tools
