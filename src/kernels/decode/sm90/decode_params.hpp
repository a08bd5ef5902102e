// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of decode, one struct for each kernel, and the compiled kernels (kernels/instances.cmake).
// Parameters are plain data: the host fills them, and they may be part of a captured CUDA graph.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "base/memory.hpp"
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

// The query rows at the end of each sequence, and the mask's window.
struct DecodeRows {
  const std::int32_t* lengths;  // [sequences]
  std::int32_t left, right;
  std::int32_t per_sequence;  // query tokens of a sequence
};

// The query rows of one sequence and one KV head are GQA-packed: tokens · ratio, where token i of query head h is row
// i · ratio + h. They are cut into row blocks, the M (or N) of the matrix products.
struct RowBlocks {
  std::int32_t sequences;  // sequences; with a block mask, times the masks of a sequence
  std::int32_t kv_heads;   // KV heads of a sequence; with a block mask, those that share a mask row
  std::int32_t ratio;      // query heads of a KV head
  std::int32_t rows;       // maximum rows of a row block
  std::int32_t count;      // row blocks of a sequence and KV head
  cuda::Divider by_ratio, by_count, by_stride;  // stride: kv_heads · count
};

// The KV splits that the cache holds: its g-th split of a sequence is split first + g · stride.
struct CacheSplits {
  std::int32_t first, stride;
};

// The block table, [sequences, stride], or null: page s is sequence s.
struct PageTable {
  const std::int32_t* pages;
  std::int64_t stride;
  std::int32_t page_log;  // log2 of the tokens of a page, if there is a block table
};

// The boxes in which TMA loads a key tile: rows of one page and head.
struct PageBoxes {
  std::int32_t rows;
  std::int32_t per_tile;
  cuda::Divider by_per_tile;
};

// Maps of a plain cache. A box has panels of 64 columns, k_columns or v_columns in total.
struct CacheMaps {
  CUtensorMap k;
  CUtensorMap v;
  std::int32_t k_columns, v_columns;
};

// This CTA's columns of V in the sliced kernel. Panels of `map` may be narrower than 64 columns.
struct ValueSlices {
  CUtensorMap map;
  std::int32_t box_columns;
  bool by_lanes;            // lanes copy rows; otherwise TMA loads boxes
  PagedBytes rows;          // the rows that lanes copy
  std::int32_t pool_pages;  // number of pages in the pool
};

// Block-sparse mask as in DecodeBlockMask, padded BSR: indices [mask rows, row_stride] and counts [mask rows]. Null: no
// mask, and a sequence is one mask row that selects all keys.
struct BlockMaskRows {
  const std::int32_t* indices;
  const std::int32_t* counts;
  std::int64_t row_stride;
  std::int32_t block_tiles;  // key tiles of a mask block
  cuda::Divider by_rows;     // mask rows of a sequence
  cuda::Divider by_block_tiles;
};

// Scratch memory for sequences with several splits. Partials by work tile: acc [work_tiles, block rows, head_dim_v] and
// (softmax_offset, sum) [work_tiles, slices, block rows], a copy for each slice.
struct SplitScratch {
  float* outputs;
  float2* stats;
  // [sequences, kv_heads, row blocks, slices]: work tiles that have stored their partials; 0 between launches.
  std::int32_t* arrived;
};

// Not null: rows are not finished. Their partials go here in the layout of DecodePartials, acc and then
// (softmax_offset, sum), and SplitScratch is not used.
struct StoredPartials {
  float* data;
  std::int64_t splits;
};

// Shared prefixes, as in SharedPrefixes. Null: none. The prefix launch stores the partials of their splits, so no row
// is finished in the launch for the rest. For a split that a prefix begins and sequences continue, it stores the rows'
// states instead: [rows, heads] of head_dim_v + kStateStats floats, acc and then the quad's shares of the sum and the
// softmax_offset, as in a saved AttentionState.
struct PrefixStates {
  const std::int32_t* of_sequence;
  const std::int32_t* keys;
  std::int32_t count;
  float* states;
};

// Parameters of every kernel that computes work tiles.
struct WorkTileParams {
  cuda::AttentionParams attention;  // shape, tensors and softmax; no tables, schedule or state
  DecodeRows rows;
  CacheSplits splits;
  RowBlocks blocks;
  PageTable table;
  PageBoxes boxes;
  StoredPartials partials;
};

// decode.cuh: row blocks of 64 rows.
struct DecodeParams : WorkTileParams {
  BlockMaskRows mask;
  CacheMaps cache;
  SplitScratch scratch;
  std::int32_t slices;  // slices of the output columns, one for each CTA of a cluster
  PrefixStates prefixes;
  // For a launch after the prefix launch: how many of its last CTAs or clusters become resident only when the prefix
  // launch ends. They get work tiles only if some work tiles wait for states.
  std::int32_t late;
};

// sliced.cuh: row blocks of up to 16 rows. It recomputes failed work tiles as decode.cuh does.
struct SlicedParams : DecodeParams {
  ValueSlices v_slices;
  std::int32_t* failed;  // [work_tiles]: whether the work tile must be recomputed tile by tile
};

// prefix.cuh: splits of shared prefixes. `partials` is not null.
struct PrefixParams : WorkTileParams {
  CacheMaps cache;
  PrefixStates prefixes;
  cuda::Divider by_sequence_rows;  // query rows of a sequence and KV head
};

// One launcher for each element type and head dims.
struct DecodeLauncher {
  void (*prepare)();  // see cuda::Launcher
  // Enqueues the step on `ctas` CTAs, with row blocks of 64 rows, a warpgroup's M (decode.cuh). The cache fields of
  // params are set already.
  void (*launch)(const DecodeParams& params, int ctas, Stream stream);
  // The same with row blocks of up to 16 rows, on `clusters` clusters of params.slices CTAs (sliced.cuh).
  void (*launch_sliced)(const SlicedParams& params, int clusters, Stream stream);
  // Enqueues the tiles of the step's shared prefixes (prefix.cuh), before one of the launches above.
  void (*launch_prefixes)(const PrefixParams& params, int ctas, Stream stream);
  // The same on `pairs` CTA pairs. The map of V then has boxes of kPanelColumns columns.
  void (*launch_prefix_cta_pairs)(const PrefixParams& params, int pairs, Stream stream);
  // How many clusters of `slices` CTAs are resident on the current device at a time; 0: no kernel is compiled for
  // `slices`.
  int (*clusters_at_a_time)(int slices);
  int (*prefix_cta_pairs_at_a_time)();  // the same for CTA pairs of the prefix kernel
};

extern const DecodeLauncher decode_bf16_64;
extern const DecodeLauncher decode_bf16_96;
extern const DecodeLauncher decode_bf16_128;
extern const DecodeLauncher decode_bf16_192;
extern const DecodeLauncher decode_bf16_256;
extern const DecodeLauncher decode_fp16_64;
extern const DecodeLauncher decode_fp16_96;
extern const DecodeLauncher decode_fp16_128;
extern const DecodeLauncher decode_fp16_192;
extern const DecodeLauncher decode_fp16_256;

// merge.cu, the last kernel of a decode step whose KV splits are on several ranks or in several launches: merges their
// partials into output rows (split-KV combine).

inline constexpr int kMaxPartitions = 64;

struct MergeParams {
  cuda::AttentionParams attention;  // shape and output
  DecodeRows rows;
  std::int64_t partial_splits;  // splits of each row in `partials`
  std::int32_t kv_split_keys;
  std::int32_t partitions;
  const float* partials[kMaxPartitions];  // [partitions], each in the layout of DecodePartials
  // MlaParams::whole: if it is 1, rows that have splits are finished already; null: none is
  const std::int32_t* whole;
};

// Loads the code on the current device. Otherwise the first launch would do it, and might block.
void prepare_merge(Dtype dtype);
void launch_merge(const MergeParams& params, Dtype dtype, Stream stream);

}  // namespace ringattn::sm90
