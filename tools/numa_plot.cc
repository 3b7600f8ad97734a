// The figures of `varlane bench numa` as tables and pictures.
//
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tools/bench_numa.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

constexpr int kBarWidth = 40;

std::string Bar(double value, double most) {
  const double width = most > 0 ? value / most * kBarWidth : 0;
  return std::string(static_cast<size_t>(std::lround(width)), '#');
}

// The number that `varlane info` calls the node.
int64_t OsIndex(const BenchNumaResult& result, size_t node) {
  return result.machine["nodes"][node]["os_index"].get<int64_t>();
}

std::string GnuplotScript(const BenchNumaResult& result,
                          const std::string& terminal,
                          const std::string& path) {
  std::string script = fmt::format(
      "set terminal {}\nset output '{}'\nset multiplot layout 1,2\n"
      "set yrange [0:*]\nset ylabel 'GB/s'\nset grid y\nset key off\n"
      "set xlabel 'workers'\nset title 'Decode over all nodes'\n"
      "plot '-' with linespoints pointtype 7\n",
      terminal, path);
  for (size_t i = 0; i < result.scaling.size(); ++i) {
    script +=
        fmt::format("{} {:.4f}\n", result.workers[i], result.scaling[i] * 1e-9);
  }
  script +=
      "e\nset title 'Workers of a node, memory of a node'\nset xlabel ''\n"
      "set style fill solid 0.6\nset boxwidth 0.8\nset xtics rotate by 45 "
      "right\nplot '-' using 0:2:xtic(1) with boxes\n";
  for (size_t i = 0; i < result.matrix.size(); ++i) {
    for (size_t j = 0; j < result.matrix[i].size(); ++j) {
      const std::string memory = j < result.matrix.size()
                                     ? fmt::format("{}", OsIndex(result, j))
                                     : "all";
      script += fmt::format("\"{} from {}\" {:.4f}\n", OsIndex(result, i),
                            memory, result.matrix[i][j] * 1e-9);
    }
  }
  return script + "e\nunset multiplot\n";
}

}  // namespace

std::string MatrixText(const BenchNumaResult& result) {
  using Align = Table::Align;
  Table table({Align::kLeft, Align::kRight});
  std::vector<std::string> head = {"GB/s, memory of"};
  for (size_t i = 0; i < result.matrix.size(); ++i) {
    head.push_back(fmt::format("node {}", OsIndex(result, i)));
  }
  if (result.matrix.size() > 1) head.push_back("all in turn");
  table.AddRow(head);
  for (size_t i = 0; i < result.matrix.size(); ++i) {
    std::vector<std::string> line = {
        fmt::format("workers of node {}", OsIndex(result, i))};
    for (const double rate : result.matrix[i]) {
      line.push_back(fmt::format("{:.2f}", rate * 1e-9));
    }
    table.AddRow(line);
  }
  return table.ToString();
}

std::string ScalingText(const BenchNumaResult& result) {
  using Align = Table::Align;
  Table table({Align::kRight, Align::kRight, Align::kRight, Align::kLeft});
  table.AddRow({"workers", "GB/s", "speed-up", ""});
  const double most =
      *std::max_element(result.scaling.begin(), result.scaling.end());
  for (size_t i = 0; i < result.scaling.size(); ++i) {
    table.AddRow({fmt::format("{}", result.workers[i]),
                  fmt::format("{:.2f}", result.scaling[i] * 1e-9),
                  fmt::format("{:.2f}", result.scaling[i] / result.scaling[0]),
                  Bar(result.scaling[i], most)});
  }
  return table.ToString();
}

Status PlotNuma(const BenchNumaResult& result, const std::string& path) {
  std::string terminal;
  if (path.ends_with(".svg")) terminal = "svg size 1000,420";
  if (path.ends_with(".png")) terminal = "png size 1000,420";
  if (terminal.empty() || path.find('\'') != std::string::npos) {
    return BadArgument("plot = \"{}\", must end in .svg or .png", path);
  }
  const std::string script = path + ".gp";
  {
    std::ofstream file(script);
    file << GnuplotScript(result, terminal, path);
    if (!file.flush()) {
      return Fail(StatusCode::kUnavailable, "cannot write {}", script);
    }
  }
  const std::string command =
      fmt::format("gnuplot '{}' >/dev/null 2>&1", script);
  if (std::system(command.c_str()) != 0) {
    return Fail(StatusCode::kUnavailable,
                "no plot: gnuplot is not installed, or failed; its script is "
                "{}",
                script);
  }
  (void)std::remove(script.c_str());
  return {};
}

}  // namespace varlane::tools
