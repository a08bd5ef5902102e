// SPDX-License-Identifier: Apache-2.0
// Where the tokens of a batch's keys lie in a pool of pages. Plain data, the same on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/packed_run.hpp"
#include "kernels/cache_view.hpp"

namespace ringattn {

// How many entries a table may have: every process that computes with it holds all of them.
inline constexpr std::int64_t kMaxPageEntries = std::int64_t{1} << 22;
// Of a rank's block table, which has as many for each sequence as the longest needs.
inline constexpr std::int64_t kMaxTableEntries = std::int64_t{1} << 24;

// Tokens [i · page_size, (i + 1) · page_size) of sequence s lie in page of(s)[i]. A page may stand there several times,
// for sequences that share it.
struct PageTable {
  std::int64_t pages = 0;              // of the pool, in use or not
  std::int64_t page_size = 1;          // tokens
  std::vector<std::int64_t> begin{0};  // [sequences + 1]: where the entries of each sequence begin
  std::vector<std::int32_t> entries;   // those alone that hold tokens

  std::size_t sequences() const { return begin.size() - 1; }
  std::span<const std::int32_t> of(std::size_t sequence) const;

  bool operator==(const PageTable&) const = default;
};

// Pages that hold `tokens` tokens.
inline std::int64_t pages_of(std::int64_t tokens, std::int64_t page_size) {
  return (tokens + page_size - 1) / page_size;
}

// Where the packed keys of `runs` lie, in their order: token t of page p is token p · page_size + t. `cu_k`: of the
// table's sequences.
std::vector<PackedRun> pool_runs(const PageTable& table, std::span<const std::int64_t> cu_k,
                                 std::span<const PackedRun> runs);

// A table for the keys of `batch` in a pool that has just the pages that they fill, dealt at random: another seed,
// another deal. Pages that lie within the first `prefix` tokens of each sequence are those of sequence 0. Throws
// kMemory for more than kMaxPageEntries.
PageTable deal_pages(const Batch& batch, std::int64_t page_size, std::uint64_t seed, std::int64_t prefix = 0);

// Prefixes that sequences share, as SharedPrefixes has them (kernels/decode.hpp).
struct SharedPrefixPages {
  std::vector<std::int32_t> of_sequence;  // [sequences], or none where nothing is shared
  std::vector<std::int32_t> keys;         // of each prefix

  bool operator==(const SharedPrefixPages&) const = default;
};

// What the sequences of `batch`, whose keys `table` places, share: prefixes of two or more sequences, in whole pages
// that all of these have in common, with one key tile of `key_tile` keys or more. A sequence has one prefix at most,
// and of all ways to choose them it is one by which most key tiles are folded once instead of once more: of sequences
// that begin alike, some may share more among themselves than the others with each other. At most `most` prefixes, of
// the first sequences.
SharedPrefixPages shared_prefix_pages(const PageTable& table, const Batch& batch, int key_tile, std::size_t most);

}  // namespace ringattn
