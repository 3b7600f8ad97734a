// Progress: one line on stderr.
//
// SPDX-License-Identifier: Apache-2.0

#include "tools/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace varlane::tools {

std::string ProgressBar(double share, int width) {
  const double clamped = std::clamp(share, 0.0, 1.0);
  const auto full = static_cast<size_t>(clamped * width);
  std::string bar(static_cast<size_t>(width), '.');
  std::fill_n(bar.begin(), full, '#');
  return "[" + bar + "]";
}

Progress::Progress(std::string label)
    : label_(std::move(label)),
      is_terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_(start_) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

void Progress::Update(double done, double total, std::string_view detail) {
  if (!is_terminal_) return;
  const Clock::time_point now = Clock::now();
  if (now - start_ < std::chrono::seconds(2)) return;
  if (now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  std::string line = fmt::format("\r{} ", label_);
  if (total > 0) {
    const double share = done / total;
    line += fmt::format("{} {:3.0f}% ", ProgressBar(share, 24), share * 100);
    if (share > 0.01) {
      line += fmt::format("{:.0f} s left ", seconds / share - seconds);
    }
  } else {
    line += fmt::format("{:.0f} s ", seconds);
  }
  line += detail;
  line += "\033[K";
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace varlane::tools
