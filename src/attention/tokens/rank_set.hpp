// SPDX-License-Identifier: Apache-2.0
// A bit set of ranks that finds members next to a rank on the ring 0, 1, …, P − 1, 0.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringattn {

class RankSet {
 public:
  explicit RankSet(int world) : world_(world), words_((static_cast<std::size_t>(world) + 63) / 64, 0) {}

  void insert(int rank) { words_[word_of(rank)] |= bit_of(rank); }
  void erase(int rank) { words_[word_of(rank)] &= ~bit_of(rank); }
  bool contains(int rank) const { return (words_[word_of(rank)] & bit_of(rank)) != 0; }

  // Number of members strictly between two ranks, going up from `from` and around. If both are equal, all but `from`.
  int count_between(int from, int to) const {
    if (from < to) return count(from + 1, to);
    return count(from + 1, world_) + count(0, to);
  }
  // The first of these members, going up from `from`; −1: none.
  int first_between(int from, int to) const {
    if (from < to) return first(from + 1, to);
    const int above = first(from + 1, world_);
    return above >= 0 ? above : first(0, to);
  }
  // The last of these members.
  int last_between(int from, int to) const {
    if (from < to) return last(from + 1, to);
    const int below = last(0, to);
    return below >= 0 ? below : last(from + 1, world_);
  }

  // True if both sets have the same members, apart from `rank`.
  bool equals_but(const RankSet& other, int rank) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const std::uint64_t ignored = i == word_of(rank) ? bit_of(rank) : 0;
      if (((words_[i] ^ other.words_[i]) & ~ignored) != 0) return false;
    }
    return true;
  }

 private:
  static std::size_t word_of(int rank) { return static_cast<std::size_t>(rank) / 64; }
  static std::uint64_t bit_of(int rank) { return std::uint64_t{1} << (rank % 64); }
  // The bits of word i for ranks in [begin, end).
  std::uint64_t masked(std::size_t i, int begin, int end) const {
    const int low = static_cast<int>(i) * 64;
    std::uint64_t word = words_[i];
    if (begin > low) word &= begin - low >= 64 ? 0 : ~std::uint64_t{0} << (begin - low);
    if (end < low + 64) word &= end <= low ? 0 : ~std::uint64_t{0} >> (low + 64 - end);
    return word;
  }

  int count(int begin, int end) const {
    int members = 0;
    if (begin >= end) return 0;
    for (std::size_t i = word_of(begin); i <= word_of(end - 1); ++i) members += std::popcount(masked(i, begin, end));
    return members;
  }
  int first(int begin, int end) const {
    if (begin >= end) return -1;
    for (std::size_t i = word_of(begin); i <= word_of(end - 1); ++i) {
      const std::uint64_t word = masked(i, begin, end);
      if (word != 0) return static_cast<int>(i) * 64 + std::countr_zero(word);
    }
    return -1;
  }
  int last(int begin, int end) const {
    if (begin >= end) return -1;
    for (std::size_t i = word_of(end - 1) + 1; i-- > word_of(begin);) {
      const std::uint64_t word = masked(i, begin, end);
      if (word != 0) return static_cast<int>(i) * 64 + 63 - std::countl_zero(word);
    }
    return -1;
  }

  int world_;
  std::vector<std::uint64_t> words_;
};

}  // namespace ringattn
