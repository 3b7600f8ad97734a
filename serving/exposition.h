// Exposition: writes Prometheus' text format, families of samples one by one.
//
// Source: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_SERVING_EXPOSITION_H_
#define VARLANE_SERVING_EXPOSITION_H_

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "varlane/metrics.h"

namespace varlane {

class Exposition {
 public:
  struct Label {
    std::string_view name;
    std::string_view value;
  };

  // `common` stands in every sample. Lifetime: it must outlive this.
  explicit Exposition(std::span<const MetricsLabel> common) : common_(common) {}

  // Begins a family; its samples follow. A counter's name ends in _total.
  void Gauge(std::string_view name, std::string_view help);
  void Counter(std::string_view name, std::string_view help);
  void Sample(std::initializer_list<Label> labels, int64_t value);
  void Sample(std::initializer_list<Label> labels, double value);
  // A family of one sample without labels.
  void Gauge(std::string_view name, std::string_view help, int64_t value) {
    Gauge(name, help);
    Sample({}, value);
  }
  void Counter(std::string_view name, std::string_view help, int64_t value) {
    Counter(name, help);
    Sample({}, value);
  }

  const std::string& text() const { return text_; }

  // Whether `name` may stand before the = of a label.
  static bool IsLabelName(std::string_view name);

 private:
  void Family(std::string_view name, std::string_view help,
              std::string_view type);
  void BeginSample(std::initializer_list<Label> labels);
  void AddLabel(std::string_view name, std::string_view value, bool first);

  const std::span<const MetricsLabel> common_;
  std::string name_;  // of the family
  std::string text_;
};

}  // namespace varlane

#endif  // VARLANE_SERVING_EXPOSITION_H_
