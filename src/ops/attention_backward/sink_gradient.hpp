// SPDX-License-Identifier: Apache-2.0
// The gradient of the sinks: the sum of all queries' terms (RowStatsTask::sink_terms), in an order that does not depend
// on ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/collective.hpp"
#include "kernels/attention_backward/attention_backward.hpp"

namespace ringattn {

// Collective. `terms`: [rows, heads] of this rank's queries, which `queries` describes. Sums the terms in fp32: first
// over the queries of each tile of kBackwardTile positions, ascending, then over the tiles of a sequence, ascending,
// then over the sequences in order. Every rank gets the sum, [heads].
std::vector<float> sum_sink_terms(const Collective& collective, std::span<const BackwardSequence> sequences,
                                  std::span<const QueryRun> queries, std::span<const float> terms, int heads);

}  // namespace ringattn
