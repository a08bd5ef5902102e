// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/token_blocks.hpp"

#include <algorithm>

namespace ringattn {

namespace {

// The number of sums of a product. A GPU with 132 SMs computes 2.2 million at a time, in tiles of 128 x 128. If there
// are fewer, separate products for the ranks take longer than one for all. Blocks with four times as many lose little
// time between products (bench/notes/linear.md).
constexpr std::int64_t kMinProductSums = std::int64_t{1} << 21;
constexpr std::int64_t kBlockSums = std::int64_t{1} << 23;
constexpr std::int64_t kBlockUnit = 256;  // tokens: rows of two tiles

std::int64_t divide_up(std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; }

// Number of sums that a rank computes for each token.
std::int64_t sums_of_token(const LinearJob& job, int ranks) {
  const std::int64_t columns = job.spec.sum_columns();
  return job.spec.parallel == LinearParallel::kColumn ? divide_up(columns, ranks) : columns;
}

std::int64_t max_block(const LinearJob& job, int ranks) {
  if (job.token_block > 0) return job.token_block;
  return std::max<std::int64_t>(1, kBlockSums / sums_of_token(job, ranks) / kBlockUnit) * kBlockUnit;
}

// Blocks with fewer tokens share one product with those of other ranks.
std::int64_t min_block(const LinearJob& job, int ranks) {
  return job.token_block > 0 ? 0 : divide_up(kMinProductSums, sums_of_token(job, ranks));
}

}  // namespace

FeatureRange TokenBlocks::block(int rank, int pass) const {
  const FeatureRange share = linear_tokens(tokens, ranks, rank);
  return {std::min(share.end, share.begin + pass * size), std::min(share.end, share.begin + (pass + 1) * size)};
}

TokenBlocks token_blocks(const LinearJob& job, int ranks, std::int64_t tokens) {
  TokenBlocks blocks{.tokens = tokens, .ranks = ranks};
  const std::int64_t share = divide_up(tokens, ranks);  // tokens of the rank that has most
  if (share == 0) return blocks;
  const std::int64_t most = max_block(job, ranks);
  const std::int64_t even = divide_up(share, divide_up(share, most));
  blocks.size = std::min({share, most, divide_up(even, kBlockUnit) * kBlockUnit});
  blocks.passes = static_cast<int>(divide_up(share, blocks.size));
  blocks.one_product = share < min_block(job, ranks);
  return blocks;
}

TokenBlockLimits token_block_limits(const LinearJob& job, int ranks) {
  const std::int64_t block = std::min(divide_up(job.max_tokens, ranks), max_block(job, ranks));
  const std::int64_t small = std::min(job.max_tokens, ranks * (min_block(job, ranks) - 1));
  return {block, ranks * block, std::max(block, small)};
}

}  // namespace ringattn
