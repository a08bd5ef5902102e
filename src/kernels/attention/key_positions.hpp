// SPDX-License-Identifier: Apache-2.0
// Positions of keys in a cache from which tokens were evicted (quant/eviction.hpp). The remaining keys are stored
// contiguously, and each keeps its original position. Key tiles, KV splits, layouts and blocks count keys by index.
// Only the mask uses positions. As positions ascend, the keys that a query sees are still one contiguous range. Two
// binary searches convert the mask's range of positions to keys, and everything else works as without eviction.
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
#include "kernels/attention/visibility.hpp"

namespace ringattn {

// A sequence after eviction.
struct KeptSequence {
  std::int64_t keys = 0;   // keys that remain
  std::int64_t whole = 0;  // tokens before eviction: positions are 0 … whole − 1

  bool operator==(const KeptSequence&) const = default;
};

// Validates positions row by row, before they are stored.
class PositionCheck {
 public:
  // Arguments as for KeyPositions.
  PositionCheck(std::string_view name, int heads, std::span<const KeptSequence> sequences, ErrorCode code);

  // Checks the next rows, [rows, heads]. Throws `code` for positions that do not strictly ascend within a sequence and
  // head, or are outside the sequence. The message has `name`, the key, the head and the sequence.
  void next(std::span<const std::int32_t> rows);

 private:
  std::string name_;
  std::span<const KeptSequence> sequences_;
  ErrorCode code_;
  std::vector<std::int32_t> before_;  // [heads] positions in the preceding row of the same sequence
  std::size_t sequence_ = 0;
  std::int64_t key_ = 0;    // key index in its sequence
  std::int64_t token_ = 0;  // token index in the batch
};

// The positions of all keys of a batch. Immutable.
class KeyPositions {
 public:
  // `rows` is [keys of all sequences, heads], sequence by sequence. `heads` is 1 (shared by all KV heads) or the number
  // of KV heads. Throws `code` for what PositionCheck rejects and for a wrong number of rows.
  KeyPositions(std::string_view name, int heads, std::vector<KeptSequence> sequences,
               std::span<const std::int32_t> rows, ErrorCode code = ErrorCode::kUsage);

  int heads() const { return heads_; }
  std::span<const KeptSequence> sequences() const { return sequences_; }
  // [keys of the sequence], ascending. `head` is below heads().
  std::span<const std::int32_t> of(std::size_t sequence, int head) const;
  // Prefix sums: the sum of the first n · kSummed positions for each n. [keys / kSummed + 1].
  std::span<const std::int64_t> sums(std::size_t sequence, int head) const;
  static constexpr std::int64_t kSummed = 64;
  // All positions, [sequences][heads][keys].
  std::span<const std::int32_t> all() const { return positions_; }
  // Unique for each constructed object of this process. Copies share it.
  std::int64_t id() const { return id_; }

  // Compares contents.
  bool operator==(const KeyPositions& other) const {
    return id_ == other.id_ ||
           (heads_ == other.heads_ && sequences_ == other.sequences_ && positions_ == other.positions_);
  }

 private:
  void add_sums();

  std::int64_t id_ = 0;
  int heads_ = 1;
  std::vector<KeptSequence> sequences_;
  std::vector<std::int64_t> begins_;  // [sequences]: keys of the sequences before
  std::vector<std::int32_t> positions_;
  std::vector<std::vector<std::int64_t>> sums_;  // [sequences · heads]
};

// Entry of a position table where the sequence has no key.
inline constexpr std::int32_t kNoPosition = -1;

// Positions first … last, as int32. If last < first, no position is in the span, nor is kNoPosition.
struct PositionSpan {
  std::int32_t first;
  std::int32_t last;

  RINGATTN_HOST_DEVICE bool has(std::int32_t position) const { return position >= first && position <= last; }
};

// The key positions within a mask range (BasicVisibility::mask_range()).
RINGATTN_HOST_DEVICE inline PositionSpan positions_within(const KeyRange& mask_range) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (mask_range.begin > kMax || mask_range.end <= 0) return {0, -1};
  return {mask_range.begin < 0 ? 0 : static_cast<std::int32_t>(mask_range.begin),
          static_cast<std::int32_t>(mask_range.end > kMax ? kMax : mask_range.end - 1)};
}

// Like Visibility, for the keys of one KV head of one sequence at `positions`.
class PositionedVisibility {
 public:
  // `sums` is KeyPositions::sums() or empty. With it pairs() does not visit every key.
  PositionedVisibility(const Mask& mask, std::span<const std::int32_t> positions,
                       std::span<const std::int64_t> sums = {})
      : unbounded_(mask, 0), mask_(mask), positions_(positions), sums_(sums) {}

  // The keys that at least one query at first … last sees. It has no gaps.
  KeyRange keys(std::int64_t first, std::int64_t last) const;
  KeyRange keys(std::int64_t position) const { return keys(position, position); }
  // The keys that every query at first … last sees.
  KeyRange common_keys(std::int64_t first, std::int64_t last) const;
  TileRange tiles(std::int64_t position, std::int64_t rows, const TileSizes& sizes) const;
  double pairs(std::int64_t position, std::int64_t rows, const KeyRange& keys) const;

 private:
  // Number of keys with smaller positions.
  std::int64_t before(std::int64_t position) const;
  // Number of (query, key) pairs where the key's position is below the query's position + `mask_range`.
  double pairs_before(std::int64_t position, std::int64_t rows, const KeyRange& keys, std::int64_t mask_range) const;
  double sum(std::int64_t begin, std::int64_t end) const;  // of positions

  Visibility unbounded_;
  Mask mask_;
  std::span<const std::int32_t> positions_;
  std::span<const std::int64_t> sums_;
};

// Like Visibility, for all KV heads of a sequence together, with or without positions.
class SequenceVisibility {
 public:
  // `positions` is null if key i is at position i. It must outlive the object.
  SequenceVisibility(const Mask& mask, std::int64_t key_length, const KeyPositions* positions, std::size_t sequence)
      : mask_(mask), plain_(mask, key_length), positions_(positions), sequence_(sequence) {}

  // From the first tile that some head's rows process to the last.
  TileRange tiles(std::int64_t position, std::int64_t rows, const TileSizes& sizes) const;
  // The mean over KV heads.
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

// Positions of one KV head's keys; empty if `positions` is null.
inline std::span<const std::int32_t> positions_of(const KeyPositions* positions, std::size_t sequence, int kv_head) {
  if (positions == nullptr) return {};
  return positions->of(sequence, positions->heads() == 1 ? 0 : kv_head);
}

// A position for the first query with which the mask alone, without key positions, gives the same keys as with them,
// for each of the `queries` queries from `position` on and in each head. It exists if the queries come after all
// evicted keys and no window edge lies between keys. std::nullopt: there is none.
std::optional<std::int64_t> position_without_gaps(const Mask& mask, const KeyPositions& positions, std::size_t sequence,
                                                  std::int64_t position, std::int64_t queries);

// The first of the positions begin … end − 1 at which some head has no key. std::nullopt: there is none.
std::optional<std::int64_t> first_gap(const KeyPositions& positions, std::size_t sequence, std::int64_t begin,
                                      std::int64_t end);

// Entry of KernelRow::missing for a kernel that supports only consecutive positions.
std::string missing_for_positions();

}  // namespace ringattn
