// RateEstimate: a running estimate of amount per second.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_BASE_RATE_ESTIMATE_H_
#define VARLANE_BASE_RATE_ESTIMATE_H_

namespace varlane {

// A quotient of two sums that forget: large samples weigh more than small ones,
// and the last eight or so more than all before. Not synchronised.
class RateEstimate {
 public:
  void Add(double amount, double seconds) noexcept {
    if (!(amount > 0) || !(seconds > 0)) return;
    constexpr double kKept = 7.0 / 8;
    amount_ = kKept * amount_ + amount;
    seconds_ = kKept * seconds_ + seconds;
  }
  // 0 while nothing was measured.
  double per_second() const noexcept {
    return seconds_ > 0 ? amount_ / seconds_ : 0;
  }

 private:
  double amount_ = 0;
  double seconds_ = 0;
};

}  // namespace varlane

#endif  // VARLANE_BASE_RATE_ESTIMATE_H_
