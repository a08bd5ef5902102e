// SPDX-License-Identifier: Apache-2.0
// Positions of keys that don't follow each other: those of a cache from which tokens were taken out (eviction.hpp). The
// keys that are left lie side by side, and each keeps the position that it had. Key tiles, groups, layouts and blocks
// count keys by their place in that list; only a mask looks at positions. As these ascend, what a query sees is still
// one run of keys, so two searches turn the mask's mask_range into keys, and everything behind is as without positions.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/host_device.hpp"
#include "kernels/visibility.hpp"

namespace ringattn {

// A sequence of which keys were kept.
struct KeptSequence {
  std::int64_t keys = 0;   // that are there
  std::int64_t whole = 0;  // tokens that it has with those that were taken out: positions are 0 … whole − 1

  bool operator==(const KeptSequence&) const = default;
};

// Looks at positions row by row, before anybody holds them.
class PositionCheck {
 public:
  // As KeyPositions has them.
  PositionCheck(std::string_view name, int heads, std::span<const KeptSequence> sequences, ErrorCode code);

  // The rows that follow those of the last call, [rows, heads]. Throws `code` for positions that don't ascend in their
  // sequence and head (twice the same among them) or lie outside of it; the message names `name`, the key, the head and
  // the sequence.
  void next(std::span<const std::int32_t> rows);

 private:
  std::string name_;
  std::span<const KeptSequence> sequences_;
  ErrorCode code_;
  std::vector<std::int32_t> before_;  // [heads] positions of the row before, of the same sequence
  std::size_t sequence_ = 0;
  std::int64_t key_ = 0;    // in its sequence
  std::int64_t token_ = 0;  // of all
};

// The positions of all keys of a batch. Never changes.
class KeyPositions {
 public:
  // `rows`: [keys of all sequences, heads], sequence by sequence; `heads`: 1, which all heads of keys share, or as many
  // as they are. Throws `code` for what PositionCheck refuses, and for a wrong number of them.
  KeyPositions(std::string_view name, int heads, std::vector<KeptSequence> sequences,
               std::span<const std::int32_t> rows, ErrorCode code = ErrorCode::kUsage);

  int heads() const { return heads_; }
  std::span<const KeptSequence> sequences() const { return sequences_; }
  // [keys of the sequence], ascending. `head`: one of heads().
  std::span<const std::int32_t> of(std::size_t sequence, int head) const;
  // The sum of the first n · kSummed of them, for each such n: [keys / kSummed + 1].
  std::span<const std::int64_t> sums(std::size_t sequence, int head) const;
  static constexpr std::int64_t kSummed = 64;
  // All of them, those of a sequence and head side by side: [sequences][heads][keys].
  std::span<const std::int32_t> all() const { return positions_; }
  // Different for objects of this process that were made apart, the same for copies.
  std::int64_t id() const { return id_; }

  // Whether they say the same, whoever made them.
  bool operator==(const KeyPositions& other) const {
    return id_ == other.id_ ||
           (heads_ == other.heads_ && sequences_ == other.sequences_ && positions_ == other.positions_);
  }

 private:
  void add_sums();

  std::int64_t id_ = 0;
  int heads_ = 1;
  std::vector<KeptSequence> sequences_;
  std::vector<std::int64_t> begins_;  // [sequences]: keys of those before
  std::vector<std::int32_t> positions_;
  std::vector<std::vector<std::int64_t>> sums_;  // [sequences · heads]
};

// What a table of positions has where the sequence has no key.
inline constexpr std::int32_t kNoPosition = -1;

// Positions first … last, in the type that those of keys have: none, and not kNoPosition either, where last < first.
struct PositionSpan {
  std::int32_t first;
  std::int32_t last;

  RINGATTN_HOST_DEVICE bool has(std::int32_t position) const { return position >= first && position <= last; }
};

// The positions of keys within a mask's mask_range (BasicVisibility::mask_range()).
RINGATTN_HOST_DEVICE inline PositionSpan positions_within(const KeyRange& mask_range) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (mask_range.begin > kMax || mask_range.end <= 0) return {0, -1};
  return {mask_range.begin < 0 ? 0 : static_cast<std::int32_t>(mask_range.begin),
          static_cast<std::int32_t>(mask_range.end > kMax ? kMax : mask_range.end - 1)};
}

// As Visibility, of one head's keys of one sequence that stand at `positions`.
class PositionedVisibility {
 public:
  // `sums`: KeyPositions::sums(), with which pairs are counted without looking at every key; or none.
  PositionedVisibility(const Mask& mask, std::span<const std::int32_t> positions,
                       std::span<const std::int64_t> sums = {})
      : unbounded_(mask, 0), mask_(mask), positions_(positions), sums_(sums) {}

  // The keys that some query at first … last sees; every one of them is seen by one of these.
  KeyRange keys(std::int64_t first, std::int64_t last) const;
  KeyRange keys(std::int64_t position) const { return keys(position, position); }
  // The keys that every query at first … last sees.
  KeyRange common_keys(std::int64_t first, std::int64_t last) const;
  TileRange tiles(std::int64_t position, std::int64_t rows, const TileSizes& sizes) const;
  double pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const;

 private:
  // Keys in front of a position.
  std::int64_t before(std::int64_t position) const;
  // Pairs of the queries and those of the keys that stand in front of the query's position + `mask_range`.
  double pairs_before(std::int64_t position, std::int64_t rows, const KeyRange& keys, std::int64_t mask_range) const;
  double sum(std::int64_t begin, std::int64_t end) const;  // of positions

  Visibility unbounded_;
  Mask mask_;
  std::span<const std::int32_t> positions_;
  std::span<const std::int64_t> sums_;
};

// As Visibility, of all heads of keys of a sequence together, wherever these stand.
class SequenceVisibility {
 public:
  // `positions`: null where key i stands at position i; it outlives the object.
  SequenceVisibility(const Mask& mask, std::int64_t key_length, const KeyPositions* positions, std::size_t sequence)
      : mask_(mask), plain_(mask, key_length), positions_(positions), sequence_(sequence) {}

  // From the first tile that some head's rows fold to the last.
  TileRange tiles(std::int64_t position, std::int64_t rows, const TileSizes& sizes) const;
  // The mean over heads.
  double pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const;

 private:
  PositionedVisibility of(int head) const {
    return {mask_, positions_->of(sequence_, head), positions_->sums(sequence_, head)};
  }

  Mask mask_;
  Visibility plain_;
  const KeyPositions* positions_;
  std::size_t sequence_;
};

// Those of the keys of one K/V head; none where `positions` is null.
inline std::span<const std::int32_t> positions_of(const KeyPositions* positions, std::size_t sequence, int kv_head) {
  if (positions == nullptr) return {};
  return positions->of(sequence, positions->heads() == 1 ? 0 : kv_head);
}

// The position of the first query of a sequence with which a mask alone lets through what it does by positions: to each
// of the `queries` queries from `position` on, in each head. Such queries stand behind all keys that were taken out,
// and no window ends between keys. std::nullopt: there is none.
std::optional<std::int64_t> position_without_gaps(const Mask& mask, const KeyPositions& positions, std::size_t sequence,
                                                  std::int64_t position, std::int64_t queries);

// The first of the positions begin … end − 1 at which some head has no key; std::nullopt: there is none.
std::optional<std::int64_t> first_gap(const KeyPositions& positions, std::size_t sequence, std::int64_t begin,
                                      std::int64_t end);

// What a kernel that knows consecutive positions alone lacks where AttentionSpec::positions are.
std::string missing_for_positions();

}  // namespace ringattn
