// SPDX-License-Identifier: Apache-2.0
// Which key tiles each rank needs: those that one of its query rows folds, and no others. Kept as spans of tiles, so
// that a long job with many ranks costs what its runs cost, not ranks × tiles.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/layout.hpp"
#include "attention/tile_axis.hpp"
#include "kernels/fold.hpp"

namespace ringattn {

// Rows of a rank's block buffer.
struct BufferRows {
  std::int64_t received = 0;
  std::int64_t all = 0;  // with room to assemble each tile whose keys lie in several runs: an upper bound
};

class Needs {
 public:
  // All of them outlive the object.
  Needs(const Job& job, const JobLayout& layout, const TileAxis& axis, int query_tile, int key_tile);

  int world() const { return static_cast<int>(spans_.size()); }
  // Tiles of the axis that the rank folds: disjoint, ascending, not adjacent.
  std::vector<TileRange> spans(int rank) const;
  // The parts of them in [first, last).
  std::vector<TileRange> spans(int rank, std::int64_t first, std::int64_t last) const;
  // What the rank's buffer holds for a block of tiles [first, last).
  BufferRows buffer_rows(int rank, std::int64_t first, std::int64_t last) const;
  // The largest of any rank, each count by itself.
  BufferRows largest_buffer_rows(std::int64_t first, std::int64_t last) const;
  // A bound for the buffer of any rank, at once.
  std::int64_t most_buffer_rows(std::int64_t first, std::int64_t last) const;
  // Whether the tile's keys lie in several runs, so that a rank that folds it must assemble it.
  bool is_scattered(std::int64_t tile) const;

 private:
  // A span of tiles, and the rows that the spans before it bring.
  struct Span {
    TileRange tiles;
    BufferRows before;
  };

  // Tokens of the scattered tiles in [first, last).
  std::int64_t scattered(std::int64_t first, std::int64_t last) const;
  BufferRows rows_of(int rank, std::int64_t first, std::int64_t last) const;  // of tiles that the rank needs
  BufferRows rows_before(int rank, std::int64_t tile) const;

  const Layout* keys_;
  const TileAxis* axis_;
  std::vector<std::vector<Span>> spans_;        // [world]
  std::vector<std::int64_t> scattered_tokens_;  // of the tiles before each: [tiles + 1]
};

}  // namespace ringattn
