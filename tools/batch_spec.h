// BatchSpec: a ragged batch in one word, e.g. "32x1@512,4x512@512".
//
// Each group is COUNTxQ@CONTEXT: COUNT sequences of Q query tokens at a context
// of CONTEXT tokens, those Q included ("@CONTEXT" may be left out where it
// equals Q). Q may exceed CONTEXT: the rows before position 0 see nothing.
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TOOLS_BATCH_SPEC_H_
#define VARLANE_TOOLS_BATCH_SPEC_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "varlane/status.h"

namespace varlane::tools {

struct BatchSpec {
  std::vector<int32_t> q_lens;   // [N]
  std::vector<int32_t> kv_lens;  // [N], context incl. the query tokens
};

// Errors: kInvalidArgument quoting the group; at most 2^20 sequences and fewer
//         than 2^31 query resp. context tokens in all.
Result<BatchSpec> ParseBatchSpec(std::string_view text);

}  // namespace varlane::tools

#endif  // VARLANE_TOOLS_BATCH_SPEC_H_
