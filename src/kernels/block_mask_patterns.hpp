// SPDX-License-Identifier: Apache-2.0
// Lists of key tiles from masks and patterns. Pure functions of what they are given, random ones included, so all ranks
// of a job make the same lists for themselves. A pattern may list blocks that the mask hides: those move no bit.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/block_mask.hpp"

namespace ringattn {

// A query block whose keys are to be listed.
struct BlockMaskRow {
  std::size_t sequence = 0;
  int head = 0;             // of BlockMaskShape::heads
  std::int64_t block = 0;   // query block, by position
  KeyRange positions;       // of the block's queries, as far as the sequence has them
  std::int64_t keys = 0;    // of the sequence
  std::int64_t blocks = 0;  // of keys
};

// Appends the key blocks of one list, in any order; those that are named twice count once.
using BlockMaskPattern = std::function<void(const BlockMaskRow& place, std::vector<std::int32_t>& blocks)>;

// What lists may take, and why no more: "a rank may use no more".
struct BlockMaskBudget {
  std::int64_t bytes = std::numeric_limits<std::int64_t>::max();
  std::string_view why = {};
  bool counted = false;  // what they take is known to fit: they are made at once
};

// The most key blocks that a sequence with lists has; one list of all of them is made at a time.
inline constexpr std::int64_t kMaxMaskBlocks = std::int64_t{1} << 23;

// Bytes of lists: so many of them, with so many blocks in all.
inline std::int64_t block_mask_bytes(std::int64_t lists, std::int64_t blocks) {
  return static_cast<std::int64_t>(sizeof(std::int64_t)) * lists +
         static_cast<std::int64_t>(sizeof(std::int32_t)) * blocks;
}

// Before lists are made. Throws kMemory for more bytes than there is room for.
void check_budget(const BlockMaskShape& shape, std::int64_t bytes, const BlockMaskBudget& room);
// The lists of these sequences. Throws kMemory where they don't fit even if all of them are empty, and for sequences of
// more than kMaxMaskBlocks.
std::int64_t count_mask_rows(const BlockMaskShape& shape, std::span<const MaskedSequence> sequences,
                             const BlockMaskBudget& room);

// Lists for every sequence, head and query block. What is more than a few megabytes is counted before it is made, so
// `make` may be called twice for a place, and says the same again. Throws kUsage as the constructor of BlockMask
// does, and kMemory where they don't fit.
BlockMask make_block_mask(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                          const BlockMaskPattern& make, const BlockMaskBudget& room = {});

// Every block.
BlockMaskPattern all_blocks();
// A block mask: for each sequence in turn [heads, query blocks, key blocks], a byte each; not 0: listed. The query
// blocks are those that the sequence has, by position. make_block_mask() throws kUsage where the mask has another size.
BlockMask block_mask_from_bytes(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                                std::span<const std::uint8_t> mask);
// The same as bits: each row of key blocks takes ⌈key blocks / 8⌉ bytes, the least significant bit first.
BlockMask block_mask_from_bits(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                               std::span<const std::uint8_t> bits);

// Keys at most `window` tokens from one of the block's queries, on both sides.
BlockMaskPattern window_blocks(const BlockMaskShape& shape, std::int64_t window);
// The first `tokens` keys for every query, and every key for the first `tokens` queries.
BlockMaskPattern global_blocks(const BlockMaskShape& shape, std::int64_t tokens);
// The `stride` keys before a query, and of every `stride` keys of the sequence the last one.
BlockMaskPattern strided_blocks(const BlockMaskShape& shape, std::int64_t stride);
// `count` blocks of those that the mask lets the query block see, drawn by Philox from the seed, the sequence, the head
// and the query block. A block may be drawn twice, and then they are fewer. Throws kUsage for more than 2^16.
BlockMaskPattern random_blocks(const BlockMaskShape& shape, const Mask& mask, int count, std::uint64_t seed);
// Keys that every query sees, and distances between a query and a key before it at which every query sees one.
struct VerticalSlash {
  std::vector<std::int64_t> verticals;
  std::vector<std::int64_t> slashes;
};
// `heads`: [BlockMaskShape::heads].
BlockMaskPattern vertical_slash_blocks(const BlockMaskShape& shape, std::vector<VerticalSlash> heads);

// What any of them lists.
BlockMaskPattern union_of_patterns(std::vector<BlockMaskPattern> makers);

}  // namespace ringattn
