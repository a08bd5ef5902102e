// SPDX-License-Identifier: Apache-2.0
// Lists of key tiles from masks and patterns. Pure functions of what they are given, random ones included, so all ranks
// of a job make the same lists for themselves. A pattern may list blocks that the mask hides: those move no bit.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/tile_lists.hpp"

namespace ringattn {

// A query block whose keys are to be listed.
struct ListPlace {
  std::size_t sequence = 0;
  int head = 0;             // of ListShape::heads
  std::int64_t block = 0;   // query block, by position
  KeyRange positions;       // of the block's queries, as far as the sequence has them
  std::int64_t keys = 0;    // of the sequence
  std::int64_t blocks = 0;  // of keys
};

// Appends the key blocks of one list, in any order; those that are named twice count once.
using ListMaker = std::function<void(const ListPlace& place, std::vector<std::int32_t>& blocks)>;

// Lists for every sequence, head and query block. Throws kUsage as the constructor of TileLists does.
TileLists make_lists(const ListShape& shape, std::vector<ListedSequence> sequences, const ListMaker& make);

// Every block.
ListMaker all_blocks();
// A block mask: for each sequence in turn [heads, query blocks, key blocks], a byte each; not 0: listed. The query
// blocks are those that the sequence has, by position. make_lists() throws kUsage where the mask has another size.
TileLists lists_of_mask(const ListShape& shape, std::vector<ListedSequence> sequences,
                        std::span<const std::uint8_t> mask);
// The same as bits: each row of key blocks takes ⌈key blocks / 8⌉ bytes, the least significant bit first.
TileLists lists_of_bits(const ListShape& shape, std::vector<ListedSequence> sequences,
                        std::span<const std::uint8_t> bits);

// Keys at most `window` tokens from one of the block's queries, on both sides.
ListMaker window_blocks(const ListShape& shape, std::int64_t window);
// The first `tokens` keys for every query, and every key for the first `tokens` queries.
ListMaker global_blocks(const ListShape& shape, std::int64_t tokens);
// The `stride` keys before a query, and of every `stride` keys of the sequence the last one.
ListMaker strided_blocks(const ListShape& shape, std::int64_t stride);
// `count` blocks of those that the mask lets the query block see, drawn by Philox from the seed, the sequence, the head
// and the query block. A block may be drawn twice, and then they are fewer.
ListMaker random_blocks(const ListShape& shape, const Mask& mask, int count, std::uint64_t seed);
// Keys that every query sees, and distances between a query and a key before it at which every query sees one.
struct VerticalSlash {
  std::vector<std::int64_t> verticals;
  std::vector<std::int64_t> slashes;
};
// `heads`: [ListShape::heads].
ListMaker vertical_slash_blocks(const ListShape& shape, std::vector<VerticalSlash> heads);

// What any of them lists.
ListMaker union_of(std::vector<ListMaker> makers);

}  // namespace ringattn
