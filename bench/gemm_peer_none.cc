// GemmPeer where there is no oneDNN to build it with.
//
// SPDX-License-Identifier: Apache-2.0

#include <utility>

#include "bench/gemm_peer.h"

namespace varlane::bench {

class GemmPeer::Impl {};

GemmPeer::GemmPeer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmPeer::~GemmPeer() = default;

Result<std::unique_ptr<GemmPeer>> GemmPeer::Create(Runtime*, const Workload&,
                                                   bool) {
  return Status(StatusCode::kUnimplemented,
                "built without oneDNN (install libdnnl-dev and configure "
                "again)");
}

bool GemmPeer::UsesAmx(DType) { return false; }

Result<double> GemmPeer::Run() {
  return Status(StatusCode::kUnimplemented, "built without oneDNN");
}

std::span<const float> GemmPeer::out() const { return {}; }

}  // namespace varlane::bench
