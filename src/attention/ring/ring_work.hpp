// SPDX-License-Identifier: Apache-2.0
// Describes a job to the planner: the sequences, the mask, the row streams, and the FLOPs per pair, key and query. Made
// by each op, e.g. in ops/attention/attention_work.hpp.
#pragma once

#include <algorithm>

#include "attention/ring/row_stream.hpp"
#include "attention/tokens/batch.hpp"
#include "base/shared_value.hpp"
#include "kernels/attention/block_mask.hpp"
#include "kernels/attention/key_positions.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn {

struct RingWork {
  Batch batch;
  Mask mask;
  RowStreams streams;
  double pair_flops = 0.0;                 // per visible (query, key) pair
  SharedValue<BlockMask> block_mask = {};  // of the batch's sequences; null: only `mask` applies
  double key_flops = 0.0;                  // per key of a computed block, besides its pairs
  double query_flops = 0.0;                // per query, once in a run, besides its pairs
  // Positions of the batch's keys, not combined with a block mask; null: key i has position i.
  SharedValue<KeyPositions> positions = {};

  // If queries are sent, too (RowStream::queries): FLOPs per visible pair of the task that has keys and receives
  // queries.
  double query_pair_flops = 0.0;
  // Query tiles count from a sequence's first query instead of from position 0 (transposed()).
  bool tiles_by_query = false;

  bool operator==(const RingWork&) const = default;

  bool sends_queries() const {
    return std::ranges::any_of(streams, [](const RowStream& stream) { return stream.queries; });
  }

  // Visibility of keys to queries of a sequence, without the block mask.
  SequenceVisibility visibility(std::size_t sequence) const {
    return {mask, batch.sequences[sequence].k_len, positions.get(), sequence};
  }
};

// The part of the work in which keys are sent to queries.
RingWork keys_to_queries(const RingWork& work);
// The part in which queries are sent to keys, with queries and keys exchanged: its "keys" are tiles of `query_tile`
// queries. Requires sends_queries(), no block mask and no positions.
RingWork queries_to_keys(const RingWork& work, int query_tile);

}  // namespace ringattn
