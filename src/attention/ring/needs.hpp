// SPDX-License-Identifier: Apache-2.0
// Which key tiles each rank needs: those that one of its query rows folds, and no others. Kept as spans of tiles, so
// that a long job with many ranks costs what its runs cost, not ranks × tiles.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/ring_work.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/tile_axis.hpp"
#include "kernels/attention.hpp"

namespace ringattn {

// Rows of a rank's block buffer.
struct BufferRows {
  std::int64_t received = 0;
  std::int64_t all = 0;  // with room to assemble the tiles whose keys lie in several runs: no plan needs more
};

class Needs {
 public:
  // `layout` and `axis` outlive the object.
  Needs(const RingWork& work, const JobLayout& layout, const TileAxis& axis, int query_tile, int key_tile);

  int world() const { return static_cast<int>(spans_.size()); }
  // Tiles of the axis that the rank folds, in [first, last): disjoint, ascending, not adjacent.
  std::vector<TileRange> spans(int rank, std::int64_t first, std::int64_t last) const;

  // For a block of tiles [first, last): the largest of any rank, each count by itself.
  BufferRows largest(std::int64_t first, std::int64_t last) const;
  // A bound for it that doesn't ask every rank.
  BufferRows bound(std::int64_t first, std::int64_t last) const;

 private:
  // A span of tiles, and what the spans before it bring.
  struct Span {
    TileRange tiles;
    BufferRows before;
  };

  void find_scattered();
  void find_spans(const RingWork& work, const Layout& queries, int query_tile, int key_tile);
  // Calls need(tiles) for runs of a sequence's tiles that some of the rank's query rows fold of their lists.
  template <class Need>
  void for_each_mask_block(const RingWork& work, const TokenRun& queries, const TileSizes& sizes, Need need) const;

  // Tokens of the scattered tiles in [first, last): those whose keys lie in several runs.
  std::int64_t scattered(std::int64_t first, std::int64_t last) const;
  // For tiles [first, last), all of which the rank needs.
  BufferRows rows_of_needed(int rank, std::int64_t first, std::int64_t last) const;
  // For what the rank needs of the tiles before `tile`.
  BufferRows rows_before(int rank, std::int64_t tile) const;

  const Layout* keys_;
  const TileAxis* axis_;
  std::vector<std::vector<Span>> spans_;        // [world]
  std::vector<std::int64_t> scattered_tokens_;  // of the tiles before each: [tiles + 1]
};

}  // namespace ringattn
