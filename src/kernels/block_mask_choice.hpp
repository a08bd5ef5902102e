// SPDX-License-Identifier: Apache-2.0
// Lists of key blocks that follow from the data, for a prefill: of each block of queries the first key block that the
// mask lets it see, the diagonal one, and of the others those of the highest scores (block_score.hpp). Backends do both
// parts (kernels/backend.hpp), on the host or on a stream, with the same bits: means of rows, and lists by means.
// top_k_selection.hpp makes a job's lists of them; block_choice.hpp is the same for a decoding step.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"
#include "kernels/attention.hpp"

namespace ringattn {

// A piece of a sequence's rows, whose blocks' means are wanted: row i stands at position + i, and blocks are counted
// from position 0. Pieces come in ascending order, and end where they like: the mean of a block that goes on in the
// next piece is a sum until then.
struct RowPooling {
  TensorView rows;            // [rows, heads, dim]
  std::int64_t position = 0;  // of the first row
  KeyRange positions;         // of all rows of the sequence
  int block = 1;              // positions of a block
  std::int64_t first = 0;     // number of the block that `means` begins with
  float* means = nullptr;     // [blocks, heads, dim]
};

// What a block of queries may list, the same for all heads.
struct BlockCandidates {
  std::int32_t begin = 0;  // key blocks that the mask lets it see; the first one is always listed
  std::int32_t end = 0;
  std::int32_t diagonal = 0;  // among them, and always listed, too
  std::int32_t count = 0;     // of them that are listed; 0 only where there are none
  std::int64_t first = 0;     // of its entries among those of a head
};

// Lists of consecutive query blocks of one sequence. Tensors lie in the backend's memory, and are dense.
struct BlockMaskChoice {
  AttentionSpec spec;        // with block_mask, whose shape is that of those that are made
  const float* q = nullptr;  // [query_blocks, heads, head_dim] mean queries
  const float* k = nullptr;  // [key_blocks, kv_heads, head_dim] mean keys of the sequence's blocks
  std::int64_t query_blocks = 0;
  std::int64_t key_blocks = 0;
  const BlockCandidates* candidates = nullptr;  // [query_blocks]
  float* scores = nullptr;                      // [block_mask.heads, query_blocks, key_blocks] room for scores
  std::int64_t entries = 0;                     // of a head's block_mask, those of other query blocks included
  std::int32_t* listed = nullptr;  // [block_mask.heads, entries] receives the lists at their candidates' `first`
};

// On the host. Throws kInternal for heads, dims or blocks that contradict each other.
void pool_host_rows(const RowPooling& pooling);
void choose_host_block_mask(const BlockMaskChoice& choice);
void check_row_pooling(const RowPooling& pooling);
void check_block_mask_choice(const BlockMaskChoice& choice);

}  // namespace ringattn
