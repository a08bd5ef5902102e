// SPDX-License-Identifier: Apache-2.0
// Lists of key tiles: which keys the queries of a block may see, beside what the mask says. A list is kept in blocks of
// queries and of keys, which are multiples of a kernel's tiles, so that all rows of a query tile have the same list and
// a listed block of keys is whole tiles.
//
// The mask wins where it and a list disagree. A row folds those listed tiles that its query tile sees by the mask, and
// inside of a tile it sees the keys that the mask lets through. A listed tile that no query of the block sees is as if
// it were not listed.
//
// Groups of key tiles (kernels/merge.hpp) are full also where tiles are listed sparsely, because a tile's group follows
// from its place in the list and not from its number in the sequence:
//   group of a tile = place / kTilesPerKvSplit,   place = first + listed tiles from `first` up to the tile
// where `first` is the first tile that any position of the query block sees by the mask: 0 but for sliding windows. So
// the place of each tile follows from the list, the block and the mask alone, wherever tasks and ranks cut the keys.
// In a list of all tiles the place of a tile is its number, and the bits are those of the fold without lists.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/visibility.hpp"

namespace ringattn {

// What lists look like: the part that the choice of a kernel depends on.
struct BlockMaskShape {
  int query_block = 0;  // positions that share a list, counted from position 0; 0: there are no lists
  int key_block = 0;    // keys of a listed block, counted from key 0
  int heads = 0;        // lists of a query block: 1 (all heads share it), one a KV head, or one a query head

  bool any() const { return query_block > 0; }
  bool operator==(const BlockMaskShape&) const = default;
};

// A sequence as its lists need to know it.
struct MaskedSequence {
  std::int64_t position = 0;  // of the first query
  std::int64_t queries = 0;
  std::int64_t keys = 0;

  bool operator==(const MaskedSequence&) const = default;
};

// The query block that a position lies in. Positions may be negative.
inline std::int64_t query_block_of(std::int64_t position, int query_block) {
  return query_tile_begin(position, query_block) / query_block;
}

// The lists of all sequences of a batch. Never changes, so that who has seen it once knows it by its id().
class BlockMask {
 public:
  // In compressed rows: list n holds blocks[begins[n]] … blocks[begins[n + 1] − 1], numbers of key blocks, ascending.
  // Lists stand in the order [sequences][shape.heads][query blocks], where the query blocks of a sequence are those
  // from its first query's to its last one's, and none without queries. Throws kUsage for blocks that are not positive,
  // a wrong number of block_mask, and a list that does not ascend or names a block that the sequence lacks; the message
  // names sequence, head and query block.
  BlockMask(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences, std::vector<std::int64_t> begins,
            std::vector<std::int32_t> blocks);

  const BlockMaskShape& shape() const { return shape_; }
  std::span<const MaskedSequence> sequences() const { return sequences_; }
  // Query blocks [begin, end) of a sequence that have lists.
  TileRange query_blocks(std::size_t sequence) const { return query_blocks_[sequence]; }
  // Key blocks that are listed for a query block; `head` is one of shape().heads.
  std::span<const std::int32_t> row(std::size_t sequence, int head, std::int64_t query_block) const;
  // All of them, as the constructor takes them.
  std::span<const std::int64_t> indptr() const { return indptr_; }
  std::span<const std::int32_t> indices() const { return indices_; }
  // Listed runs of consecutive key blocks of the query blocks that hold queries at position … position + rows − 1, over
  // all heads' lists: no fewer than the runs of tiles that these fold.
  std::int64_t runs(std::size_t sequence, std::int64_t position, std::int64_t rows) const;
  // Different for objects of this process that were made apart, the same for copies.
  std::int64_t id() const { return id_; }

  // Whether they say the same, whoever made them.
  bool operator==(const BlockMask& other) const {
    return id_ == other.id_ || (shape_ == other.shape_ && sequences_ == other.sequences_ && indptr_ == other.indptr_ &&
                                indices_ == other.indices_);
  }

 private:
  void check() const;

  BlockMaskShape shape_;
  std::vector<MaskedSequence> sequences_;
  std::vector<TileRange> query_blocks_;  // [sequences]
  std::vector<std::int64_t> first_row_;  // [sequences]
  std::vector<std::int64_t> indptr_;
  std::vector<std::int32_t> indices_;
  std::int64_t id_;
};

// The head of lists of this shape that a query head has, of `heads` query heads.
inline int mask_head(const BlockMaskShape& shape, int heads, int head) { return head / (heads / shape.heads); }

// Consecutive tiles that a query block folds, and the place of the first one.
struct MaskedTileRun {
  TileRange tiles;
  std::int64_t place = 0;
};

// Calls visit(MaskedTileRun) for the tiles that a query block folds, in ascending order. Runs are as long as can be,
// and the place goes on from one to the next.
template <class Visit>
void for_each_masked_tile_run(const BlockMask& block_mask, const Mask& mask, int key_tile, std::size_t sequence,
                              int head, std::int64_t query_block, Visit visit) {
  const BlockMaskShape& shape = block_mask.shape();
  const std::int64_t first = query_block * shape.query_block;
  const TileRange seen = tiles_of(
      Visibility(mask, block_mask.sequences()[sequence].keys).keys(first, first + shape.query_block - 1), key_tile);
  if (seen.empty()) return;
  const std::int64_t block_tiles = shape.key_block / key_tile;
  MaskedTileRun run{{0, 0}, seen.begin};
  for (const std::int32_t block : block_mask.row(sequence, head, query_block)) {
    const std::int64_t begin = block * block_tiles < seen.begin ? seen.begin : block * block_tiles;
    const std::int64_t end = (block + 1) * block_tiles > seen.end ? seen.end : (block + 1) * block_tiles;
    if (begin >= end) continue;
    if (begin == run.tiles.end) {
      run.tiles.end = end;
      continue;
    }
    if (!run.tiles.empty()) {
      visit(run);
      run.place += run.tiles.end - run.tiles.begin;
    }
    run.tiles = {begin, end};
  }
  if (!run.tiles.empty()) visit(run);
}

// (query, key) pairs that a list and the mask let through, of the `rows` queries from `position` on and of those keys
// in `keys`: the mean over the heads of the lists.
double masked_pairs(const BlockMask& block_mask, const Mask& mask, std::size_t sequence, std::int64_t position,
                    std::int64_t rows, const KeyRange& keys);

// What a kernel with these tiles lacks for the lists (KernelRow::missing); empty: nothing, or there are none.
std::string missing_for_block_mask(const BlockMaskShape& shape, const TileSizes& tiles);

// "lists of 128x128 blocks", with ", one a KV head" or ", one a head" behind it. Shape of none: "".
std::string describe(const BlockMaskShape& shape, int heads);

}  // namespace ringattn
