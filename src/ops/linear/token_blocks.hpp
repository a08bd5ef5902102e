// SPDX-License-Identifier: Apache-2.0
// Which tokens a rank computes and sends at a time, where ranks that share a layer exchange parts of y.
//
// Each rank is to have y of some tokens, its share (linear_tokens()), which is cut into token blocks. In pass i, a rank
// computes its part of the i-th block of every rank's share: that of the next rank first, and so on around, each on its
// way as soon as it is computed. Its own block comes last, while parts travel. Then the rank completes its own block
// from all ranks' parts. So most of the exchange is hidden by products, and buffers hold one pass, not all tokens.
//
// A product reads all weights of a rank. So where blocks would be small, one product has the tokens of all ranks.
//
// Pure functions of the job, the number of ranks and the number of tokens. Bits do not depend on them.
#pragma once

#include <cstdint>

#include "ops/linear/linear.hpp"

namespace ringattn {

struct TokenBlocks {
  std::int64_t tokens = 0;  // of a call
  int ranks = 1;
  std::int64_t size = 0;  // tokens of a block; the last one of a share may have fewer, or none
  int passes = 0;
  bool one_product = false;  // with all tokens of the only pass

  // Tokens of the block of `rank` in a pass.
  FeatureRange block(int rank, int pass) const;
};

TokenBlocks token_blocks(const LinearJob& job, int ranks, std::int64_t tokens);

// The most tokens of any call: of a block, of the blocks of all ranks in a pass, and of a product.
struct TokenBlockLimits {
  std::int64_t block = 0;
  std::int64_t pass = 0;
  std::int64_t product = 0;
};
TokenBlockLimits token_block_limits(const LinearJob& job, int ranks);

}  // namespace ringattn
