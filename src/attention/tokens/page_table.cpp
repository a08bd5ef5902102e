// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/page_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
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

PageTable deal_pages(const Batch& batch, std::int64_t page_size, std::uint64_t seed, std::int64_t prefix) {
  PageTable table;
  table.page_size = page_size;
  std::int64_t entries = 0;
  for (const Sequence& sequence : batch.sequences) {
    entries += pages_of(sequence.k_len, page_size);
    if (entries > kMostPageEntries) {
      fail(ErrorCode::kMemory, fmt::format("a cache of more than {} pages of {} tokens", kMostPageEntries, page_size),
           "a block table has no more entries", {"Use larger pages with ", setting("page_size"), ", or fewer tokens."});
    }
    table.begin.push_back(entries);
  }
  // Of sequences behind the first.
  const auto shared = [&](std::size_t s) {
    return s == 0 ? 0 : std::min({prefix, batch.sequences[0].k_len, batch.sequences[s].k_len}) / page_size;
  };
  table.pages = entries;
  for (std::size_t s = 0; s < table.sequences(); ++s) table.pages -= shared(s);
  std::vector<std::int32_t> order(static_cast<std::size_t>(table.pages));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t last = order.size(); last > 1; --last) {
    std::swap(order[last - 1], order[below(last, last, seed)]);
  }
  auto next = order.begin();
  for (std::size_t s = 0; s < table.sequences(); ++s) {
    table.entries.insert(table.entries.end(), order.begin(), order.begin() + shared(s));  // those of sequence 0
    const std::int64_t own = table.begin[s + 1] - table.begin[s] - shared(s);
    table.entries.insert(table.entries.end(), next, next + own);
    next += own;
  }
  return table;
}

SharedPages shared_pages(const PageTable& table, const Batch& batch, std::int64_t group_keys, std::size_t most) {
  const auto group_pages = static_cast<std::size_t>(group_keys / table.page_size);
  const auto first_group = [&](std::size_t s) {
    const std::span<const std::int32_t> pages = table.of(s).first(group_pages);
    return std::vector<std::int32_t>(pages.begin(), pages.end());
  };
  std::map<std::vector<std::int32_t>, std::vector<std::size_t>> sequences;  // by the pages of their first group
  std::vector<std::size_t> starts;                                          // the first sequence of each, in order
  for (std::size_t s = 0; s < table.sequences(); ++s) {
    if (batch.sequences[s].k_len < group_keys) continue;
    std::vector<std::size_t>& members = sequences[first_group(s)];
    if (members.empty()) starts.push_back(s);
    members.push_back(s);
  }
  SharedPages found;
  for (const std::size_t start : starts) {
    const std::vector<std::size_t>& members = sequences[first_group(start)];
    if (members.size() < 2 || found.keys.size() == most) continue;
    const std::span<const std::int32_t> pages = table.of(start);
    std::int64_t keys = batch.sequences[start].k_len;
    for (const std::size_t s : members) {
      const std::span<const std::int32_t> others = table.of(s);
      const auto differ = std::mismatch(pages.begin(), pages.end(), others.begin(), others.end());
      keys = std::min({keys, batch.sequences[s].k_len, (differ.first - pages.begin()) * table.page_size});
    }
    found.of_sequence.resize(table.sequences(), -1);
    for (const std::size_t s : members) found.of_sequence[s] = static_cast<std::int32_t>(found.keys.size());
    found.keys.push_back(static_cast<std::int32_t>(keys / group_keys * group_keys));
  }
  return found;
}

}  // namespace ringattn
