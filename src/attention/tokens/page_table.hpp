// SPDX-License-Identifier: Apache-2.0
// The block table of a batch: which page of a pool holds which tokens. The same on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attention/tokens/batch.hpp"
#include "attention/tokens/packed_run.hpp"
#include "kernels/common/cache_view.hpp"

namespace ringattn {

// Maximum number of entries of a table, because every process holds all of them.
inline constexpr std::int64_t kMaxPageEntries = std::int64_t{1} << 22;
// The same for a rank's block table, which has the maximum number of entries for each sequence.
inline constexpr std::int64_t kMaxTableEntries = std::int64_t{1} << 24;

// Tokens [i · page_size, (i + 1) · page_size) of sequence s lie in page of(s)[i]. Sequences may share pages.
struct PageTable {
  std::int64_t pages = 0;              // of the pool, used or not
  std::int64_t page_size = 1;          // tokens
  std::vector<std::int64_t> begin{0};  // [sequences + 1]: index of the first entry of each sequence
  std::vector<std::int32_t> entries;   // page indices; only pages that hold tokens

  std::size_t sequences() const { return begin.size() - 1; }
  std::span<const std::int32_t> of(std::size_t sequence) const;

  bool operator==(const PageTable&) const = default;
};

// Number of pages for `tokens` tokens.
inline std::int64_t pages_of(std::int64_t tokens, std::int64_t page_size) {
  return (tokens + page_size - 1) / page_size;
}

// The packed keys of `runs` as runs of the pool, in the same order: token t of page p is token p · page_size + t.
// `cu_k`: of the table's sequences.
std::vector<PackedRun> pool_runs(const PageTable& table, std::span<const std::int64_t> cu_k,
                                 std::span<const PackedRun> runs);

// A random table for the keys of `batch`, in a pool of exactly the pages that they fill. Pages within the first
// `prefix` tokens of each sequence are those of sequence 0. Throws kMemory for more than kMaxPageEntries.
PageTable deal_pages(const Batch& batch, std::int64_t page_size, std::uint64_t seed, std::int64_t prefix = 0);

// Shared prefixes of a batch, as arrays of SharedPrefixes (kernels/decode/decode.hpp).
struct SharedPrefixPages {
  std::vector<std::int32_t> of_sequence;  // [sequences]; empty if nothing is shared
  std::vector<std::int32_t> keys;         // [prefixes] keys of each

  bool operator==(const SharedPrefixPages&) const = default;
};

// The shared prefixes of the sequences of `batch` in `table`: each of two or more sequences, in whole pages that all of
// these share, with at least one key tile of `key_tile` keys. A sequence has at most one prefix. The choice minimizes
// the number of key tiles to compute: some sequences of a prefix may share a longer one among themselves. At most
// `most` prefixes, of the first sequences.
SharedPrefixPages shared_prefix_pages(const PageTable& table, const Batch& batch, int key_tile, std::size_t most);

}  // namespace ringattn
