// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/piece_order.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace ringattn::cuda {

namespace {

// Late pieces have at most a quarter of the longest piece's tiles. There are about so many of them that every worker
// folds half of the longest piece's tiles with them.
constexpr std::int64_t kLatePart = 4;
constexpr std::int64_t kLateWork = 2;
// The section of the late pieces.
constexpr std::int32_t kLate = std::numeric_limits<std::int32_t>::max();

bool shorter(const Piece& a, const Piece& b) { return a.tiles < b.tiles; }

}  // namespace

void PieceOrder::reserve(std::size_t pieces) {
  pieces_.reserve(pieces);
  unsorted_.reserve(pieces);
  counts_.resize(4 * pieces);
}

std::int32_t PieceOrder::most_tiles() const {
  return pieces_.empty() ? 0 : std::max_element(pieces_.begin(), pieces_.end(), shorter)->tiles;
}

std::int32_t PieceOrder::sort(std::int64_t workers, std::int64_t heads) {
  if (pieces_.empty()) return 0;
  const std::int32_t early = move_late_pieces_back(workers, heads);
  for (auto begin = pieces_.begin(); begin != pieces_.end();) {
    const std::int32_t section = begin->section;
    const auto end = std::find_if(begin, pieces_.end(), [&](const Piece& piece) { return piece.section != section; });
    sort_section({begin, end});
    begin = end;
  }
  return early;
}

// The task ends when the last piece is folded, so the last pieces should be short, and there should be enough of them
// to even out what the long ones leave unequal. Short pieces of all sections serve for that, but no more of them than
// it takes, because late pieces find less in the cache. Returns how many pieces stay in front.
std::int32_t PieceOrder::move_late_pieces_back(std::int64_t workers, std::int64_t heads) {
  const std::int64_t most = most_tiles();
  const std::int64_t longest = std::min(most / kLatePart, static_cast<std::int64_t>(counts_.size()) - 1);
  std::fill_n(counts_.begin(), longest + 1, 0);
  for (const Piece& piece : pieces_) {
    if (piece.tiles <= longest) ++counts_[static_cast<std::size_t>(piece.tiles)];
  }
  // Pieces of fewer than `limit` tiles are late.
  std::int64_t room = workers * most / kLateWork;
  std::int64_t limit = 0;
  for (; limit <= longest && room >= 0; ++limit) room -= limit * counts_[static_cast<std::size_t>(limit)] * heads;

  unsorted_.clear();
  std::size_t early = 0;
  for (const Piece& piece : pieces_) {
    if (piece.tiles >= limit) {
      pieces_[early++] = piece;
    } else {
      unsorted_.push_back({kLate, piece.tiles, piece.index});
    }
  }
  std::ranges::copy(unsorted_, pieces_.begin() + static_cast<std::ptrdiff_t>(early));
  return static_cast<std::int32_t>(early);
}

void PieceOrder::sort_section(std::span<Piece> section) {
  // Most sections are in order already, or, under a causal mask, in reverse order.
  if (std::is_sorted(section.begin(), section.end())) return;
  if (std::is_sorted(section.rbegin(), section.rend())) {
    std::reverse(section.begin(), section.end());
    return;
  }
  const auto most = static_cast<std::size_t>(std::max_element(section.begin(), section.end(), shorter)->tiles);
  if (most >= counts_.size()) {
    std::sort(section.begin(), section.end(), [](const Piece& a, const Piece& b) {
      if (a < b || b < a) return a < b;
      return a.index < b.index;
    });
    return;
  }
  // There are not many more lengths than pieces, so counting them is the faster way to sort.
  std::fill_n(counts_.begin(), most + 1, 0);
  for (const Piece& piece : section) ++counts_[most - static_cast<std::size_t>(piece.tiles)];
  std::exclusive_scan(counts_.begin(), counts_.begin() + static_cast<std::ptrdiff_t>(most) + 1, counts_.begin(), 0);
  unsorted_.assign(section.begin(), section.end());
  for (const Piece& piece : unsorted_) {
    std::int32_t& place = counts_[most - static_cast<std::size_t>(piece.tiles)];
    section[static_cast<std::size_t>(place++)] = piece;
  }
}

}  // namespace ringattn::cuda
