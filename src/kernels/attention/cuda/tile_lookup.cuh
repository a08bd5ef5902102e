// SPDX-License-Identifier: Apache-2.0
// Address lookup of the KV tiles of a KV loop. A KV loop iterates over the key runs of a sequence as if they were one:
// the tiles that the task has are numbered through all of them.
#pragma once

#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

// Finds the run with tile `number` among the `count` runs of a sequence.
__device__ __forceinline__ const RunEntry& find_run(const RunEntry* runs, int count, std::int64_t number) {
  while (count > 1) {
    const int half = count / 2;
    const bool in_upper_half = runs[half].first <= number;
    runs += in_upper_half ? half : 0;
    count = in_upper_half ? count - half : half;
  }
  return *runs;
}

// A KV tile of a KV loop.
struct KvLoopTile {
  std::int64_t tile;           // its number in the sequence; its keys begin at tile · key_tile
  const TileEntry* page_runs;  // its page runs' entries; entries without keys must not be read
};

// Returns the i-th tile of `kv_loop`, which is a WorkTile, a GqaPackedTile, or has their members that locate a KV loop.
template <class KvLoop>
__device__ __forceinline__ KvLoopTile tile_of_kv_loop(const AttentionParams::Tables& tables, const KvLoop& kv_loop,
                                                      int i) {
  std::int64_t tile = kv_loop.first_tile + i;
  std::int64_t index = kv_loop.table + i;
  if (kv_loop.runs > 1) {
    const std::int64_t number = kv_loop.first + i;
    const RunEntry& run = find_run(tables.runs + kv_loop.run_begin, kv_loop.runs, number);
    tile = run.first_tile + number - run.first;
    index = run.table + number - run.first;
  }
  return {tile, tables.tiles + index * tables.page_runs};
}

// Returns source number `source`.
__device__ __forceinline__ const SourceEntry& source_of(const AttentionParams::Tables& tables, int source) {
  return tables.all_inline ? tables.inline_sources[source] : tables.sources[source];
}

// Offset of a row of one head in a source, in elements from its start.
__device__ __forceinline__ std::int64_t k_offset(const SourceEntry& source, std::int64_t row, int head) {
  const auto log = static_cast<int>(source.page_log);
  return (row >> log) * source.k_page_stride + (row & ((std::int64_t{1} << log) - 1)) * source.k_token_stride +
         head * source.k_head_stride;
}
__device__ __forceinline__ std::int64_t v_offset(const SourceEntry& source, std::int64_t row, int head) {
  const auto log = static_cast<int>(source.page_log);
  return (row >> log) * source.v_page_stride + (row & ((std::int64_t{1} << log) - 1)) * source.v_token_stride +
         head * source.v_head_stride;
}

}  // namespace ringattn::cuda
