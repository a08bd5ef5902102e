// SPDX-License-Identifier: Apache-2.0
// Mask geometry: which keys a query sees, which key tiles it therefore processes, and how many (query, key) pairs that
// makes. This is the one definition for hosts and devices. Plans, layouts, the GPU kernels' tables and the kernels use
// it. Only the oracle has its own definition, so that it can detect an error here.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace ringattn {

// A query at position p of its sequence sees keys p − left … p + right, inclusive. −1 is unlimited. Full attention is
// {−1, −1}, causal attention is {−1, 0}, and anything else is a sliding window.
struct Mask {
  std::int64_t left = -1;
  std::int64_t right = -1;

  bool is_full() const { return left < 0 && right < 0; }
  bool is_causal() const { return left < 0 && right == 0; }
  bool operator==(const Mask&) const = default;
};

// Keys [begin, end) of a sequence.
template <class Int>
struct BasicKeyRange {
  Int begin = 0;
  Int end = 0;

  RINGATTN_HOST_DEVICE bool empty() const { return begin >= end; }
};
using KeyRange = BasicKeyRange<std::int64_t>;

// Key tiles [begin, end) of a sequence.
template <class Int>
struct BasicTileRange {
  Int begin = 0;
  Int end = 0;

  RINGATTN_HOST_DEVICE bool empty() const { return begin >= end; }
};
using TileRange = BasicTileRange<std::int64_t>;

// Columns [begin, end) of a key tile.
struct ColumnRange {
  int begin = 0;
  int end = 0;

  RINGATTN_HOST_DEVICE bool empty() const { return begin >= end; }
  bool operator==(const ColumnRange&) const = default;
};

// Values of AttentionKernel::query_tile() and AttentionKernel::key_tile().
struct TileSizes {
  int query = 1;
  int key = 1;
};

// How much of a key tile a set of queries sees.
enum class Coverage {
  kAbsent,   // no query sees a key of it
  kPartial,  // neither of the other two
  kWhole,    // every query sees all its keys, and the sequence has all of them
};

// a / b for b > 0, rounded towards zero. Division of 32-bit numbers is several times faster, and most positions fit.
RINGATTN_HOST_DEVICE inline std::int64_t quotient(std::int64_t a, int b) {
  const auto bits = static_cast<std::uint64_t>(a);
  return bits >> 32 == 0 ? static_cast<std::uint32_t>(bits) / static_cast<std::uint32_t>(b) : a / b;
}

RINGATTN_HOST_DEVICE inline std::int32_t quotient(std::int32_t a, int b) { return a / b; }

// The first position of the query tile that contains `position`. Positions may be negative.
template <class Int>
RINGATTN_HOST_DEVICE inline Int query_tile_begin(Int position, int query_tile) {
  if (query_tile == 1) return position;
  const Int begin = quotient(position, query_tile) * query_tile;
  return begin > position ? begin - query_tile : begin;
}

// The key tiles that hold keys of `keys`.
template <class Int>
RINGATTN_HOST_DEVICE inline BasicTileRange<Int> tiles_of(const BasicKeyRange<Int>& keys, int key_tile) {
  if (keys.empty()) return {0, 0};
  return {quotient(keys.begin, key_tile), quotient(keys.end + key_tile - 1, key_tile)};
}

// The columns of the key tile with keys [first_key, first_key + key_tile) that hold keys of `keys`. Both ends are
// within 0 … key_tile.
RINGATTN_HOST_DEVICE inline ColumnRange columns_of(const KeyRange& keys, std::int64_t first_key, int key_tile) {
  const std::int64_t begin = keys.begin - first_key;
  const std::int64_t end = keys.end - first_key;
  return {begin > key_tile ? key_tile : (begin < 0 ? 0 : static_cast<int>(begin)),
          end > key_tile ? key_tile : (end < 0 ? 0 : static_cast<int>(end))};
}

// What queries see of one sequence of `key_length` keys. Query positions may lie outside [0, key_length). Int is the
// type of positions. If it has 32 bits, positions, lengths and finite mask sides must be within ±2^30.
template <class Int>
class BasicVisibility {
 public:
  using Keys = BasicKeyRange<Int>;
  using Tiles = BasicTileRange<Int>;

  // `left` and `right` are the mask's.
  RINGATTN_HOST_DEVICE BasicVisibility(Int left, Int right, Int key_length)
      : left_(left), right_(right), key_length_(key_length) {}
  RINGATTN_HOST_DEVICE BasicVisibility(const Mask& mask, Int key_length)
      : BasicVisibility(static_cast<Int>(mask.left), static_cast<Int>(mask.right), key_length) {}

  // The keys that the mask allows for the query at `position`, before clipping to the sequence. The range shifts with
  // the position. An unlimited side ends kUnlimited keys from the sequence's start, beyond any key.
  RINGATTN_HOST_DEVICE Keys mask_range(Int position) const {
    return {left_ < 0 ? -kUnlimited : position - left_, right_ < 0 ? kUnlimited : position + right_ + 1};
  }

  // The keys that the query at `position` sees.
  RINGATTN_HOST_DEVICE Keys keys(Int position) const { return keys(position, position); }

  // The keys that at least one query at first … last sees. It has no gaps, as neighbors see overlapping or adjacent
  // keys.
  RINGATTN_HOST_DEVICE Keys keys(Int first, Int last) const {
    return inside(mask_range(first).begin, mask_range(last).end);
  }

  // The keys that every query at first … last sees.
  RINGATTN_HOST_DEVICE Keys common_keys(Int first, Int last) const {
    return inside(mask_range(last).begin, mask_range(first).end);
  }

  // The key tiles that the row at `position` processes: those that some position of its query tile sees. If the range
  // is not empty, both ends ascend with the position.
  RINGATTN_HOST_DEVICE Tiles tiles(Int position, const TileSizes& sizes) const {
    const Int first = query_tile_begin(position, sizes.query);
    return tiles_of(keys(first, first + sizes.query - 1), sizes.key);
  }

  // The key tiles that at least one of the `rows` rows from `position` on processes.
  RINGATTN_HOST_DEVICE Tiles tiles(Int position, Int rows, const TileSizes& sizes) const {
    const Int first = query_tile_begin(position, sizes.query);
    const Int last = query_tile_begin(position + rows - 1, sizes.query) + sizes.query - 1;
    return tiles_of(keys(first, last), sizes.key);
  }

  // How much of the key tile with keys [first_key, first_key + key_tile) the queries at first … last see.
  RINGATTN_HOST_DEVICE Coverage coverage(Int first, Int last, Int first_key, int key_tile) const {
    const Int end = first_key + key_tile;
    const Keys some = keys(first, last);
    if (some.empty() || some.end <= first_key || some.begin >= end) return Coverage::kAbsent;
    const Keys common = common_keys(first, last);
    return common.begin <= first_key && end <= common.end ? Coverage::kWhole : Coverage::kPartial;
  }

  // (query, key) pairs of the `rows` queries from `position` on and the keys that they see.
  double pairs(Int position, Int rows) const { return pairs(position, rows, {0, key_length_}); }
  // The same, limited to the keys in `keys`, a part of the sequence.
  double pairs(Int position, Int rows, const Keys& keys) const;

 private:
  static constexpr Int kUnlimited = Int{1} << (sizeof(Int) * 8 - 2);

  RINGATTN_HOST_DEVICE Keys inside(Int begin, Int end) const {
    return {begin < 0 ? 0 : begin, end > key_length_ ? key_length_ : end};
  }

  Int left_, right_;
  Int key_length_;
};
using Visibility = BasicVisibility<std::int64_t>;

template <>
double Visibility::pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const;

}  // namespace ringattn
