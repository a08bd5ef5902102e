// SPDX-License-Identifier: Apache-2.0
// What a launch of the decode kernel is given. Plain data: the host fills it, and it may be part of a captured graph.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention_params.hpp"
#include "kernels/cuda/divider.hpp"

namespace ringattn::sm90 {

// AttentionState in pages, strides in bytes.
struct PagedBytes {
  const std::byte* data = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

#ifdef __CUDACC__
  __device__ __forceinline__ const std::byte* at(int page, int row, int head) const {
    return data + page * page_stride + row * token_stride + head * head_stride;
  }
#endif
};

// The query rows of one sequence and one KV head are rows · ratio; row i of query head h among them is number
// i · ratio + h. They are cut into blocks of block_rows, which are the rows of the products.
struct DecodeParams {
  cuda::AttentionParams attention;  // the job's shape, its tensors and its softmax; no tables, no schedule, no state

  // The cache: boxes of box_rows rows of one page and head, in panels of 64 columns, k_box_columns or v_box_columns at
  // a time. The same of V for slices of its columns, whose panels may be narrower.
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap v_slices;
  std::int32_t box_rows;
  std::int32_t boxes;  // of a key tile
  cuda::Divider by_boxes;
  std::int32_t k_box_columns, v_box_columns, slice_box_columns;
  const std::int32_t* pages;  // [sequences, table_stride], or null: page s is sequence s
  std::int64_t table_stride;
  std::int32_t page_log;  // of 2: tokens of a page, where there is a table
  // Whether, in the sliced kernel, lanes copy rows of V instead of the copy engine boxes; these rows; pages of the
  // pool.
  bool values_by_lanes;
  PagedBytes v_rows;
  std::int32_t pool_pages;
  std::int32_t split_tiles_log;  // of 2: key tiles of a group, for kernels that ask (LaunchKvSplits)

  const std::int32_t* lengths;  // [sequences]
  std::int32_t left, right;     // of the mask
  // Which splits the cache holds: the g-th of a sequence's is group first_split + g · split_stride.
  std::int32_t first_split, split_stride;
  std::int32_t sequences;  // with lists: each counts as many times as it has lists
  std::int32_t rows;       // of a sequence
  std::int32_t ratio;      // query heads of a KV head
  std::int32_t block_rows;
  std::int32_t blocks;                           // of a sequence and KV head
  std::int32_t slices;                           // of the output's columns, each another CTA's
  cuda::Divider by_ratio, by_blocks, by_stride;  // stride: blocks of a mask_row, over all its KV heads

  // Lists of key blocks, as DecodeBlockMask has them; null: none, and a sequence has one mask_row, of all keys.
  const std::int32_t* mask_block_indices;
  const std::int32_t* mask_block_counts;
  std::int64_t mask_row_stride;
  std::int32_t mask_block_tiles;  // of a block
  std::int32_t mask_kv_heads;     // that share a mask_row
  cuda::Divider by_mask_rows;     // of a sequence
  cuda::Divider by_mask_block_tiles;

  // Partials of work_tiles, by the work_tile's number, where a sequence has several splits: A [work_tiles, block_rows,
  // head_dim_v], and, from each slice anew, r and l [work_tiles, slices, block_rows].
  float* outputs;
  float2* stats;
  // [sequences, kv_heads, blocks, slices]: work_tiles that have left their partials; 0 between launches.
  std::int32_t* arrived;
  std::int32_t* failed;  // [work_tiles]: whether the work_tile has to be folded again, tile by tile (sliced.cuh)
  // Prefixes that sequences share, as SharedPrefixes has them; null: none. Another launch (prefix.cuh) leaves what rows
  // have of their splits, so rows are never finished beside it. Of a group that prefixes begin and sequences end it
  // leaves the rows' states, [rows, heads] of head_dim_v + kStateStats stats: A, and l and r as in a fold state.
  const std::int32_t* prefix_of;
  const std::int32_t* prefix_keys;
  std::int32_t prefixes;
  cuda::Divider by_sequence_rows;  // query rows of a sequence and KV head
  float* states;
  // Of a launch behind that of prefixes: how many of its last CTAs, or clusters, find room only when prefixes are done.
  // They have work_tiles where some wait for states, and none else.
  std::int32_t late;

  // Not null: rows are not finished. What they leave goes there, as DecodePartials says, and none of the scratch is
  // used: A, and behind it r and l.
  float* partials;
  std::int64_t partial_splits;

  // Of a launch that may fold all groups of a row in one CTA, and finish the row, though there are partials
  // (latent/mla_schedule.cuh): says whether it has, 1 or 0, to the merge behind it. Null: it doesn't.
  std::int32_t* whole;
};

}  // namespace ringattn::sm90
