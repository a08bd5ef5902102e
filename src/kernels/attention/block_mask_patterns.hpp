// SPDX-License-Identifier: Apache-2.0
// Block masks from bitmaps and patterns. All are pure functions, including the random ones, so every rank of a job
// computes the same block mask. A pattern may have key blocks that the Mask hides: they do not affect results.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/attention/block_mask.hpp"

namespace ringattn {

// The mask row that a pattern is to fill.
struct BlockMaskRow {
  std::size_t sequence = 0;
  int head = 0;             // mask head, below BlockMaskShape::heads
  std::int64_t block = 0;   // query block index, by position
  KeyRange positions;       // positions of the block's queries that the sequence has
  std::int64_t keys = 0;    // keys of the sequence
  std::int64_t blocks = 0;  // key blocks of the sequence
};

// Appends the key blocks of one mask row, in any order. Duplicates count once.
using BlockMaskPattern = std::function<void(const BlockMaskRow& row, std::vector<std::int32_t>& blocks)>;

// Memory limit of a block mask, and its reason for messages: "a rank may use no more".
struct BlockMaskBudget {
  std::int64_t bytes = std::numeric_limits<std::int64_t>::max();
  std::string_view why = {};
  bool counted = false;  // the size is known to fit: the mask is built without counting first
};

// Maximum key blocks of a sequence with a block mask. One complete mask row is built at a time.
inline constexpr std::int64_t kMaxMaskBlocks = std::int64_t{1} << 23;

// Bytes of `rows` mask rows with `blocks` key blocks in total.
inline std::int64_t block_mask_bytes(std::int64_t rows, std::int64_t blocks) {
  return static_cast<std::int64_t>(sizeof(std::int64_t)) * rows +
         static_cast<std::int64_t>(sizeof(std::int32_t)) * blocks;
}

// Throws kMemory if `bytes` is above the budget. Called before the mask is built.
void check_budget(const BlockMaskShape& shape, std::int64_t bytes, const BlockMaskBudget& budget);
// Number of mask rows of these sequences. Throws kMemory if they exceed the budget even when empty, and for sequences
// with more than kMaxMaskBlocks key blocks.
std::int64_t count_mask_rows(const BlockMaskShape& shape, std::span<const MaskedSequence> sequences,
                             const BlockMaskBudget& budget);

// Builds the mask rows of every sequence, head and query block. A mask of more than a few megabytes is counted before
// it is built, so `make` may be called twice for a row and must give the same result. Throws kUsage as the constructor
// of BlockMask does, and kMemory if the budget is exceeded.
BlockMask make_block_mask(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                          const BlockMaskPattern& make, const BlockMaskBudget& budget = {});

// All key blocks: a dense mask.
BlockMaskPattern all_blocks();
// From a bitmap: for each sequence in turn [heads, query blocks, key blocks], a byte each; nonzero: attend. Query
// blocks are those that the sequence has, by position. Throws kUsage if the bitmap has another size.
BlockMask block_mask_from_bytes(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                                std::span<const std::uint8_t> mask);
// The same with bits: a row of key blocks takes ⌈key blocks / 8⌉ bytes, least significant bit first.
BlockMask block_mask_from_bits(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                               std::span<const std::uint8_t> bits);

// Keys at most `window` tokens from one of the block's queries, on both sides.
BlockMaskPattern window_blocks(const BlockMaskShape& shape, std::int64_t window);
// The first `tokens` keys for every query, and every key for the first `tokens` queries.
BlockMaskPattern global_blocks(const BlockMaskShape& shape, std::int64_t tokens);
// The `stride` keys before a query, and the last of every `stride` keys of the sequence.
BlockMaskPattern strided_blocks(const BlockMaskShape& shape, std::int64_t stride);
// `count` of the key blocks that the Mask allows for the query block, drawn by Philox from the seed, the sequence, the
// head and the query block. Draws are with replacement, so there may be fewer. Throws kUsage for more than 2^16.
BlockMaskPattern random_blocks(const BlockMaskShape& shape, const Mask& mask, int count, std::uint64_t seed);
// Vertical-slash pattern: keys that every query sees, and query-key distances at which every query sees a key.
struct VerticalSlash {
  std::vector<std::int64_t> verticals;
  std::vector<std::int64_t> slashes;
};
// `heads`: [BlockMaskShape::heads].
BlockMaskPattern vertical_slash_blocks(const BlockMaskShape& shape, std::vector<VerticalSlash> heads);

// The union of the patterns.
BlockMaskPattern union_of_patterns(std::vector<BlockMaskPattern> makers);

}  // namespace ringattn
