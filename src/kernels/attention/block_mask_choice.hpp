// SPDX-License-Identifier: Apache-2.0
// Top-k block masks for prefill: each query block attends to the first key block that the Mask allows, the diagonal
// one, and the other key blocks with the highest scores (attention/block_score.hpp). Backends pool rows to block means
// and choose key blocks by them (kernels/common/backend.hpp), on the host or on a stream, with the same bits.
// attention/top_k_selection.hpp makes a job's block mask from them. decode/block_choice.hpp is the same for a decode
// step.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn {

// Consecutive rows of a sequence to pool to block means. Row i is at position + i, and blocks count from position 0.
// Calls must be in ascending order, and may end anywhere: the mean of a block that continues in the next call is a sum
// until then.
struct RowPooling {
  TensorView rows;            // [rows, heads, dim]
  std::int64_t position = 0;  // position of the first row
  KeyRange positions;         // positions of all rows of the sequence
  int block = 1;              // positions per block
  std::int64_t first = 0;     // block index of means[0]
  float* means = nullptr;     // [blocks, heads, dim]
};

// Candidate key blocks of a query block, the same for all heads.
struct BlockCandidates {
  std::int32_t begin = 0;  // key blocks [begin, end) that the Mask allows; the first one is always chosen
  std::int32_t end = 0;
  std::int32_t diagonal = 0;  // one of them, also always chosen
  std::int32_t count = 0;     // number of key blocks to choose; 0 only if there are no candidates
  std::int64_t first = 0;     // offset of its entries within a head's entries
};

// Chooses the mask rows of consecutive query blocks of one sequence. Tensors are dense, in the backend's memory.
struct BlockMaskChoice {
  AttentionSpec spec;        // its block_mask is the shape of the result
  const float* q = nullptr;  // [query_blocks, heads, head_dim] mean queries
  const float* k = nullptr;  // [key_blocks, kv_heads, head_dim] mean keys of the sequence's blocks
  std::int64_t query_blocks = 0;
  std::int64_t key_blocks = 0;
  const BlockCandidates* candidates = nullptr;  // [query_blocks]
  float* scores = nullptr;                      // [mask heads, query_blocks, key_blocks] scratch
  std::int64_t entries = 0;                     // entries per mask head, including those of other query blocks
  std::int32_t* listed = nullptr;  // [mask heads, entries] receives the mask rows, each at its candidates' `first`
};

// Host implementations. They throw kInternal for heads, dims or blocks that contradict each other.
void pool_host_rows(const RowPooling& pooling);
void choose_host_block_mask(const BlockMaskChoice& choice);
void check_row_pooling(const RowPooling& pooling);
void check_block_mask_choice(const BlockMaskChoice& choice);

}  // namespace ringattn
