// SPDX-License-Identifier: Apache-2.0
// How sm80_fold decodes a DecodeSpec. Tiles, and whatever else moves a bit, are those of the fold (sm80/config.hpp);
// what is added here says only where things lie.
#pragma once

#include <string>
#include <vector>

#include "kernels/sm80/config.hpp"

namespace ringattn::sm80 {

inline constexpr int kDecodeWarps = 4;              // of a CTA; each folds 16 rows, unless they cut O into slices
inline constexpr int kLeastPage = 16;               // tokens of a cache's page
inline constexpr int kMostSharedBytes = 99 * 1024;  // of a CTA on every device from sm_80 on
inline constexpr int kMostShares = 256;             // of a merge: their addresses are parameters of a launch

// Where the fold cuts O into slices, its CTAs are those of the decode, too.
constexpr int decode_threads(const FoldConfig& fold) { return fold.slices > 1 ? fold.threads() : 32 * kDecodeWarps; }
// Rows of the products in a CTA.
constexpr int decode_rows(const FoldConfig& fold) { return fold.slices > 1 ? fold.query_tile() : 16 * kDecodeWarps; }

// Pages that a group of key tiles lies in, at most.
constexpr int decode_pages(const FoldConfig& fold) { return kGroupTiles * fold.key_tile / kLeastPage; }

// Shared memory of a CTA: Q, so many stages of K and V, and the pages of a group.
constexpr int decode_bytes(const FoldConfig& fold, int stages) {
  if (fold.slices > 1) return fold.sliced_bytes() + decode_pages(fold) * 4;
  const int k_row = cuda::padded_row_bytes(fold.head_dim);
  const int v_row = cuda::padded_row_bytes(fold.head_dim_v);
  return decode_rows(fold) * k_row + stages * fold.key_tile * (k_row + v_row) + decode_pages(fold) * 4;
}

// Room for K and V tiles, or for strips of them; 1: K and V of a tile are fetched in turn. Beside them a CTA needs 256
// bytes for its unit.
constexpr int decode_stages(const FoldConfig& fold) {
  if (fold.slices > 1) return fold.stages;
  return decode_bytes(fold, 2) + 256 <= kMostSharedBytes ? 2 : 1;
}

// See KernelRow::configs.
std::vector<std::string> decode_configs();

}  // namespace ringattn::sm80
