// SPDX-License-Identifier: Apache-2.0
// Distributes stripes by their work. The snake order balances work that grows along a sequence, as with a causal mask.
// With a block mask adjacent stripes may differ by any amount.
#pragma once

#include "attention/tokens/layout.hpp"

namespace ringattn {

// Redistributes the stripes of each sequence that is split. Each rank gets the same number of stripes as before, plus
// or minus one: of each group of P stripes, the stripe with the most work goes to the rank with the least work so far.
// Keys follow the queries if both have the same length; otherwise they stay. Layouts that are not striped, or whose
// stripe differs between sequences, are returned unchanged. Every rank computes the same result.
JobLayout balance_stripes(const Batch& batch, const QueryWork& work, JobLayout layout);

}  // namespace ringattn
