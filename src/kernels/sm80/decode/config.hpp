// SPDX-License-Identifier: Apache-2.0
// How sm80_attention decodes a DecodeSpec. Tiles, and whatever else moves a bit, are those of the fold
// (sm80/config.hpp); what is added here says only where things lie.
#pragma once

#include <string>
#include <vector>

#include "kernels/sm80/config.hpp"

namespace ringattn::sm80 {

inline constexpr int kDecodeWarps = 4;             // of a CTA; each attends 16 rows, unless they cut O into slices
inline constexpr int kMinPage = 16;                // tokens of a cache's page
inline constexpr int kMaxSharedBytes = 99 * 1024;  // of a CTA on every device from sm_80 on
inline constexpr int kMaxPartitions = 256;         // of a merge: their addresses are parameters of a launch

// Where the fold cuts O into slices, its CTAs are those of the decode, too.
constexpr int decode_threads(const AttentionConfig& attention) {
  return attention.slices > 1 ? attention.threads() : 32 * kDecodeWarps;
}
// Rows of the products in a CTA.
constexpr int decode_rows(const AttentionConfig& attention) {
  return attention.slices > 1 ? attention.query_tile() : 16 * kDecodeWarps;
}

// Pages that a group of key tiles lies in, at most.
constexpr int decode_pages(const AttentionConfig& attention) {
  return kTilesPerKvSplit * attention.key_tile / kMinPage;
}

// Shared memory of a CTA: Q, so many stages of K and V, and the pages of a group.
constexpr int decode_bytes(const AttentionConfig& attention, int stages) {
  if (attention.slices > 1) return attention.sliced_bytes() + decode_pages(attention) * 4;
  const int k_row = cuda::padded_row_bytes(attention.head_dim);
  const int v_row = cuda::padded_row_bytes(attention.head_dim_v);
  return decode_rows(attention) * k_row + stages * attention.key_tile * (k_row + v_row) + decode_pages(attention) * 4;
}

// Room for K and V tiles, or for strips of them; 1: K and V of a tile are fetched in turn. Beside them a CTA needs 256
// bytes for its work_tile.
constexpr int decode_stages(const AttentionConfig& attention) {
  if (attention.slices > 1) return attention.stages;
  return decode_bytes(attention, 2) + 256 <= kMaxSharedBytes ? 2 : 1;
}

// See KernelRow::configs.
std::vector<std::string> decode_configs();

}  // namespace ringattn::sm80
