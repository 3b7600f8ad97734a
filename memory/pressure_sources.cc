// SPDX-License-Identifier: Apache-2.0

#include "memory/pressure_sources.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/os_calls.h"
#include "base/strings.h"
#include "memory/proc_file.h"
#include "varlane/memory_budget.h"

namespace varlane {
namespace {

// Of memory.events, and what an increase says. Page cache alone makes a cgroup
// touch high and max all day, so these only say "look".
struct Counter {
  const char* key;
  PressureLevel level;
};
constexpr std::array<Counter, 5> kCounters = {{
    {"low", PressureLevel::kLow},
    {"high", PressureLevel::kLow},
    {"max", PressureLevel::kLow},
    {"oom", PressureLevel::kCritical},
    {"oom_kill", PressureLevel::kCritical},
}};

std::array<int64_t, kCounters.size()> ReadCounters(int fd) {
  std::array<int64_t, kCounters.size()> values{};
  std::array<char, 512> buffer;
  const ssize_t got = os::Pread(fd, buffer.data(), buffer.size(), 0);
  if (got <= 0) return values;
  const std::string_view text(buffer.data(), static_cast<size_t>(got));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = FindCount(text, kCounters[i].key).value_or(0);
  }
  return values;
}

bool WriteAll(int fd, std::string_view text) {
  return os::Write(fd, text.data(), text.size()) ==
         static_cast<ssize_t>(text.size());
}

// Opens what MEMORY_PRESSURE_WATCH may name; a socket is connected to.
OwnedFd OpenWatched(const std::string& path) {
  OwnedFd fd(os::Open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (fd.valid() || errno != ENXIO) {
    if (!fd.valid() && errno == EACCES) {
      fd = OwnedFd(os::Open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    }
    return fd;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    return OwnedFd();
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  fd = OwnedFd(
      os::Socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.valid() &&
      os::Connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                  sizeof(address)) != 0) {
    const int error = errno;
    fd.Reset();
    errno = error;
  }
  return fd;
}

}  // namespace

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = other.Release();
  }
  return *this;
}

int OwnedFd::Release() noexcept { return std::exchange(fd_, -1); }

void OwnedFd::Reset() noexcept {
  if (fd_ >= 0) (void)os::Close(Release());
}

PressureWatch::PressureWatch(std::string name, Kind kind, PressureLevel level)
    : kind_(kind), level_(level) {
  info_.name = std::move(name);
  info_.active = true;
}

PressureWatch& PressureWatch::Fail(const std::string& what, int error) {
  Stop(StrCat(what, ": ", ErrnoText(error)));
  return *this;
}

void PressureWatch::Stop(const std::string& why) {
  info_.active = false;
  info_.problem = why;
  fd_.Reset();
  watched_.Reset();
}

PressureWatch PressureWatch::CgroupEvents(const MemoryCgroup& cgroup) {
  PressureWatch watch(StrCat("cgroup v2 memory.events ", cgroup.path),
                      Kind::kCounters, PressureLevel::kLow);
  const std::string path = cgroup.directory + "/memory.events";
  watch.fd_ = OwnedFd(os::Open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!watch.fd_.valid()) return std::move(watch.Fail(path, errno));
  watch.poll_events_ = POLLPRI;
  watch.counters_ = ReadCounters(watch.fd());
  return watch;
}

PressureWatch PressureWatch::Psi(const std::string& path, const char* kind,
                                 int64_t stall_us, PressureLevel level) {
  constexpr int64_t kWindowUs = 2'000'000;
  PressureWatch watch(StrCat("PSI ", path, " (", kind, " ", stall_us / 1000,
                             " ms in ", kWindowUs / 1'000'000, " s)"),
                      Kind::kPriority, level);
  watch.fd_ = OwnedFd(os::Open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!watch.fd_.valid()) return std::move(watch.Fail(path, errno));
  // The kernel takes the terminating 0 for the text's last byte.
  const std::string trigger = StrCat(kind, " ", stall_us, " ", kWindowUs);
  if (os::Write(watch.fd(), trigger.c_str(), trigger.size() + 1) < 0) {
    return std::move(watch.Fail("the kernel refuses a trigger", errno));
  }
  watch.poll_events_ = POLLPRI;
  return watch;
}

// cgroup v1: an eventfd that stands for a file of the cgroup.
bool PressureWatch::OpenEventControl(const MemoryCgroup& cgroup,
                                     const std::string& file,
                                     const std::string& argument) {
  const std::string path = StrCat(cgroup.directory, "/", file);
  watched_ = OwnedFd(os::Open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!watched_.valid()) return Fail(path, errno).info_.active;
  const std::string control = cgroup.directory + "/cgroup.event_control";
  const OwnedFd control_fd(os::Open(control.c_str(), O_WRONLY | O_CLOEXEC));
  if (!control_fd.valid()) return Fail(control, errno).info_.active;
  fd_ = OwnedFd(os::Eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd_.valid()) return Fail("eventfd", errno).info_.active;
  if (!WriteAll(control_fd.get(),
                StrCat(fd_.get(), " ", watched_.get(), " ", argument))) {
    return Fail(control, errno).info_.active;
  }
  poll_events_ = POLLIN;
  return true;
}

PressureWatch PressureWatch::V1Level(const MemoryCgroup& cgroup,
                                     const char* name, PressureLevel level) {
  PressureWatch watch(
      StrCat("cgroup v1 memory.pressure_level ", name, " ", cgroup.path),
      Kind::kEventFd, level);
  watch.OpenEventControl(cgroup, "memory.pressure_level", name);
  return watch;
}

PressureWatch PressureWatch::V1Usage(const MemoryCgroup& cgroup,
                                     int64_t bytes) {
  PressureWatch watch(
      StrCat("cgroup v1 usage of ", FormatBytes(bytes), " ", cgroup.path),
      Kind::kEventFd, PressureLevel::kNone);
  watch.OpenEventControl(cgroup, "memory.usage_in_bytes", StrCat(bytes));
  return watch;
}

PressureWatch PressureWatch::Systemd(const std::string& path,
                                     const std::string& write) {
  PressureWatch watch(StrCat("systemd ", path), Kind::kPriority,
                      PressureLevel::kMedium);
  const std::optional<std::string> bytes = DecodeBase64(write);
  if (!bytes) {
    watch.Stop("MEMORY_PRESSURE_WRITE is not base64");
    return watch;
  }
  watch.fd_ = OpenWatched(path);
  if (!watch.fd_.valid()) return std::move(watch.Fail(path, errno));
  struct stat status {};
  if (os::Fstat(watch.fd(), &status) != 0) {
    return std::move(watch.Fail(path, errno));
  }
  const bool stream = S_ISFIFO(status.st_mode) || S_ISSOCK(status.st_mode);
  if (!stream && !S_ISREG(status.st_mode)) {
    watch.Stop("neither a file, a FIFO nor a socket");
    return watch;
  }
  // The kernel takes the terminating 0 of a PSI trigger where there is one.
  if (!bytes->empty() && !WriteAll(watch.fd(), *bytes)) {
    return std::move(watch.Fail("writing MEMORY_PRESSURE_WRITE", errno));
  }
  watch.kind_ = stream ? Kind::kStream : Kind::kPriority;
  watch.poll_events_ = stream ? POLLIN : POLLPRI;
  return watch;
}

std::optional<PressureLevel> PressureWatch::Take(short ready) {
  if (!info_.active) return std::nullopt;
  std::optional<PressureLevel> level;
  if (kind_ == Kind::kCounters) {
    level = CompareCounters();  // kernfs says POLLERR with POLLPRI: no error
  } else if ((ready & poll_events_) != 0) {
    level = kind_ == Kind::kPriority ? level_ : Drain();
  } else if ((ready & (POLLERR | POLLHUP | POLLNVAL)) != 0) {
    Stop("gone");  // its cgroup was removed, the manager hung up
  }
  if (level) ++info_.events;
  return level;
}

std::optional<PressureLevel> PressureWatch::CompareCounters() {
  const auto now = ReadCounters(fd());
  std::optional<PressureLevel> level;
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] > counters_[i]) {
      level =
          std::max(level.value_or(PressureLevel::kNone), kCounters[i].level);
    }
    counters_[i] = std::max(counters_[i], now[i]);
  }
  return level;
}

// Reads what there is, or poll would not sleep again.
std::optional<PressureLevel> PressureWatch::Drain() {
  std::array<char, 256> buffer;
  bool any = false;
  for (;;) {
    const ssize_t got = os::Read(fd(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno != EAGAIN) Stop("reading failed");
    if (got == 0) Stop("closed by the other side");
    if (got <= 0) break;
    any = true;
    if (kind_ == Kind::kEventFd) break;
  }
  return any ? std::optional(level_) : std::nullopt;
}

std::optional<std::string> DecodeBase64(std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with('=')) text.remove_suffix(1);
  if (text.size() % 4 == 1) return std::nullopt;
  std::string bytes;
  uint32_t bits = 0;
  int num_bits = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = (bits << 6 | static_cast<uint32_t>(digit)) & 0xffffff;
    num_bits += 6;
    if (num_bits < 8) continue;
    num_bits -= 8;
    bytes += static_cast<char>(bits >> num_bits & 0xff);
  }
  return bytes;
}

// --- which ones ------------------------------------------------------------

namespace {

void AddCgroups(const std::string& root, std::vector<PressureWatch>* watches) {
  bool own_v1 = true;
  bool own_v2 = true;
  for (const MemoryCgroup& cgroup : FindMemoryCgroups(root).levels) {
    const bool v1 = cgroup.version == 1;
    const Result<std::string> text = ReadProcFile(
        cgroup.directory + (v1 ? "/memory.limit_in_bytes" : "/memory.max"));
    if (!text.ok()) continue;  // a v2 level without the controller
    const int64_t limit = ParseCount(*text).value_or(0);  // 0: "max"
    const bool limited = limit > 0 && limit < int64_t{1} << 62;
    bool& own = v1 ? own_v1 : own_v2;
    if (v1 && own) {
      watches->push_back(
          PressureWatch::V1Level(cgroup, "low", PressureLevel::kLow));
      watches->push_back(
          PressureWatch::V1Level(cgroup, "medium", PressureLevel::kMedium));
      watches->push_back(
          PressureWatch::V1Level(cgroup, "critical", PressureLevel::kCritical));
    }
    if (v1 && limited) {
      const int64_t reserve = LimitReserveBytes(limit);
      for (const int64_t quarters : {3, 2, 1}) {
        watches->push_back(
            PressureWatch::V1Usage(cgroup, limit - reserve / 4 * quarters));
      }
    }
    if (!v1 && (own || limited)) {
      watches->push_back(PressureWatch::CgroupEvents(cgroup));
    }
    if (!v1 && own) {
      const std::string psi = cgroup.directory + "/memory.pressure";
      watches->push_back(
          PressureWatch::Psi(psi, "some", 200'000, PressureLevel::kMedium));
      watches->push_back(
          PressureWatch::Psi(psi, "full", 400'000, PressureLevel::kCritical));
    }
    own = false;
  }
}

}  // namespace

std::vector<PressureWatch> OpenPressureSources(const PressureOptions& options) {
  std::vector<PressureWatch> watches;
  if (options.systemd_watch == "/dev/null") return watches;
  if (options.cgroups) AddCgroups(options.root, &watches);
  if (options.psi) {
    const std::string path = options.root + "/proc/pressure/memory";
    watches.push_back(
        PressureWatch::Psi(path, "some", 200'000, PressureLevel::kMedium));
    watches.push_back(
        PressureWatch::Psi(path, "full", 400'000, PressureLevel::kCritical));
  }
  if (!options.systemd_watch.empty()) {
    watches.push_back(
        PressureWatch::Systemd(options.systemd_watch, options.systemd_write));
  }
  return watches;
}

}  // namespace varlane
