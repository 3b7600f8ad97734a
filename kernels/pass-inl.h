// One compilation of all kernels, for the target and namespace in force.
//
// A .cc includes this once per Highway target with VARLANE_NS naming that
// target's namespace, and twice more for AMD's CPUs: AVX3_BF16 and AVX3_ZEN5.
// Highway 1.0.3 has no target with avx512_bf16, so in the AVX3 pass of the bf16
// cache we widen the target string and compile again into namespaces of our
// own, calling Highway's AVX3 functions (whose features are a subset, hence
// inlinable).
//
// No guard: it is meant to be included again.
// SPDX-License-Identifier: Apache-2.0

#include "kernels/fma-inl.h"
// After fma-inl.h:
#include "kernels/vec-inl.h"
// After vec-inl.h:
#include "kernels/exp2-inl.h"
// After vec-inl.h:
#include "kernels/run-inl.h"
// After run-inl.h:
#include "kernels/prefetch-inl.h"
// After vec-inl.h:
#include "kernels/pace-inl.h"
// After vec-inl.h:
#include "kernels/origin-inl.h"
// After run-inl.h:
#include "kernels/rows-inl.h"
// After rows-inl.h:
#include "kernels/softmax-inl.h"
// After softmax-inl.h:
#include "kernels/multiply-inl.h"
// After multiply-inl.h:
#include "kernels/tile-inl.h"
// After tile-inl.h:
#include "kernels/panel-inl.h"
// After panel-inl.h:
#include "kernels/widen-inl.h"
// After widen-inl.h:
#include "kernels/workspace-inl.h"
// After workspace-inl.h:
#include "kernels/modify-inl.h"
// After modify-inl.h:
#include "kernels/fetch-inl.h"
// After fetch-inl.h:
#include "kernels/sweep-inl.h"
// After workspace-inl.h:
#include "kernels/scored_rows-inl.h"
// After scored_rows-inl.h:
#include "kernels/rare_pass-inl.h"
// After rare_pass-inl.h:
#include "kernels/group_pass-inl.h"
// After group_pass-inl.h:
#include "kernels/group_rows-inl.h"
// After fetch-inl.h:
#include "kernels/open_group-inl.h"
// After open_group-inl.h:
#include "kernels/heads_pass-inl.h"
// After heads_pass-inl.h:
#include "kernels/run_pass-inl.h"
// After run_pass-inl.h:
#include "kernels/attend-inl.h"
// After attend-inl.h:
#include "kernels/write-inl.h"
// After rows-inl.h:
#include "kernels/merge_states-inl.h"

namespace varlane {
namespace VARLANE_NS {

template <class Ops>
constexpr KvKernels MakeKvKernels() {
  return {&AttendRows<Ops>, &MergePartials<Ops>, &WriteTokens<Ops>,
          &AttendScratchBytes<Ops>, &MergeStateRows<Ops>};
}

extern const KvKernels VARLANE_KV;
constinit const KvKernels VARLANE_KV = MakeKvKernels<VARLANE_OPS>();

}  // namespace VARLANE_NS
}  // namespace varlane
