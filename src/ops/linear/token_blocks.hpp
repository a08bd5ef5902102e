// SPDX-License-Identifier: Apache-2.0
// The tokens that a rank computes and sends at a time, if ranks that share a layer exchange parts of y.
//
// Each rank gets y of some tokens, its share (linear_tokens()), which is divided into token blocks. In pass i, a rank
// computes its part of the i-th block of every rank's share, first that of the next rank, then of the rank after it,
// and so on. Each part is sent as soon as it is computed. The rank's own block comes last, while the parts are in
// flight. Then the rank completes its own block from all ranks' parts. So products hide most of the exchange, and
// buffers hold one pass instead of all tokens.
//
// A product reads all weights of a rank, so if blocks would be small, one product computes the tokens of all ranks.
//
// Pure functions of the job, the number of ranks and the number of tokens. Bits do not depend on them.
#pragma once

#include <cstdint>

#include "ops/linear/linear.hpp"

namespace ringattn {

struct TokenBlocks {
  std::int64_t tokens = 0;  // tokens of a call
  int ranks = 1;
  std::int64_t size = 0;  // tokens of a block; the last one of a share may have fewer, or none
  int passes = 0;
  bool one_product = false;  // one product for all tokens of the only pass

  // The tokens of the block of `rank` in a pass.
  FeatureRange block(int rank, int pass) const;
};

TokenBlocks token_blocks(const LinearJob& job, int ranks, std::int64_t tokens);

// Maximum numbers of tokens over all calls: of a block, of the blocks of all ranks in a pass, and of a product.
struct TokenBlockLimits {
  std::int64_t block = 0;
  std::int64_t pass = 0;
  std::int64_t product = 0;
};
TokenBlockLimits token_block_limits(const LinearJob& job, int ranks);

}  // namespace ringattn
