// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/key_positions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <limits>

namespace ringattn {

namespace {

std::int64_t next_id() {
  static std::atomic<std::int64_t> last{0};
  return ++last;
}

}  // namespace

PositionCheck::PositionCheck(std::string_view name, int heads, std::span<const KeptSequence> sequences, ErrorCode code)
    : name_(name), sequences_(sequences), code_(code), before_(static_cast<std::size_t>(heads)) {}

void PositionCheck::next(std::span<const std::int32_t> rows) {
  for (std::size_t at = 0; at < rows.size(); at += before_.size(), ++key_, ++token_) {
    for (; key_ == sequences_[sequence_].keys; ++sequence_) key_ = 0;
    for (std::size_t head = 0; head < before_.size(); ++head) {
      const std::int32_t position = rows[at + head];
      const bool inside = position >= 0 && position < sequences_[sequence_].whole;
      if (!inside || (key_ > 0 && position <= before_[head])) {
        fail(code_, fmt::format("{} [{}, {}] is {}", name_, token_, head, position),
             inside ? fmt::format("the key before it, of sequence {} and head {}, is at {}", sequence_, head,
                                  before_[head])
                    : fmt::format("sequence {} had {} tokens before some were evicted", sequence_,
                                  sequences_[sequence_].whole),
             "Positions of a sequence and head ascend, from 0 on, each once.");
      }
      before_[head] = position;
    }
  }
}

KeyPositions::KeyPositions(std::string_view name, int heads, std::vector<KeptSequence> sequences,
                           std::span<const std::int32_t> rows, ErrorCode code)
    : id_(next_id()), heads_(heads), sequences_(std::move(sequences)) {
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
  PositionCheck(name, heads, sequences_, code).next(rows);
  positions_.resize(rows.size());
  for (std::size_t s = 0; s < sequences_.size(); ++s) {
    const std::int64_t count = sequences_[s].keys;
    for (int head = 0; head < heads; ++head) {
      std::int32_t* const own = positions_.data() + begins_[s] * heads + head * count;
      for (std::int64_t i = 0; i < count; ++i) {
        own[i] = rows[static_cast<std::size_t>((begins_[s] + i) * heads + head)];
      }
    }
  }
  add_sums();
}

void KeyPositions::add_sums() {
  for (std::size_t s = 0; s < sequences_.size(); ++s) {
    for (int head = 0; head < heads_; ++head) {
      std::vector<std::int64_t>& sums = sums_.emplace_back(std::vector<std::int64_t>{0});
      std::int64_t sum = 0, count = 0;
      for (const std::int32_t position : of(s, head)) {
        sum += position;
        if (++count % kSummed == 0) sums.push_back(sum);
      }
    }
  }
}

std::span<const std::int64_t> KeyPositions::sums(std::size_t sequence, int head) const {
  return sums_[sequence * static_cast<std::size_t>(heads_) + static_cast<std::size_t>(head)];
}

std::span<const std::int32_t> KeyPositions::of(std::size_t sequence, int head) const {
  const std::int64_t count = sequences_[sequence].keys;
  return {positions_.data() + begins_[sequence] * heads_ + head * count, static_cast<std::size_t>(count)};
}

std::int64_t PositionedVisibility::before(std::int64_t position) const {
  return std::lower_bound(positions_.begin(), positions_.end(), position) - positions_.begin();
}

KeyRange PositionedVisibility::keys(std::int64_t first, std::int64_t last) const {
  return {before(unbounded_.mask_range(first).begin), before(unbounded_.mask_range(last).end)};
}

KeyRange PositionedVisibility::common_keys(std::int64_t first, std::int64_t last) const {
  return {before(unbounded_.mask_range(last).begin), before(unbounded_.mask_range(first).end)};
}

TileRange PositionedVisibility::tiles(std::int64_t position, std::int64_t rows, const TileSizes& sizes) const {
  const std::int64_t first = query_tile_begin(position, sizes.query);
  const std::int64_t last = query_tile_begin(position + rows - 1, sizes.query) + sizes.query - 1;
  return tiles_of(keys(first, last), sizes.key);
}

double PositionedVisibility::sum(std::int64_t begin, std::int64_t end) const {
  const auto add = [this](std::int64_t from, std::int64_t to) {
    std::int64_t sum = 0;
    for (std::int64_t i = from; i < to; ++i) sum += positions_[static_cast<std::size_t>(i)];
    return static_cast<double>(sum);
  };
  if (end <= begin || sums_.empty()) return add(begin, end);
  const std::int64_t first = begin / KeyPositions::kSummed, last = end / KeyPositions::kSummed;
  return static_cast<double>(sums_[static_cast<std::size_t>(last)] - sums_[static_cast<std::size_t>(first)]) -
         add(first * KeyPositions::kSummed, begin) + add(last * KeyPositions::kSummed, end);
}

double PositionedVisibility::pairs_before(std::int64_t position, std::int64_t rows, const KeyRange& keys,
                                          std::int64_t mask_range) const {
  // Keys [keys.begin, common) are before the bound of every query. Each later key is before the bound of the queries
  // from its position on.
  const std::int64_t common = std::clamp(before(position + mask_range), keys.begin, keys.end);
  const std::int64_t end = position + rows - 1 + mask_range;
  const std::int64_t partial = std::clamp(before(end), common, keys.end);
  return static_cast<double>(common - keys.begin) * static_cast<double>(rows) +
         static_cast<double>(partial - common) * static_cast<double>(end) - sum(common, partial);
}

double PositionedVisibility::pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const {
  if (keys.empty() || rows <= 0) return 0.0;
  const double reached = mask_.right < 0 ? static_cast<double>(keys.end - keys.begin) * static_cast<double>(rows)
                                         : pairs_before(position, rows, keys, mask_.right + 1);
  return reached - (mask_.left < 0 ? 0.0 : pairs_before(position, rows, keys, -mask_.left));
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
  // The new position keeps the distance to the last key, in the head whose last key has the smallest distance.
  std::int64_t last_position = 0;
  for (int head = 0; head < positions.heads(); ++head) {
    last_position = std::max<std::int64_t>(last_position, positions.of(sequence, head).back());
  }
  const std::int64_t moved = position - (last_position + 1 - keys);
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
    // All later queries see all keys if the last one does.
    if (seen.begin == 0 && seen.end == keys && mask.left < 0) return moved;
  }
  return moved;
}

std::optional<std::int64_t> first_gap(const KeyPositions& positions, std::size_t sequence, std::int64_t begin,
                                      std::int64_t end) {
  std::int64_t first = end;
  for (int head = 0; head < positions.heads(); ++head) {
    const auto keys = positions.of(sequence, head);
    std::int64_t position = begin;
    for (auto key = std::ranges::lower_bound(keys, begin); key != keys.end() && position < first; ++key) {
      if (*key != position) break;
      ++position;
    }
    first = std::min(first, position);
  }
  return first < end ? std::optional(first) : std::nullopt;
}

std::string missing_for_positions() { return "key positions (supported: consecutive positions)"; }

}  // namespace ringattn
