// SPDX-License-Identifier: Apache-2.0
// Launch parameters of the decode kernels. Plain data, filled by the host. A captured graph may contain them.
#pragma once

#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/decode/sm80/config.hpp"

namespace ringattn::sm80 {

// A cache of K or V, [pages, page size, KV heads, head dim]. Strides are in bytes and multiples of 16.
struct DecodeCache {
  const char* data;
  std::int64_t page_stride, token_stride, head_stride;
};

// Floats per partial. Work tiles write partials [rows of q, splits, heads]: acc in the column order of a saved state
// (attention/cuda/attention_state.cuh), then softmax_offset, sum and two unused floats.
constexpr int partial_floats(int head_dim_v) { return head_dim_v + 4; }

struct DecodeParams {
  cuda::AttentionParams attention;  // the job's shape, tensors and softmax; tables, schedule and state are unused
  bool q_aligned;                   // rows of q are aligned to 16 bytes

  DecodeCache k;
  DecodeCache v;
  const std::int32_t* pages;  // [sequences, table_stride], or null: page s is sequence s
  std::int64_t table_stride;
  std::int32_t page_log;  // log2 of the page size in tokens; 31 if there is no block table
  // log2 of the keys of a page run, which are contiguous in one page. A page run is a page, or with a block mask, whose
  // blocks may begin inside a page, at most a key tile.
  std::int32_t page_run_log2;
  std::int32_t partition_first, partition_stride;  // the KvPartition that the cache holds

  const std::int32_t* lengths;  // [sequences]
  std::int32_t sequences;       // number of sequences; with a block mask, times mask_rows
  std::int32_t rows;            // query rows per sequence
  std::int32_t ratio;           // query heads per KV head
  std::int32_t blocks;          // maximum row blocks per sequence and KV head

  // The arrays of a DecodeBlockMask. If they are null, each sequence has one mask row with all keys.
  const std::int32_t* mask_block_indices;
  const std::int32_t* mask_block_counts;
  std::int64_t mask_row_stride;
  std::int32_t mask_rows;        // per sequence
  std::int32_t mask_kv_heads;    // KV heads that share a mask row
  std::int32_t mask_block_keys;  // keys per mask block

  float* partials;
  std::int64_t partial_splits;  // per row
  bool finish;                  // true: the launch writes out and lse; false: only partials
  // [sequences, kv_heads, blocks] number of work tiles that have written their partials. 0 between launches.
  std::int32_t* arrived;
};

// Arguments of DecodeKernel::merge().
struct DecodeMergeParams {
  cuda::AttentionParams attention;  // as in DecodeParams
  const float* partitions[kMaxPartitions];
  std::int32_t partition_count;
  std::int64_t partial_splits;  // per row and partition
  const std::int32_t* lengths;  // [sequences]
  std::int32_t rows;            // query rows per sequence
  TileSizes tiles;              // of the prefill kernel
};

}  // namespace ringattn::sm80
