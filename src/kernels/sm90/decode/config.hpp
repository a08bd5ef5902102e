// SPDX-License-Identifier: Apache-2.0
// How sm90_fold decodes a DecodeSpec. Tiles, and whatever else moves a bit, are those of the fold (fold/config.hpp);
// what is added here says only where things lie.
#pragma once

#include <string>
#include <vector>

#include "kernels/sm90/fold/config.hpp"

namespace ringattn::sm90 {

inline constexpr int kMostSharedBytes = 232448;    // of a CTA
inline constexpr int kMostDecodeSequences = 1024;  // of a step: each CTA keeps a number for each
inline constexpr int kMostPrefixes = 256;          // of a step, for the same reason
inline constexpr int kMostDecodeKeys = 1 << 30;    // of a sequence: positions are numbers of 32 bits
inline constexpr int kDecodeFoldThreads = 128;     // a warpgroup that folds; behind it, one warp fetches
inline constexpr int kDecodeThreads = kDecodeFoldThreads + 32;
inline constexpr int kDecodeNumberBytes = 8192;  // of shared memory: barriers, and the sequences' numbers

// Room for K and V tiles in shared memory, beside the query rows.
constexpr int decode_stages(const FoldConfig& fold) {
  const int stages = (kMostSharedBytes - fold.q_bytes() - kDecodeNumberBytes) / (fold.k_bytes() + fold.v_bytes());
  return stages < 8 ? stages : 8;
}

// The sliced kernel (sliced.cuh): query rows of a block, warps that score, and CTAs of a cluster at most.
inline constexpr int kSlicedRows = 16;
inline constexpr int kScoreWarps = 4;
inline constexpr int kMostSlices = 4;

// See KernelRow::configs.
std::vector<std::string> decode_configs();

}  // namespace ringattn::sm90
