// Progress: one line on stderr, only on a terminal and only after two seconds.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_PROGRESS_H_
#define VARLANE_TOOLS_PROGRESS_H_

#include <chrono>
#include <string>
#include <string_view>

namespace varlane::tools {

// Threads: one thread uses one bar. Cost: a clock read for each Update; the
// line is drawn at most ten times a second.
class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();  // wipes the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of `total` (0 = unknown); `detail` stands behind the bar.
  void Update(double done, double total, std::string_view detail = {});

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_;
  bool is_terminal_;
  bool drawn_ = false;
  Clock::time_point start_;
  Clock::time_point last_;
};

// "[#####.....]", `width` characters between the brackets.
std::string ProgressBar(double share, int width);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_PROGRESS_H_
