// SPDX-License-Identifier: Apache-2.0
// What a plan must know of a job, and all it knows: the sequences, which keys a query sees, what travels with a token,
// and how much pairs, keys and queries cost. An op describes itself in these words; attention does in
// attention/attention_work.hpp.
#pragma once

#include "attention/ring/row_stream.hpp"
#include "attention/tokens/batch.hpp"
#include "base/shared_value.hpp"
#include "kernels/block_mask.hpp"
#include "kernels/key_positions.hpp"
#include "kernels/visibility.hpp"

namespace ringattn {

struct RingWork {
  Batch batch;
  Mask mask;
  RowStreams streams;
  double pair_flops = 0.0;                 // operations of one visible (query, key) pair
  SharedValue<BlockMask> block_mask = {};  // of the batch's sequences; null: a query folds what the mask lets it see
  double key_flops = 0.0;                  // operations of one key in a block that a rank computes, beside its pairs
  double query_flops = 0.0;                // of one query, once in a run, beside its pairs
  // Of the batch's keys, which no lists go with; null: key i stands at position i.
  SharedValue<KeyPositions> positions = {};

  bool operator==(const RingWork&) const = default;

  // What queries of a sequence see, beside what lists say.
  SequenceVisibility visibility(std::size_t sequence) const {
    return {mask, batch.sequences[sequence].k_len, positions.get(), sequence};
  }
};

}  // namespace ringattn
