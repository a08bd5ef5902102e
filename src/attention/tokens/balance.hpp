// SPDX-License-Identifier: Apache-2.0
// Stripes dealt by their work. A snake evens out work that grows along a sequence, as under a causal mask; where each
// stripe has a list of key tiles of its own, neighbours may differ by any amount.
#pragma once

#include "attention/tokens/layout.hpp"

namespace ringattn {

// The layout with the stripes of each sequence that is split dealt anew, as many to each rank as before or one more or
// less: of every round of one stripe a rank, the one with the most work goes to the rank that has the least so far.
// Keys follow the queries where they are equally many, and stay where they are otherwise. Layouts that are not striped,
// or whose stripes are not equally long in all sequences, stay as they are. Every rank gets the same answer.
JobLayout balance_stripes(const Batch& batch, const QueryWork& work, JobLayout layout);

}  // namespace ringattn
