// SPDX-License-Identifier: Apache-2.0

#include "tools/supervise.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <system_error>
#include <thread>

#include "tools/clock.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

constexpr int kWorkerDone = 0;
constexpr int kWorkerFailed = 1;  // shared->message says why

// The signals that the supervisor answers, blocked for as long as this lives.
class SignalGuard {
 public:
  SignalGuard() {
    sigemptyset(&set_);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
      sigaddset(&set_, number);
    }
    sigprocmask(SIG_BLOCK, &set_, &before_);
    // Where whoever started us ignores it, nobody would tell how a child ended.
    signal(SIGCHLD, SIG_DFL);
  }
  ~SignalGuard() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

  // The next one, or 0 after a tenth of a second.
  int Wait() const {
    const timespec timeout = {0, 100'000'000};
    return std::max(0, sigtimedwait(&set_, nullptr, &timeout));
  }
  // In a child: the terminal's ^C is the supervisor's business.
  void Leave() const {
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
      signal(number, SIG_IGN);
    }
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t set_;
  sigset_t before_;
};

// A forked process that ends with us at the latest.
class Child {
 public:
  Child() = default;
  ~Child() { Kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // Returns in both processes; in the child is_child() holds.
  Status Fork(const char* name) {
    const pid_t parent = getpid();
    std::fflush(nullptr);  // or both would write it
    pid_ = fork();
    if (pid_ < 0) {
      return Fail(StatusCode::kResourceExhausted, "cannot fork the {}: {}",
                  name, std::generic_category().message(errno));
    }
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(kWorkerFailed);  // it is gone already
    }
    return {};
  }
  bool is_child() const { return pid_ == 0; }

  // Whether it has ended; then wait_status() says how.
  bool HasEnded() {
    if (pid_ <= 0) return true;
    const pid_t got = waitpid(pid_, &wait_status_, WNOHANG);
    if (got == pid_ || (got < 0 && errno == ECHILD)) pid_ = -1;
    return pid_ < 0;
  }
  int wait_status() const { return wait_status_; }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    while (waitpid(pid_, &wait_status_, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int wait_status_ = 0;
};

std::string DescribeEnd(int status) {
  if (WIFSIGNALED(status)) {
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                       strsignal(WTERMSIG(status)));
  }
  return fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

[[noreturn]] void RunBallast(const SuperviseOptions& options,
                             BallastState* state) {
  Ballast ballast(options.ballast_times, options.seed, state);
  // Until we are killed: by the supervisor, or with it.
  for (;;) {
    ballast.Tick(NowNs());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

[[noreturn]] void RunWork(StressShared* shared,
                          const std::function<Status()>& work) {
  Status status;
  try {
    status = work();
  } catch (const std::exception& error) {
    status = Fail(StatusCode::kInternal, "failed: {}", error.what());
  }
  std::fflush(nullptr);
  if (status.ok()) std::exit(kWorkerDone);
  shared->code = static_cast<int>(status.code());
  const std::string message(status.message());
  message.copy(shared->message.data(), shared->message.size() - 1);
  std::exit(kWorkerFailed);
}

// The supervisor's side, once everybody runs.
class Watch {
 public:
  Watch(const SuperviseOptions& options, const StressShared& shared,
        const SignalGuard& signals)
      : options_(options), shared_(shared), signals_(signals) {}

  Status Run(Child* worker, Child* ballast) {
    for (;;) {
      const int number = signals_.Wait();
      if (number != 0 && number != SIGCHLD) {
        return Fail(StatusCode::kCancelled, "stopped by signal {} ({})", number,
                    strsignal(number));
      }
      if (worker->HasEnded()) return Verdict(worker->wait_status());
      if (options_.ballast && ballast->HasEnded()) {
        return Fail(StatusCode::kInternal, "the ballast {}{}",
                    DescribeEnd(ballast->wait_status()), OomText());
      }
      VARLANE_TOOLS_TRY(CheckHeartbeat());
    }
  }

 private:
  std::string OomText() const {
    if (options_.cgroup == nullptr) return "";
    return fmt::format("; oom_kill = {} in its cgroup",
                       options_.cgroup->oom_kills());
  }
  Status Verdict(int status) const {
    if (WIFEXITED(status) && WEXITSTATUS(status) == kWorkerDone) return {};
    if (WIFEXITED(status) && WEXITSTATUS(status) == kWorkerFailed &&
        shared_.code != 0) {
      return {static_cast<StatusCode>(shared_.code.load()),
              std::string(shared_.message.data())};
    }
    return Fail(StatusCode::kInternal, "the run {} after {} steps{}",
                DescribeEnd(status), shared_.heartbeats.load(), OomText());
  }
  Status CheckHeartbeat() {
    const int64_t now_ns = NowNs();
    const int64_t beats = shared_.heartbeats;
    if (beats != last_beats_) {
      last_beats_ = beats;
      last_ns_ = now_ns;
    }
    const double silent = static_cast<double>(now_ns - last_ns_) * 1e-9;
    if (silent < options_.hang_seconds) return {};
    return Fail(StatusCode::kInternal,
                "the run hangs: no step for {:.0f} s after {} steps", silent,
                beats);
  }

  const SuperviseOptions& options_;
  const StressShared& shared_;
  const SignalGuard& signals_;
  int64_t last_beats_ = -1;
  int64_t last_ns_ = NowNs();
};

}  // namespace

Status Supervise(const SuperviseOptions& options, StressShared* shared,
                 const std::function<Status()>& work) {
  const SignalGuard signals;
  Child ballast;
  Child worker;
  if (options.ballast) {
    VARLANE_TOOLS_TRY(ballast.Fork("ballast"));
    if (ballast.is_child()) {
      signals.Leave();
      if (options.cgroup != nullptr && !options.cgroup->Join().ok()) {
        _exit(kWorkerFailed);
      }
      RunBallast(options, &shared->ballast);
    }
  }
  VARLANE_TOOLS_TRY(worker.Fork("run"));
  if (worker.is_child()) {
    signals.Leave();
    RunWork(shared, [&]() -> Status {
      if (options.cgroup != nullptr) {
        VARLANE_TOOLS_TRY(options.cgroup->Join());
      }
      return work();
    });
  }
  return Watch(options, *shared, signals).Run(&worker, &ballast);
}

}  // namespace varlane::tools
