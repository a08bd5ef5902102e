// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of decode. Plain data: the host fills it, and it may be part of a captured CUDA graph.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/common/cuda/divider.hpp"

namespace ringattn::sm90 {

// A paged tensor [pages, tokens, heads, row bytes]; strides in bytes.
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

// The query rows of one sequence and one KV head are GQA-packed: rows · ratio, where row i of query head h is row i ·
// ratio + h. They are cut into row blocks of block_rows, the M (or N) of the matrix products.
struct DecodeParams {
  cuda::AttentionParams attention;  // shape, tensors and softmax; no tables, schedule or state

  // The cache: boxes of box_rows rows of one page and head, in panels of 64 columns, k_box_columns or v_box_columns at
  // a time. v_slices maps V for column slices, whose panels may be narrower.
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap v_slices;
  std::int32_t box_rows;
  std::int32_t boxes;  // boxes of a key tile
  cuda::Divider by_boxes;
  std::int32_t k_box_columns, v_box_columns, slice_box_columns;
  const std::int32_t* pages;  // block table [sequences, table_stride], or null: page s is sequence s
  std::int64_t table_stride;
  std::int32_t page_log;  // log2 of the tokens of a page, if there is a block table
  // In the sliced kernel, lanes copy rows of V if true. Otherwise TMA loads boxes of them.
  bool values_by_lanes;
  PagedBytes v_rows;             // the rows of V that lanes copy
  std::int32_t pool_pages;       // number of pages in the pool
  std::int32_t split_tiles_log;  // log2 of the key tiles of a KV split, for kernels with LaunchKvSplits

  const std::int32_t* lengths;  // [sequences]
  std::int32_t left, right;     // the mask's window
  // The KV splits that the cache holds: its g-th split of a sequence is split first_split + g · split_stride.
  std::int32_t first_split, split_stride;
  std::int32_t sequences;  // sequences; with a block mask, times the masks of a sequence
  std::int32_t rows;       // query tokens of a sequence
  std::int32_t ratio;      // query heads of a KV head
  std::int32_t block_rows;
  std::int32_t blocks;                           // row blocks of a sequence and KV head
  std::int32_t slices;                           // slices of the output columns, one for each CTA of a cluster
  cuda::Divider by_ratio, by_blocks, by_stride;  // stride: row blocks of a mask row, over all its KV heads

  // Block-sparse mask as in DecodeBlockMask, padded BSR: indices [mask rows, mask_row_stride] and counts [mask rows].
  // Null: no mask, and a sequence is one mask row that selects all keys.
  const std::int32_t* mask_block_indices;
  const std::int32_t* mask_block_counts;
  std::int64_t mask_row_stride;
  std::int32_t mask_block_tiles;  // key tiles of a mask block
  std::int32_t mask_kv_heads;     // KV heads that share a mask row
  cuda::Divider by_mask_rows;     // mask rows of a sequence
  cuda::Divider by_mask_block_tiles;

  // Partials by work tile, for sequences with several splits: acc [work_tiles, block_rows, head_dim_v] and
  // (softmax_offset, sum) [work_tiles, slices, block_rows], a copy for each slice.
  float* outputs;
  float2* stats;
  // [sequences, kv_heads, blocks, slices]: work tiles that have stored their partials; 0 between launches.
  std::int32_t* arrived;
  std::int32_t* failed;  // [work_tiles]: whether the work tile must be recomputed tile by tile (sliced.cuh)
  // Shared prefixes, as in SharedPrefixes. Null: none. Another launch (prefix.cuh) stores the partials of their splits,
  // so no row is finished in this launch. For a split that a prefix begins and sequences continue, it stores the rows'
  // states instead: [rows, heads] of head_dim_v + kStateStats floats, acc and then the quad's shares of the sum and the
  // softmax_offset, as in a saved AttentionState.
  const std::int32_t* prefix_of;
  const std::int32_t* prefix_keys;
  std::int32_t prefixes;
  cuda::Divider by_sequence_rows;  // query rows of a sequence and KV head
  float* states;
  // For a launch after the prefix launch: how many of its last CTAs or clusters become resident only when the prefix
  // launch ends. They get work tiles only if some work tiles wait for states.
  std::int32_t late;

  // Not null: rows are not finished. Their partials go here in the layout of DecodePartials, acc and then
  // (softmax_offset, sum), and the scratch above is not used.
  float* partials;
  std::int64_t partial_splits;

  // For a launch in which one CTA may attend to all splits of a row and finish it, although there are partials
  // (mla_schedule.cuh): it writes 1 or 0 here for the merge that follows. Null: it doesn't.
  std::int32_t* whole;
};

}  // namespace ringattn::sm90
