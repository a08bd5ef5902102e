// SPDX-License-Identifier: Apache-2.0
// Decode with the registry entry `sm80_attention`: the entry, the launch parameters of its kernels, and the launchers
// of the compiled kernels (kernels/instances.cmake). Launch parameters are plain data, filled by the host. A captured
// graph may contain them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm80/config.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn::sm80 {

// `backend` is a CudaBackend and outlives the kernel. attention_missing() (attention/sm80/config.hpp) checks specs.
std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend);

// A cache of K or V, [pages, page size, KV heads, head dim]. Strides are in bytes and multiples of 16.
struct DecodeCache {
  const char* data;
  std::int64_t page_stride, token_stride, head_stride;
};

// Floats per partial. Work tiles write partials [rows of q, splits, heads]: acc in the column order of a saved state
// (attention/cuda/attention_state.cuh), then softmax_offset, sum and two unused floats.
constexpr int partial_floats(int head_dim_v) { return head_dim_v + 4; }

// The block table, [sequences, stride], or null: page s is sequence s.
struct PageTable {
  const std::int32_t* pages;
  std::int64_t stride;
  std::int32_t page_log;  // log2 of the page size in tokens; 31 if there is no block table
  // log2 of the keys of a page run, which are contiguous in one page. A page run is a page, or with a block mask, whose
  // blocks may begin inside a page, at most a key tile.
  std::int32_t page_run_log2;
};

// The KvPartition that the cache holds.
struct CachePartition {
  std::int32_t first, stride;
};

// The arrays of a DecodeBlockMask. If they are null, each sequence has one mask row with all keys.
struct BlockMaskRows {
  const std::int32_t* indices;
  const std::int32_t* counts;
  std::int64_t row_stride;
  std::int32_t rows;        // per sequence
  std::int32_t kv_heads;    // KV heads that share a mask row
  std::int32_t block_keys;  // keys per mask block
};

struct StoredPartials {
  float* data;
  std::int64_t splits;  // per row
};

// Parameters of both decode kernels.
struct WorkTileParams {
  cuda::AttentionParams attention;  // the job's shape, tensors and softmax; tables, schedule and state are unused
  const std::int32_t* lengths;      // [sequences]
  std::int32_t sequences;           // number of sequences; with a block mask, times mask.rows
  std::int32_t rows;                // query rows per sequence
  std::int32_t ratio;               // query heads per KV head
  std::int32_t blocks;              // maximum row blocks per sequence and KV head
  CachePartition partition;
  PageTable table;
  BlockMaskRows mask;
  StoredPartials partials;
  // [sequences, kv_heads, blocks] number of work tiles that have written their partials. 0 between launches.
  std::int32_t* arrived;
  bool finish;     // true: the launch writes out and lse; false: only partials
  bool q_aligned;  // rows of q are aligned to 16 bytes
};

// decode.cuh
struct DecodeParams : WorkTileParams {
  DecodeCache k;
  DecodeCache v;
};

// Arguments of DecodeKernel::merge().
struct DecodeMergeParams {
  cuda::AttentionParams attention;  // as in WorkTileParams
  const float* partitions[kMaxPartitions];
  std::int32_t partition_count;
  std::int64_t partial_splits;  // per row and partition
  const std::int32_t* lengths;  // [sequences]
  std::int32_t rows;            // query rows per sequence
  TileSizes tiles;              // of the prefill kernel
};

// Rows in pages, [pages, tokens, heads, row bytes]. Strides count bytes.
struct PagedBytes {
  const std::byte* data = nullptr;  // null: the format has no such rows
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

#ifdef __CUDACC__
  // The rows of one head.
  __device__ __forceinline__ PagedBytes of_head(int head) const {
    return {data + head * head_stride, page_stride, token_stride, head_stride};
  }
  __device__ __forceinline__ const std::byte* at(std::int64_t page, std::int64_t in_page) const {
    return data + page * page_stride + in_page * token_stride;
  }
#endif
};

// K or V, or a latent cache that is both.
struct QuantizedTensor {
  PagedBytes quantized;    // quantized values; elements for kPlain
  PagedBytes qparams;      // scales, or scales and zero points, of each row
  PagedBytes rotary;       // rotary keys of kLatent
  const std::byte* table;  // scales of a tensor or of heads, or a tail; null if there is none
  RowEncoding encoding;
  ScaleGrain scales;
  std::int32_t group;  // tokens per group of int4
};

// compressed.cuh
struct CompressedParams : WorkTileParams {
  QuantizedTensor k, v;  // v is unused with a latent cache
};

// The compiled decode kernels of sm80_attention: one for each element type and head dim of K (kernels/instances.cmake),
// and for each element type one that merges partitions (merge.cu). 192 stands for head dims 192/128, 576 for 576/512.

struct DecodeLauncher {
  // Loads the kernel, as cuda::Launcher::prepare() does. Returns how many CTAs run on a multiprocessor at a time.
  int (*prepare)();
  // Enqueues the decode step on `ctas` CTAs. Throws if the launch fails.
  void (*launch)(const DecodeParams& params, int ctas, Stream stream);
};

extern const DecodeLauncher decode_bf16_64;
extern const DecodeLauncher decode_bf16_96;
extern const DecodeLauncher decode_bf16_128;
extern const DecodeLauncher decode_bf16_192;
extern const DecodeLauncher decode_bf16_256;
extern const DecodeLauncher decode_bf16_512;
extern const DecodeLauncher decode_bf16_576;
extern const DecodeLauncher decode_fp16_64;
extern const DecodeLauncher decode_fp16_96;
extern const DecodeLauncher decode_fp16_128;
extern const DecodeLauncher decode_fp16_192;
extern const DecodeLauncher decode_fp16_256;
extern const DecodeLauncher decode_fp16_512;
extern const DecodeLauncher decode_fp16_576;

struct MergeLauncher {
  void (*prepare)();  // as cuda::Launcher::prepare()
  // Enqueues the merge of the partitions' partials. Throws if the launch fails.
  void (*launch)(const DecodeMergeParams& params, Stream stream);
};

extern const MergeLauncher merge_bf16;
extern const MergeLauncher merge_fp16;

// The compiled decode kernels of sm80_attention for compressed caches: one for each pair of element type and head dims
// (kernels/instances.cmake). The MLA kernel exists for bf16 only, because the FP8 latent cache has only bf16.

// As DecodeLauncher.
struct CompressedLauncher {
  int (*prepare)();
  void (*launch)(const CompressedParams& params, int ctas, Stream stream);
};

extern const CompressedLauncher compressed_bf16_64;
extern const CompressedLauncher compressed_bf16_96;
extern const CompressedLauncher compressed_bf16_128;
extern const CompressedLauncher compressed_bf16_192;
extern const CompressedLauncher compressed_bf16_256;
extern const CompressedLauncher compressed_bf16_576;
extern const CompressedLauncher compressed_fp16_64;
extern const CompressedLauncher compressed_fp16_96;
extern const CompressedLauncher compressed_fp16_128;
extern const CompressedLauncher compressed_fp16_192;
extern const CompressedLauncher compressed_fp16_256;

const CompressedLauncher& compressed_launcher_of(const DecodeSpec& spec, bool configured);

// Returns what sm80_attention lacks for a spec's formats, or nothing.
std::vector<std::string> formats_missing(const DecodeSpec& spec);

// Sets the caches of a decode step. Throws kUnsupported if the kernel can't read them.
void set_compressed(const DecodeSpec& spec, const DecodeStep& step, CompressedParams& p);

}  // namespace ringattn::sm80
