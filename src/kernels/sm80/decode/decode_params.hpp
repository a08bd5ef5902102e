// SPDX-License-Identifier: Apache-2.0
// What launches of the decode kernels are given. Plain data: the host fills it, and it may be part of a captured graph.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention_params.hpp"
#include "kernels/sm80/decode/config.hpp"

namespace ringattn::sm80 {

// K or V in pages. Strides count bytes, and are multiples of 16.
struct DecodeCache {
  const char* data;
  std::int64_t page_stride, token_stride, head_stride;
};

// What work_tiles leave of their rows: [rows of q, splits, heads] partials of A in the order of a fold state's columns
// (cuda/device/attention_state.cuh), then r, l and two stats without meaning.
constexpr int partial_floats(int head_dim_v) { return head_dim_v + 4; }

struct DecodeParams {
  cuda::AttentionParams attention;  // the job's shape, its tensors and its softmax; no tables, no schedule, no state
  bool q_aligned;                   // rows of q begin at multiples of 16 bytes

  DecodeCache k;
  DecodeCache v;
  const std::int32_t* pages;  // [sequences, table_stride], or null: page s is sequence s
  std::int64_t table_stride;
  std::int32_t page_log;  // of 2: tokens of a page; 31 where there is no table
  // Of 2: keys that lie in one page wherever their tile begins. A page's, but for lists, whose blocks may begin inside
  // of one.
  std::int32_t page_run_log2;
  std::int32_t partition_first, partition_stride;  // the splits that the cache holds (KvPartition)

  const std::int32_t* lengths;  // [sequences]
  std::int32_t sequences;       // with lists: each counts as many times as it has lists
  std::int32_t rows;            // of a sequence
  std::int32_t ratio;           // query heads of a KV head
  std::int32_t blocks;          // of rows, of a sequence and KV head, at most

  // Lists of key blocks, as DecodeBlockMask has them; null: none, and a sequence has one mask_row, of all keys.
  const std::int32_t* mask_block_indices;
  const std::int32_t* mask_block_counts;
  std::int64_t mask_row_stride;
  std::int32_t mask_rows;        // of a sequence
  std::int32_t mask_kv_heads;    // that share a mask_row
  std::int32_t mask_block_keys;  // of a block

  float* partials;
  std::int64_t partial_splits;  // of a row
  bool finish;                  // rows end with this launch; else the partials are what it leaves
  std::int32_t* arrived;  // [sequences, kv_heads, blocks]: work_tiles that have left their partials; 0 between launches
};

// DecodeKernel::merge().
struct DecodeMergeParams {
  cuda::AttentionParams attention;  // as above
  const float* partitions[kMaxPartitions];
  std::int32_t partition_count;
  std::int64_t partial_splits;  // of a row and share
  const std::int32_t* lengths;  // [sequences]
  std::int32_t rows;            // of a sequence
  TileSizes tiles;              // of the fold
};

}  // namespace ringattn::sm80
