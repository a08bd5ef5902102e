// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/page_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/philox.hpp"

namespace ringattn {

namespace {

// A number below `bound`. 64 bits for at most 2^22 choices: what the remainder prefers is out of sight.
std::uint64_t below(std::uint64_t bound, std::uint64_t index, std::uint64_t seed) {
  constexpr std::uint32_t kPages = 0x70616765;  // apart from the counters of synthetic input
  const PhiloxWords words = philox4x32_10(
      {{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), kPages, 0xffffffffU}}, seed);
  return (std::uint64_t{words.word[0]} << 32 | words.word[1]) % bound;
}

}  // namespace

std::span<const std::int32_t> PageTable::of(std::size_t sequence) const {
  const auto from = static_cast<std::size_t>(begin[sequence]);
  return {entries.data() + from, static_cast<std::size_t>(begin[sequence + 1]) - from};
}

std::vector<PackedRun> pool_runs(const PageTable& table, std::span<const std::int64_t> cu_k,
                                 std::span<const PackedRun> runs) {
  std::vector<PackedRun> placed;
  for (const PackedRun& run : runs) {
    auto sequence = static_cast<std::size_t>(std::upper_bound(cu_k.begin(), cu_k.end(), run.begin) - cu_k.begin() - 1);
    for (std::int64_t at = run.begin; at < run.end;) {
      while (at >= cu_k[sequence + 1]) ++sequence;  // empty ones as well
      const std::int64_t token = at - cu_k[sequence];
      const std::int64_t in_page = token % table.page_size;
      const std::int64_t left = std::min(run.end, cu_k[sequence + 1]) - at;
      const std::int64_t tokens = std::min(table.page_size - in_page, left);
      const std::int64_t page = table.of(sequence)[static_cast<std::size_t>(token / table.page_size)];
      const std::int64_t begin = page * table.page_size + in_page;
      if (!placed.empty() && placed.back().end == begin) {
        placed.back().end += tokens;
      } else {
        placed.push_back({begin, begin + tokens});
      }
      at += tokens;
    }
  }
  return placed;
}

PageTable deal_pages(const Batch& batch, std::int64_t page_size, std::uint64_t seed) {
  PageTable table;
  table.page_size = page_size;
  for (const Sequence& sequence : batch.sequences) {
    table.pages += pages_of(sequence.k_len, page_size);
    if (table.pages > kMostPageEntries) {
      fail(ErrorCode::kMemory, fmt::format("a cache of more than {} pages of {} tokens", kMostPageEntries, page_size),
           "a block table has no more entries", {"Use larger pages with ", setting("page_size"), ", or fewer tokens."});
    }
    table.begin.push_back(table.pages);
  }
  table.entries.resize(static_cast<std::size_t>(table.pages));
  std::iota(table.entries.begin(), table.entries.end(), 0);
  for (std::size_t last = table.entries.size(); last > 1; --last) {
    std::swap(table.entries[last - 1], table.entries[below(last, last, seed)]);
  }
  return table;
}

}  // namespace ringattn
