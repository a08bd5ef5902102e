// SPDX-License-Identifier: Apache-2.0
// Describes a job to the planner: the sequences, the mask, the row streams, and the FLOPs per pair, key and query. Made
// by each op, e.g. in ops/attention/attention_work.hpp.
#pragma once

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

  bool operator==(const RingWork&) const = default;

  // Visibility of keys to queries of a sequence, without the block mask.
  SequenceVisibility visibility(std::size_t sequence) const {
    return {mask, batch.sequences[sequence].k_len, positions.get(), sequence};
  }
};

}  // namespace ringattn
