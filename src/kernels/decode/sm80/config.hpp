// SPDX-License-Identifier: Apache-2.0
// How sm80_attention decodes a DecodeSpec. Tiles, and everything else that affects bits, are those of the prefill
// kernel (attention/sm80/config.hpp). This file adds only memory layout.
#pragma once

#include <string>
#include <vector>

#include "kernels/attention/sm80/config.hpp"

namespace ringattn::sm80 {

// Warps per CTA. Each computes 16 rows, unless the warps share rows and divide O into slices.
inline constexpr int kDecodeWarps = 4;
inline constexpr int kMinPage = 16;                // minimum page size of a cache, in tokens
inline constexpr int kMaxSharedBytes = 99 * 1024;  // per CTA, on every device from sm_80 on
inline constexpr int kMaxPartitions = 256;         // partitions per merge: their addresses are launch parameters

// With slices, the decode CTAs have the prefill CTAs' threads.
constexpr int decode_threads(const AttentionConfig& attention) {
  return attention.slices > 1 ? attention.threads() : 32 * kDecodeWarps;
}
// Rows of a CTA's query tile.
constexpr int decode_rows(const AttentionConfig& attention) {
  return attention.slices > 1 ? attention.query_tile() : 16 * kDecodeWarps;
}

// Maximum pages of a KV split.
constexpr int decode_pages(const AttentionConfig& attention) {
  return kTilesPerKvSplit * attention.key_tile / kMinPage;
}

// Bytes of shared memory per CTA: Q, `stages` of K and V, and the pages of a KV split.
constexpr int decode_bytes(const AttentionConfig& attention, int stages) {
  if (attention.slices > 1) return attention.sliced_bytes() + decode_pages(attention) * 4;
  const int k_row = cuda::padded_row_bytes(attention.head_dim);
  const int v_row = cuda::padded_row_bytes(attention.head_dim_v);
  return decode_rows(attention) * k_row + stages * attention.key_tile * (k_row + v_row) + decode_pages(attention) * 4;
}

// Pipeline stages of K and V tiles, or of strips of them. With 1 stage, K and V of a tile are loaded alternately. A CTA
// needs another 256 bytes for its work tile, and 128 to align the rest (decode.cuh).
constexpr int decode_stages(const AttentionConfig& attention) {
  if (attention.slices > 1) return attention.stages;
  return decode_bytes(attention, 2) + 256 + 128 <= kMaxSharedBytes ? 2 : 1;
}

// Text for KernelRow::configs.
std::vector<std::string> decode_configs();

}  // namespace ringattn::sm80
