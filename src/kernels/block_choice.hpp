// SPDX-License-Identifier: Apache-2.0
// Lists of key blocks that follow from the data, for decoding: of each sequence the first block, those that the step's
// rows stand in, and of the others those with the highest scores (block_score.hpp); of equal ones that of the lower
// number. Scores are those of mean keys, which are kept from step to step, as a block's keys don't change once it is
// full: choose_blocks() makes the mean of a block that steps have filled, and pool_keys() those of all. Backends do
// both (kernels/backend.hpp), on the host or on a stream, with the same bits.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"
#include "kernels/decode.hpp"

namespace ringattn {

// Of sequences in a plain cache that holds all of their keys. All memory is of the backend's kind.
struct BlockChoice {
  AttentionSpec spec;  // with block_mask, whose shape is that of those that are made
  TensorView q;        // [sequences · rows, heads, head_dim]
  int rows = 1;        // of a sequence
  int max_rows = 1;    // of a sequence, in any step
  CacheView k;
  BlockTable block_table;
  const std::int32_t* lengths = nullptr;  // [sequences], the step's rows included
  // Blocks of a list that are read, the first and the rows' own among them. At least those are, whatever it says.
  int count = 1;
  std::int64_t blocks = 0;  // of a sequence, at most
  float* means = nullptr;   // [sequences, blocks, kv_heads, head_dim] mean keys of the blocks in front of the rows' own
  float* scores = nullptr;  // [sequences, block_mask, blocks] room for scores
  std::int32_t* chosen =
      nullptr;  // [sequences, block_mask, count] receives the block_mask, without the rows' own blocks
  std::int32_t* counts = nullptr;  // [sequences, block_mask]

  std::int64_t sequences() const { return q.tokens / rows; }
  DecodeBlockMask block_mask() const { return {chosen, counts, count}; }
};

// How many blocks lie in front of the rows' own, of a sequence of so many keys.
RINGATTN_HOST_DEVICE inline std::int32_t blocks_before_rows(const BlockChoice& choice, std::int32_t length) {
  return length > choice.rows ? (length - choice.rows) / choice.spec.block_mask.key_block : 0;
}

// Whether the last rows of steps have filled the last of these, so that choose_blocks() makes its mean. Where rows are
// taken back, the step before may have been as much behind as it is here ahead.
RINGATTN_HOST_DEVICE inline bool fills_block(const BlockChoice& choice, std::int32_t length) {
  const std::int32_t blocks = blocks_before_rows(choice, length);
  return blocks > 0 && length - choice.rows - blocks * choice.spec.block_mask.key_block < 2 * choice.max_rows;
}

// How many blocks a list names in front of the rows' own, of a sequence of so many keys.
RINGATTN_HOST_DEVICE inline std::int32_t chosen_blocks(const BlockChoice& choice, std::int32_t length) {
  const std::int32_t key_block = choice.spec.block_mask.key_block;
  const std::int32_t own = blocks_before_rows(choice, length);
  const std::int32_t of_rows = (length + key_block - 1) / key_block - own;
  const std::int32_t wanted = choice.count - of_rows < 1 ? 1 : choice.count - of_rows;  // the first one among them
  return wanted < own ? wanted : own;
}

// On the host. Throws kInternal where views don't fit each other.
void pool_host_keys(const BlockChoice& choice);
void choose_host_blocks(const BlockChoice& choice);
void check_block_choice(const BlockChoice& choice);

}  // namespace ringattn
