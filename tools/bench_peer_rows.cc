// Rows beside an optional peer: a composition of oneDNN GEMMs and softmax.
//
// SPDX-License-Identifier: Apache-2.0

#include <utility>

#include "tools/bench_session.h"
#include "tools/status_util.h"

namespace varlane::tools {
namespace {

using bench::Heads;
using bench::Shape;

Status MeasurePeer(BenchRow* row) {
  row->reason = "built without oneDNN (libdnnl-dev)";
  return {};
}

}  // namespace

void AddPeerRows(BenchSession* session) {
  static const std::vector<Shape> shapes = {
      {"prefill 1x4096@4096", {{1, 4096, 4096}}},
      {"prefill chunk 1x512@8192", {{1, 512, 8192}}},
      {"prefill 8x512@512", {{8, 512, 512}}},
  };
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    if (session->options().quick && dtype != DType::kBF16) continue;
    for (const Shape& shape : shapes) {
      BenchRow row;
      row.name = "oneDNN / ours, " + shape.name + " " + DTypeName(dtype) + " " +
                 Heads{}.Name();
      row.unit = "us";
      row.must = 1.25;
      session->Add(std::move(row),
                   [](BenchRow* to) { return MeasurePeer(to); });
    }
  }
}

}  // namespace varlane::tools
