// SPDX-License-Identifier: Apache-2.0
// Block-sparse masks: which key blocks the queries of a query block may attend to, in addition to the Mask. Query
// blocks and key blocks are multiples of the kernel's tiles, so all rows of a query tile have the same block-mask row,
// and a key block is whole tiles.
//
// The Mask takes precedence. A row processes the key tiles that the block mask has and its query tile sees by the Mask,
// and within a tile it sees the keys that the Mask allows. A key block that no query of the query block sees is
// ignored.
//
// KV splits (kernels/attention/merge.hpp) have kTilesPerKvSplit tiles also in a sparse mask, because a tile's split
// follows from its ordinal in the mask row instead of its index in the sequence:
//  KV split of a tile = ordinal / kTilesPerKvSplit,   ordinal = first + number of the row's tiles in [first, tile)
// where `first` is the first tile that any position of the query block sees by the Mask: 0 except for sliding windows.
// So a tile's ordinal follows from the block mask and the Mask alone, however tasks and ranks divide the keys. In a row
// with all tiles, a tile's ordinal is its index, and the bits are those of attention without a block mask.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention/visibility.hpp"

namespace ringattn {

// Shape of a block mask: the part that the choice of a kernel depends on.
struct BlockMaskShape {
  int query_block = 0;  // positions that share a mask row, counted from position 0; 0: no block mask
  int key_block = 0;    // keys per key block, counted from key 0
  int heads = 0;        // mask heads: 1 (shared by all heads), one per KV head, or one per query head

  bool any() const { return query_block > 0; }
  bool operator==(const BlockMaskShape&) const = default;
};

// The lengths of a sequence that its mask rows depend on.
struct MaskedSequence {
  std::int64_t position = 0;  // position of the first query
  std::int64_t queries = 0;
  std::int64_t keys = 0;

  bool operator==(const MaskedSequence&) const = default;
};

// The query block that contains a position. Positions may be negative.
inline std::int64_t query_block_of(std::int64_t position, int query_block) {
  return query_tile_begin(position, query_block) / query_block;
}

// The block mask of all sequences of a batch. Immutable, so its id() identifies its contents.
class BlockMask {
 public:
  // BSR: mask row n has the key blocks blocks[begins[n]] … blocks[begins[n + 1] − 1], ascending. Rows are ordered
  // [sequences][shape.heads][query blocks]. The query blocks of a sequence are those from its first query to its last,
  // and none if it has no queries. Throws kUsage for blocks that are not positive, a wrong number of rows, and a row
  // that does not ascend or has a block beyond the sequence. The message names sequence, head and query block.
  BlockMask(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences, std::vector<std::int64_t> begins,
            std::vector<std::int32_t> blocks);

  const BlockMaskShape& shape() const { return shape_; }
  std::span<const MaskedSequence> sequences() const { return sequences_; }
  // Query blocks [begin, end) of a sequence that have mask rows.
  TileRange query_blocks(std::size_t sequence) const { return query_blocks_[sequence]; }
  // Key blocks of one mask row. `head` is a mask head: 0 … shape().heads − 1.
  std::span<const std::int32_t> row(std::size_t sequence, int head, std::int64_t query_block) const;
  // The BSR arrays of all rows, as the constructor takes them.
  std::span<const std::int64_t> indptr() const { return indptr_; }
  std::span<const std::int32_t> indices() const { return indices_; }
  // Runs of consecutive key blocks in the query blocks that contain positions [position, position + rows), summed over
  // mask heads. An upper bound of the runs of tiles that these rows process.
  std::int64_t runs(std::size_t sequence, std::int64_t position, std::int64_t rows) const;
  // Unique for each constructed object of this process. Copies share it.
  std::int64_t id() const { return id_; }

  // Compares contents.
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

// The mask head of a query head, out of `heads` query heads.
inline int mask_head(const BlockMaskShape& shape, int heads, int head) { return head / (heads / shape.heads); }

// Consecutive tiles that a query block processes, and the ordinal of the first one.
struct MaskedTileRun {
  TileRange tiles;
  std::int64_t ordinal = 0;
};

// Calls visit(MaskedTileRun) for the tiles that a query block processes, in ascending order. Runs are maximal, and
// ordinals continue from one run to the next.
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
      run.ordinal += run.tiles.end - run.tiles.begin;
    }
    run.tiles = {begin, end};
  }
  if (!run.tiles.empty()) visit(run);
}

// Number of (query, key) pairs that both the block mask and the Mask allow, for the `rows` queries from `position` on
// and the keys in `keys`. The mean over mask heads.
double masked_pairs(const BlockMask& block_mask, const Mask& mask, std::size_t sequence, std::int64_t position,
                    std::int64_t rows, const KeyRange& keys);

// What a kernel with these tile sizes does not support about the block mask (KernelRow::missing). Empty: nothing, or
// there is no block mask.
std::string missing_for_block_mask(const BlockMaskShape& shape, const TileSizes& tiles);

// "block mask of 128x128 blocks", and ", one per KV head" or ", one per head" after it. No block mask: "".
std::string describe(const BlockMaskShape& shape, int heads);

}  // namespace ringattn
