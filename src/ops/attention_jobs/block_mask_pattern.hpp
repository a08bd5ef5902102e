// SPDX-License-Identifier: Apache-2.0
// Block masks as patterns in words.
//
// A pattern is one or more parts joined by "+". The mask is their union.
//   window:W            keys at most W tokens from one of the block's queries
//   global:G            the first G keys for every query, every key for the first G queries
//   vertical:K,K,…      the keys at these positions, for every query
//   slash:D,D,…         for every query the keys at these distances before it
//   strided:S           the S keys before a query, and of every S keys the last one
//   random:N[,SEED]     N blocks drawn of those that the mask lets the queries see
//   bigbird:W,G,N[,SEED]  window:W+global:G+random:N,SEED
//   topk:K              K blocks by the scores of mean queries and mean keys, the first and the diagonal one among them
//   all                 every block
// and, once each, the mask's heads:
//   block:N or block:Q,K  blocks of N tokens, or of Q queries and K keys [128]
//   heads:all|kv|each     one mask for all heads, for each KV head, or for each query head [all; kv with topk]
// Numbers of tokens may end in k, m or g.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "attention/tokens/job.hpp"
#include "kernels/attention/block_mask_patterns.hpp"

namespace ringattn {

inline constexpr int kDefaultMaskBlock = 128;  // tokens of a block if the pattern sets none
inline constexpr std::int64_t kMaxMaskTokens = std::int64_t{1}
                                               << 30;  // the largest number of tokens in a pattern or block

// Selects the top `count` blocks by the job's rows; `spec` is the job's, with the block mask's shape.
using TopKBlocks = std::function<BlockMask(const AttentionSpec& spec, int count)>;

// The block mask of a job, from a pattern. Throws kUsage for an invalid pattern, and kMemory if the mask exceeds the
// budget.
BlockMask block_mask_from_pattern(std::string_view text, const Job& job, const TopKBlocks& best,
                                  const BlockMaskBudget& budget);

}  // namespace ringattn
