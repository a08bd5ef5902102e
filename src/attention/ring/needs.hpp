// SPDX-License-Identifier: Apache-2.0
// Computes which key tiles each rank needs: those that at least one of its query rows attends to. Stored as spans of
// tiles, so cost grows with the number of runs, not with ranks × tiles.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/ring_work.hpp"
#include "attention/tokens/layout.hpp"
#include "attention/tokens/tile_axis.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn {

// Number of rows of a rank's block buffer.
struct BufferRows {
  std::int64_t received = 0;
  std::int64_t all = 0;  // plus rows to assemble tiles whose keys lie in several runs; an upper bound for every plan
};

class Needs {
 public:
  // `layout` and `axis` outlive the object.
  Needs(const RingWork& work, const JobLayout& layout, const TileAxis& axis, int query_tile, int key_tile);

  int world() const { return static_cast<int>(spans_.size()); }
  // Tiles that the rank needs in [first, last): disjoint, ascending, not adjacent.
  std::vector<TileRange> spans(int rank, std::int64_t first, std::int64_t last) const;

  // For a block of tiles [first, last): the maximum of each count over all ranks.
  BufferRows largest(std::int64_t first, std::int64_t last) const;
  // An upper bound of largest() that doesn't iterate over the ranks.
  BufferRows bound(std::int64_t first, std::int64_t last) const;

 private:
  // A span of tiles, and the buffer rows of all spans before it.
  struct Span {
    TileRange tiles;
    BufferRows before;
  };

  void find_scattered();
  void find_spans(const RingWork& work, const Layout& queries, int query_tile, int key_tile);
  // Calls need(tiles) for each tile run of a sequence that the block mask selects for any of the rank's query rows.
  template <class Need>
  void for_each_mask_block(const RingWork& work, const TokenRun& queries, const TileSizes& sizes, Need need) const;

  // Tokens of the scattered tiles in [first, last): tiles whose keys lie in several runs.
  std::int64_t scattered(std::int64_t first, std::int64_t last) const;
  // Buffer rows of tiles [first, last), all of which the rank needs.
  BufferRows rows_of_needed(int rank, std::int64_t first, std::int64_t last) const;
  // Buffer rows of the tiles before `tile` that the rank needs.
  BufferRows rows_before(int rank, std::int64_t tile) const;

  const Layout* keys_;
  const TileAxis* axis_;
  std::vector<std::vector<Span>> spans_;        // [world]
  std::vector<std::int64_t> scattered_tokens_;  // of the tiles before each tile: [tiles + 1]
};

}  // namespace ringattn
