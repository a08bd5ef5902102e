// SPDX-License-Identifier: Apache-2.0
// Sorts the pieces of a task into the order that work_order.hpp describes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ringattn::cuda {

struct Piece {
  std::int32_t section;
  std::int32_t tiles;
  std::int32_t index;  // of the item or the bundle

  bool operator<(const Piece& other) const { return tiles > other.tiles; }  // the longest first
};

// Sorts the pieces of a task. Keeps its lists between tasks, so that sorting allocates nothing once they have grown.
class PieceOrder {
 public:
  void reserve(std::size_t pieces);
  void clear() { pieces_.clear(); }
  // Sections ascend from piece to piece.
  void add(const Piece& piece) { pieces_.push_back(piece); }
  // Tiles of the longest piece, 0 where there is none.
  std::int32_t most_tiles() const;
  // Brings the pieces into their order and returns how many of them are early. `workers` CTAs, or pairs of CTAs that
  // walk side by side, take pieces, and each piece is taken once for each of `heads` heads.
  std::int32_t sort(std::int64_t workers, std::int64_t heads);

  std::span<const Piece> pieces() const { return pieces_; }

 private:
  std::int32_t move_late_pieces_back(std::int64_t workers, std::int64_t heads);
  void sort_section(std::span<Piece> section);

  std::vector<Piece> pieces_;
  std::vector<Piece> unsorted_;
  std::vector<std::int32_t> counts_;  // of pieces by their tiles
};

}  // namespace ringattn::cuda
