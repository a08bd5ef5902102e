// SPDX-License-Identifier: Apache-2.0
// How sm90_attention decodes a DecodeSpec. Tiles, and whatever else moves a bit, are those of the fold
// (fold/config.hpp); what is added here says only where things lie.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/sm90/fold/config.hpp"

namespace ringattn::sm90 {

inline constexpr int kMaxSharedBytes = 232448;      // of a CTA
inline constexpr int kMaxDecodeSequences = 1024;    // of a launch, or their lists: each CTA keeps a number for each
inline constexpr int kMaxPrefixes = 256;            // of a step, for the same reason
inline constexpr int kMaxDecodeKeys = 1 << 30;      // of a sequence: positions are numbers of 32 bits
inline constexpr int kDecodeConsumerThreads = 128;  // a warpgroup that folds; behind it, one warp fetches
inline constexpr int kDecodeThreads = kDecodeConsumerThreads + 32;
inline constexpr int kDecodeMetadataBytes = 8192;  // of shared memory: barriers, and the sequences' numbers

// The kernel of shared prefixes (prefix.cuh): panels of probabilities of 64 keys, in the query rows' room, and numbers.
inline constexpr int kPrefixPanels = 3;
inline constexpr int kPrefixMetadataBytes = 10752;
constexpr int prefix_q_capacity(const AttentionConfig& attention) {
  return std::max(attention.q_bytes(), kPrefixPanels * cuda::panel_bytes(kQueryTile));
}
// The same by pairs of CTAs, which have half of V's columns each: panels of four tiles.
inline constexpr int kPrefixCtaPairPanels = 8;
inline constexpr int kPrefixCtaPairQCapacity = kPrefixCtaPairPanels * cuda::panel_bytes(kQueryTile);
inline constexpr int kPrefixCtaPairMetadataBytes = 13312;

// Stages of K and V tiles in shared memory, beside so many bytes of other things. `slices`: of V's columns.
constexpr int stages_beside(const AttentionConfig& attention, int other_bytes, int slices = 1) {
  return std::min((kMaxSharedBytes - other_bytes) / (attention.k_bytes() + attention.v_bytes() / slices), 8);
}
constexpr int decode_stages(const AttentionConfig& attention) {
  return stages_beside(attention, attention.q_bytes() + kDecodeMetadataBytes);
}
constexpr int prefix_stages(const AttentionConfig& attention) {
  return stages_beside(attention, prefix_q_capacity(attention) + kPrefixMetadataBytes);
}
constexpr int prefix_cta_pair_stages(const AttentionConfig& attention) {
  return stages_beside(attention, kPrefixCtaPairQCapacity + kPrefixCtaPairMetadataBytes, 2);
}

// The sliced kernel (sliced.cuh): query rows of a block, and CTAs of a cluster at most.
inline constexpr int kSlicedRows = 16;
inline constexpr int kMaxSlices = 4;
// AttentionState of V's boxes that the copy engine fetches, at least: it takes about as long for a box of 1 KB as for
// one of 8. AttentionState of smaller ones are copied by lanes, in pieces of 16, as no page has fewer. K's boxes are
// its business always: a CTA scores a half or a fourth of the tiles, and fetches the keys of no other.
inline constexpr int kMinBoxRows = 64;
inline constexpr int kPageRunRows = 16;

// See KernelRow::configs.
std::vector<std::string> decode_configs();

}  // namespace ringattn::sm90
