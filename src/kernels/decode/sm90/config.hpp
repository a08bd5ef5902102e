// SPDX-License-Identifier: Apache-2.0
// How sm90_attention decodes a DecodeSpec. Tile sizes, and everything else that affects bits, are those of prefill.
// This file adds only memory layout.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/attention/sm90/config.hpp"

namespace ringattn::sm90 {

inline constexpr int kMaxSharedBytes = 232448;  // maximum dynamic shared memory of a CTA
// sequences of a launch, times the masks of each: a CTA keeps 4 bytes for each
inline constexpr int kMaxDecodeSequences = 1024;
inline constexpr int kMaxPrefixes = 256;            // shared prefixes of a step: a CTA keeps a table of them
inline constexpr int kMaxDecodeKeys = 1 << 30;      // keys of a sequence: positions are 32-bit
inline constexpr int kDecodeConsumerThreads = 128;  // the consumer warpgroup; one producer warp follows
inline constexpr int kDecodeThreads = kDecodeConsumerThreads + 32;
inline constexpr int kDecodeMetadataBytes = 8192;  // shared memory for barriers and the work tile table

// The prefix kernel (prefix.cuh): panels of probabilities of 64 keys, in the memory of Q, and metadata.
inline constexpr int kPrefixPanels = 3;
inline constexpr int kPrefixMetadataBytes = 10752;
constexpr int prefix_q_capacity(const AttentionConfig& attention) {
  return std::max(attention.q_bytes(), kPrefixPanels * cuda::panel_bytes(kQueryTile));
}
// The prefix kernel on CTA pairs, where each CTA has half of V's columns: panels for four tiles.
inline constexpr int kPrefixCtaPairPanels = 8;
inline constexpr int kPrefixCtaPairQCapacity = kPrefixCtaPairPanels * cuda::panel_bytes(kQueryTile);
inline constexpr int kPrefixCtaPairMetadataBytes = 13312;

// K/V stages that fit in shared memory beside `other_bytes`. `slices` divides V's columns.
constexpr int max_stages(const AttentionConfig& attention, int other_bytes, int slices = 1) {
  return std::min((kMaxSharedBytes - other_bytes) / (attention.k_bytes() + attention.v_bytes() / slices), 8);
}
constexpr int decode_stages(const AttentionConfig& attention) {
  return max_stages(attention, attention.q_bytes() + kDecodeMetadataBytes);
}
constexpr int prefix_stages(const AttentionConfig& attention) {
  return max_stages(attention, prefix_q_capacity(attention) + kPrefixMetadataBytes);
}
constexpr int prefix_cta_pair_stages(const AttentionConfig& attention) {
  return max_stages(attention, kPrefixCtaPairQCapacity + kPrefixCtaPairMetadataBytes, 2);
}

// The sliced kernel (sliced.cuh): query rows of a row block, and maximum CTAs of a cluster.
inline constexpr int kColumnSliceRows = 16;
inline constexpr int kMaxSlices = 4;
// Minimum rows of a V box for TMA, which takes about as long for a box of 1 KB as for one of 8 KB. Smaller boxes are
// copied by lanes in page runs of 16 rows, the minimum page size. K always uses TMA: a CTA scores a half or a fourth of
// the tiles, and loads only their keys.
inline constexpr int kMinBoxRows = 64;
inline constexpr int kPageRunRows = 16;

// See KernelRow::configs.
std::vector<std::string> decode_configs();

}  // namespace ringattn::sm90
