// SPDX-License-Identifier: Apache-2.0
#include "kernels/key_positions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace ringattn {

KeyPositions::KeyPositions(std::string_view name, int heads, std::vector<KeptSequence> sequences,
                           std::span<const std::int32_t> rows, ErrorCode code)
    : heads_(heads), sequences_(std::move(sequences)) {
  std::int64_t keys = 0;
  for (const KeptSequence& sequence : sequences_) {
    begins_.push_back(keys);
    keys += sequence.keys;
  }
  if (heads < 1 || static_cast<std::int64_t>(rows.size()) != keys * heads) {
    fail(code, fmt::format("{} has {} positions", name, rows.size()),
         fmt::format("there are {} keys, of {} heads with positions", keys, heads),
         "Give one position for each key, or for each key and K/V head.");
  }
  positions_.resize(rows.size());
  for (std::size_t s = 0; s < sequences_.size(); ++s) {
    const auto& [count, whole] = sequences_[s];
    for (int head = 0; head < heads; ++head) {
      std::int32_t* const own = positions_.data() + begins_[s] * heads + head * count;
      for (std::int64_t i = 0; i < count; ++i) {
        own[i] = rows[static_cast<std::size_t>((begins_[s] + i) * heads + head)];
        const bool inside = own[i] >= 0 && own[i] < whole;
        if (inside && (i == 0 || own[i] > own[i - 1])) continue;
        fail(code, fmt::format("{} [{}, {}] is {}", name, begins_[s] + i, head, own[i]),
             inside ? fmt::format("the key before it, of sequence {} and head {}, stands at {}", s, head, own[i - 1])
                    : fmt::format("sequence {} had {} tokens before some were taken out", s, whole),
             "Positions of a sequence and head ascend, from 0 on, each once.");
      }
    }
  }
}

std::span<const std::int32_t> KeyPositions::of(std::size_t sequence, int head) const {
  const std::int64_t count = sequences_[sequence].keys;
  return {positions_.data() + begins_[sequence] * heads_ + head * count, static_cast<std::size_t>(count)};
}

KeyPositions KeyPositions::part(std::span<const std::int64_t> sequences) const {
  KeyPositions chosen;
  chosen.heads_ = heads_;
  std::int64_t keys = 0;
  for (const std::int64_t number : sequences) {
    const auto s = static_cast<std::size_t>(number);
    chosen.begins_.push_back(keys);
    chosen.sequences_.push_back(sequences_[s]);
    keys += sequences_[s].keys;
    const auto first = positions_.begin() + begins_[s] * heads_;
    chosen.positions_.insert(chosen.positions_.end(), first, first + sequences_[s].keys * heads_);
  }
  return chosen;
}

KeyRange PositionedVisibility::keys(std::int64_t first, std::int64_t last) const {
  const auto search = [this](std::int64_t position) {
    return std::lower_bound(positions_.begin(), positions_.end(), position) - positions_.begin();
  };
  return {search(unbounded_.reach(first).begin), search(unbounded_.reach(last).end)};
}

TileRange PositionedVisibility::tiles(std::int64_t position, std::int64_t rows, const TileSizes& sizes) const {
  const std::int64_t first = query_tile_begin(position, sizes.query);
  const std::int64_t last = query_tile_begin(position + rows - 1, sizes.query) + sizes.query - 1;
  return tiles_of(keys(first, last), sizes.key);
}

double PositionedVisibility::pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const {
  // A key at p is seen by the queries at p − right … p + left.
  const std::int64_t last = position + rows - 1;
  double pairs = 0.0;
  for (std::int64_t i = keys.begin; i < keys.end; ++i) {
    const std::int64_t p = positions_[static_cast<std::size_t>(i)];
    const std::int64_t from = mask_.right < 0 ? position : std::max(position, p - mask_.right);
    const std::int64_t to = mask_.left < 0 ? last : std::min(last, p + mask_.left);
    if (to >= from) pairs += static_cast<double>(to - from + 1);
  }
  return pairs;
}

TileRange SequenceVisibility::tiles(std::int64_t position, std::int64_t rows, const TileSizes& sizes) const {
  if (positions_ == nullptr) return plain_.tiles(position, rows, sizes);
  TileRange all{std::numeric_limits<std::int64_t>::max(), 0};
  for (int head = 0; head < positions_->heads(); ++head) {
    const TileRange tiles = of(head).tiles(position, rows, sizes);
    if (tiles.empty()) continue;
    all = {std::min(all.begin, tiles.begin), std::max(all.end, tiles.end)};
  }
  return all.empty() ? TileRange{} : all;
}

double SequenceVisibility::pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const {
  if (positions_ == nullptr) return plain_.pairs(position, rows, keys);
  double pairs = 0.0;
  for (int head = 0; head < positions_->heads(); ++head) pairs += of(head).pairs(position, rows, keys);
  return pairs / positions_->heads();
}

std::optional<std::int64_t> position_without_gaps(const Mask& mask, const KeyPositions& positions, std::size_t sequence,
                                                  std::int64_t position, std::int64_t queries) {
  const std::int64_t keys = positions.sequences()[sequence].keys;
  if (mask.is_full() || keys == 0 || queries == 0) return position;
  // As far from the last key as it is now, in the head whose last key stands farthest.
  std::int64_t behind = 0;
  for (int head = 0; head < positions.heads(); ++head) {
    behind = std::max<std::int64_t>(behind, positions.of(sequence, head).back());
  }
  const std::int64_t moved = position - (behind + 1 - keys);
  const Visibility plain(mask, keys);
  const auto agree = [&](std::int64_t query) {
    const KeyRange wanted = plain.keys(moved + query);
    for (int head = 0; head < positions.heads(); ++head) {
      const KeyRange seen = PositionedVisibility(mask, positions.of(sequence, head)).keys(position + query);
      if (seen.empty() != wanted.empty()) return false;
      if (!seen.empty() && (seen.begin != wanted.begin || seen.end != wanted.end)) return false;
    }
    return true;
  };
  for (std::int64_t query = 0; query < queries; ++query) {
    if (!agree(query)) return std::nullopt;
    const KeyRange seen = plain.keys(moved + query);
    // From here on all rows see everything, if the last one does.
    if (seen.begin == 0 && seen.end == keys && mask.left < 0) return moved;
  }
  return moved;
}

std::string missing_for_positions() {
  return "keys at positions of their own (supported: keys one behind the other, which is enough for queries behind all "
         "that was taken out, under a mask without a left side)";
}

}  // namespace ringattn
