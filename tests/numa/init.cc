// The first process of the NUMA machine that run_numa_machine.py boots: mounts
// what programs expect, runs the commands of /commands one after the other,
// tells how each ended, and switches the machine off.
//
// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

void Mount(const char* type, const char* at) {
  (void)mkdir(at, 0755);
  if (mount(type, at, type, 0, nullptr) == 0) return;
  std::printf("numa-machine: cannot mount %s: %s\n", at, std::strerror(errno));
}

void Write(const char* path, const char* text) { std::ofstream(path) << text; }

// The program's exit code; 128 + its signal; 127 where there is none.
int RunCommand(const std::string& line) {
  std::istringstream words(line);
  std::vector<std::string> arguments;
  for (std::string word; words >> word;) arguments.push_back(word);
  std::vector<char*> argv;
  for (std::string& word : arguments) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    execv(argv[0], argv.data());
    std::printf("numa-machine: %s: %s\n", argv[0], std::strerror(errno));
    std::fflush(stdout);
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int main() {
  Mount("proc", "/proc");
  Mount("sysfs", "/sys");
  Mount("devtmpfs", "/dev");
  Mount("tmpfs", "/tmp");
  // Pages stay where they were first touched: the kernel's own balancing would
  // make what a test sees a matter of time.
  Write("/proc/sys/kernel/numa_balancing", "0");
  (void)setenv("PATH", "/bin", 1);
  (void)setenv("HOME", "/tmp", 1);
  (void)setenv("TMPDIR", "/tmp", 1);
  (void)setenv("LD_LIBRARY_PATH", "/lib", 1);
  std::ifstream environment("/environment");
  for (std::string line; std::getline(environment, line);) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos) continue;
    (void)setenv(line.substr(0, equals).c_str(), line.c_str() + equals + 1, 1);
  }
  std::ifstream commands("/commands");
  for (std::string line; std::getline(commands, line);) {
    std::printf("numa-machine: run %s\n", line.c_str());
    std::fflush(stdout);
    std::printf("\nnuma-machine: exit %d\n", RunCommand(line));
    std::fflush(stdout);
  }
  std::printf("numa-machine: done\n");
  std::fflush(stdout);
  sync();
  (void)reboot(RB_POWER_OFF);
  return 1;
}
