// Exact membership: K = 0 gives every visible key weight 1, and small integers
// in V make the sum exact in any order, so out == fl(sum / n) bit for bit. A
// dropped, doubled or foreign key shows.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_EXACT_MEANS_H_
#define VARLANE_TESTS_TESTING_EXACT_MEANS_H_

#include "tests/testing/attention_case.h"

namespace varlane::testing {

// The value of V; an integer in [0, 7].
int SmallInteger(int seq, int pos, int head, int dim);

// A case with K = 0 and V = SmallInteger.
AttentionCase MeansCase(const CaseSpec& spec, Poison poison = Poison::kNaN);

// out must be the correctly rounded mean of the visible values, exactly. Sinks,
// where there are any, must be 0: each then counts as one more value of 0.
void ExpectExactMeans(const AttentionCase& c, const Output& output);

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_EXACT_MEANS_H_
