// A memory cgroup of this machine, made for a test below our own, so that
// whatever bounds us goes on to do so. v1 or v2; where neither can be made the
// reason says why, and the test is skipped with it.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_REAL_CGROUP_H_
#define VARLANE_TESTS_TESTING_REAL_CGROUP_H_

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace varlane::testing {

inline bool WriteFile(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool ok =
      write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  return ok;
}

class RealCgroup {
 public:
  explicit RealCgroup(int64_t limit_bytes) {
    static int number = 0;
    const std::string leaf = "/varlane_test_" + std::to_string(getpid()) + "_" +
                             std::to_string(number++);
    std::string v1_reason = Make(1, leaf, limit_bytes);
    if (v1_reason.empty()) return;
    const std::string v2_reason = Make(2, leaf, limit_bytes);
    if (!v2_reason.empty()) reason_ = v1_reason + "; " + v2_reason;
  }
  ~RealCgroup() {
    // A process that has just ended may still be on its way out of it.
    for (int i = 0; !path_.empty() && i < 2000; ++i) {
      if (rmdir(path_.c_str()) == 0 || errno != EBUSY) break;
      usleep(1000);
    }
  }
  RealCgroup(const RealCgroup&) = delete;
  RealCgroup& operator=(const RealCgroup&) = delete;

  int version() const { return version_; }
  const std::string& path() const { return path_; }
  const std::string& reason() const { return reason_; }  // empty: it is there

  bool SetLimit(int64_t bytes) const {
    return WriteFile(
        path_ + (version_ == 1 ? "/memory.limit_in_bytes" : "/memory.max"),
        std::to_string(bytes));
  }
  // Processes that the kernel killed in it for want of memory.
  int64_t oom_kills() const {
    std::ifstream in(
        path_ + (version_ == 1 ? "/memory.oom_control" : "/memory.events"));
    std::string key;
    int64_t value = 0;
    while (in >> key >> value) {
      if (key == "oom_kill") return value;
    }
    return -1;
  }

  // How often memory was found short in it and had to be reclaimed.
  int64_t times_full() const {
    std::ifstream in(path_ +
                     (version_ == 1 ? "/memory.failcnt" : "/memory.events"));
    int64_t value = -1;
    if (version_ == 1) {
      in >> value;
      return value;
    }
    for (std::string key; in >> key >> value;) {
      if (key == "max") return value;
    }
    return -1;
  }

  // Runs tests of this binary, as `filter` names them, in a process of its own
  // that is in the cgroup from its first moment. Returns as waitpid does.
  int RunInside(const std::string& filter) const {
    return RunInside({"/proc/self/exe", "--gtest_filter=" + filter,
                      "--gtest_also_run_disabled_tests", "--gtest_brief=1"},
                     "");
  }
  // The same with a command, program first. Both its outputs go to the file
  // `output`; "" = to ours.
  int RunInside(const std::vector<std::string>& command,
                const std::string& output) const {
    int status = -1;
    const pid_t child = StartInside(command, output);
    if (child > 0) waitpid(child, &status, 0);
    return status;
  }
  // The same without waiting; for waitpid.
  pid_t StartInside(const std::vector<std::string>& command,
                    const std::string& output) const {
    const std::string procs = path_ + "/cgroup.procs";
    std::vector<char*> arguments;
    for (const std::string& word : command) {
      arguments.push_back(const_cast<char*>(word.c_str()));
    }
    arguments.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      if (!WriteFile(procs, "0")) _exit(99);
      setenv("VARLANE_TEST_INSIDE", path_.c_str(), 1);
      if (!output.empty()) {
        const int fd = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, 1);
        dup2(fd, 2);
      }
      execv(arguments[0], arguments.data());
      _exit(98);
    }
    return child;
  }
  // In such a process: the cgroup's directory; else null.
  static const char* Inside() { return getenv("VARLANE_TEST_INSIDE"); }

 private:
  // Our own cgroup's directory where the hierarchy is mounted as usual.
  static std::string OwnDirectory(int version) {
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

  std::string Make(int version, const std::string& leaf, int64_t limit_bytes) {
    const std::string name = "cgroup v" + std::to_string(version) + ": ";
    const std::string own = OwnDirectory(version);
    if (own.empty()) return name + "none";
    const std::string path = own + leaf;
    if (mkdir(path.c_str(), 0755) != 0) {
      return name + "cannot make " + path + ": " + std::strerror(errno);
    }
    path_ = path;
    version_ = version;
    if (SetLimit(limit_bytes)) return "";
    rmdir(path.c_str());
    path_.clear();
    return name + "no memory limit can be set in " + path;
  }

  int version_ = 0;
  std::string path_;
  std::string reason_;
};

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_REAL_CGROUP_H_
