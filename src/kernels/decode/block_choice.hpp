// SPDX-License-Identifier: Apache-2.0
// Top-k key blocks for decode: for each sequence the first key block, those that contain the step's rows, and the
// others with the highest scores (attention/block_score.hpp), ties going to the lower index. Scores use mean keys,
// which are kept from step to step because a full block's keys do not change: choose_blocks() computes the mean of a
// block that steps have filled, and pool_keys() those of all blocks. Backends do both (kernels/common/backend.hpp), on
// the host or on a stream, with the same bits.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"
#include "kernels/decode/decode.hpp"

namespace ringattn {

// Top-k key blocks for the sequences of a decode step, in a plain cache that holds all their keys. All memory is of the
// backend's kind.
struct BlockChoice {
  AttentionSpec spec;  // its block_mask is the shape of the result
  TensorView q;        // [sequences · rows, heads, head_dim]
  int rows = 1;        // rows per sequence
  int max_rows = 1;    // maximum rows per sequence in any step
  CacheView k;
  BlockTable block_table;
  const std::int32_t* lengths = nullptr;  // [sequences] keys, including the step's rows
  // Key blocks to read per mask row, including the first one and the rows' own. These are read even if count is
  // smaller.
  int count = 1;
  std::int64_t blocks = 0;  // maximum key blocks per sequence
  float* means = nullptr;   // [sequences, blocks, kv_heads, head_dim] mean keys of the key blocks before the rows' own
  float* scores = nullptr;  // [sequences, mask heads, blocks] scratch
  // [sequences, mask heads, count] receives the mask rows, without the rows' own key blocks.
  std::int32_t* chosen = nullptr;
  std::int32_t* counts = nullptr;  // [sequences, mask heads]

  std::int64_t sequences() const { return q.tokens / rows; }
  DecodeBlockMask block_mask() const { return {chosen, counts, count}; }
};

// Number of key blocks before the rows' own, for a sequence of `length` keys.
RINGATTN_HOST_DEVICE inline std::int32_t blocks_before_rows(const BlockChoice& choice, std::int32_t length) {
  return length > choice.rows ? (length - choice.rows) / choice.spec.block_mask.key_block : 0;
}

// Whether recent steps may have filled the last of these key blocks, so that choose_blocks() must compute its mean key.
// If tokens can be removed from the end, the previous step may have been as far below the block's end as this one is
// above it.
RINGATTN_HOST_DEVICE inline bool fills_block(const BlockChoice& choice, std::int32_t length) {
  const std::int32_t blocks = blocks_before_rows(choice, length);
  return blocks > 0 && length - choice.rows - blocks * choice.spec.block_mask.key_block < 2 * choice.max_rows;
}

// Number of key blocks in a mask row before the rows' own, for a sequence of `length` keys.
RINGATTN_HOST_DEVICE inline std::int32_t chosen_blocks(const BlockChoice& choice, std::int32_t length) {
  const std::int32_t key_block = choice.spec.block_mask.key_block;
  const std::int32_t own = blocks_before_rows(choice, length);
  const std::int32_t of_rows = (length + key_block - 1) / key_block - own;
  const std::int32_t wanted = choice.count - of_rows < 1 ? 1 : choice.count - of_rows;  // including the first
  return wanted < own ? wanted : own;
}

// Host implementations. They throw kInternal if views do not match each other.
void pool_host_keys(const BlockChoice& choice);
void choose_host_blocks(const BlockChoice& choice);
void check_block_choice(const BlockChoice& choice);

}  // namespace ringattn
