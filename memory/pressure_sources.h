// What the kernel and the service manager offer to wait for: descriptors that
// become ready when memory gets short.
//
// Layer 2.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_MEMORY_PRESSURE_SOURCES_H_
#define VARLANE_MEMORY_PRESSURE_SOURCES_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/cgroup.h"
#include "varlane/pressure.h"

namespace varlane {

// A descriptor of ours; closed when it goes.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(other.Release()) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  ~OwnedFd() { Reset(); }

  int get() const noexcept { return fd_; }
  bool valid() const noexcept { return fd_ >= 0; }
  int Release() noexcept;
  void Reset() noexcept;

 private:
  int fd_ = -1;
};

// One source. What it says of the level is a hint that holds for a while; what
// is available is always measured.
class PressureWatch {
 public:
  // memory.events of a v2 cgroup at `directory`.
  static PressureWatch CgroupEvents(const MemoryCgroup& cgroup);
  // A PSI file: "some" or "full" beyond `stall_us` within 2 s. A window that is
  // no multiple of 2 s is refused without CAP_SYS_RESOURCE.
  static PressureWatch Psi(const std::string& path, const char* kind,
                           int64_t stall_us, PressureLevel level);
  // v1: memory.pressure_level "low", "medium" or "critical".
  static PressureWatch V1Level(const MemoryCgroup& cgroup, const char* name,
                               PressureLevel level);
  // v1: usage crosses `bytes`, either way. Says only: measure.
  static PressureWatch V1Usage(const MemoryCgroup& cgroup, int64_t bytes);
  // What MEMORY_PRESSURE_WATCH names: a file with POLLPRI, a FIFO or a socket.
  // `write`: base64, written first.
  static PressureWatch Systemd(const std::string& path,
                               const std::string& write);

  // To poll; -1 where the source is not active.
  int fd() const noexcept { return fd_.get(); }
  short poll_events() const noexcept { return poll_events_; }
  const PressureSource& info() const noexcept { return info_; }

  // Takes what poll told. The level that the source tells of; nothing where it
  // has nothing to tell.
  std::optional<PressureLevel> Take(short ready);

 private:
  enum class Kind { kPriority, kEventFd, kStream, kCounters };

  PressureWatch(std::string name, Kind kind, PressureLevel level);
  PressureWatch& Fail(const std::string& what, int error);
  void Stop(const std::string& why);
  bool OpenEventControl(const MemoryCgroup& cgroup, const std::string& file,
                        const std::string& argument);
  std::optional<PressureLevel> CompareCounters();
  std::optional<PressureLevel> Drain();

  PressureSource info_;
  Kind kind_;
  PressureLevel level_;
  short poll_events_ = 0;
  OwnedFd fd_;
  OwnedFd watched_;  // v1: the file that the eventfd stands for
  std::array<int64_t, 5> counters_{};
};

// All that apply under `options`, the ones that failed included.
std::vector<PressureWatch> OpenPressureSources(const PressureOptions& options);

// The bytes of base64 text (RFC 4648, padded or not); nothing where it is none.
std::optional<std::string> DecodeBase64(std::string_view text);

}  // namespace varlane

#endif  // VARLANE_MEMORY_PRESSURE_SOURCES_H_
