// SPDX-License-Identifier: Apache-2.0
#include "ops/compression/pool_slots.hpp"

#include <algorithm>
#include <utility>

namespace ringattn {

PoolSlots::PoolSlots(std::vector<Page> pages, std::int64_t page_size)
    : pages_(std::move(pages)), page_size_(page_size) {
  for (const Page& page : pages_) tokens_ += page.tokens;
}

void PoolSlots::for_each_part(
    std::int64_t most, const std::function<void(std::int64_t first, std::span<const PackedRun> runs)>& part) const {
  constexpr std::size_t kMaxRuns = 1 << 12;
  std::vector<PackedRun> runs;
  std::int64_t first = 0, tokens = 0;
  const auto flush = [&] {
    if (!runs.empty()) part(first, runs);
    first += tokens;
    tokens = 0;
    runs.clear();
  };
  for (const Page& page : pages_) {
    if (tokens + page.tokens > most || runs.size() == kMaxRuns) flush();
    const std::int64_t slot = page.number * page_size_;
    if (!runs.empty() && runs.back().end == slot) {
      runs.back().end += page.tokens;
    } else {
      runs.push_back({slot, slot + page.tokens});
    }
    tokens += page.tokens;
  }
  flush();
}

std::int64_t slot_at(std::span<const PackedRun> runs, std::int64_t n) {
  auto run = runs.begin();
  for (; n >= run->tokens(); ++run) n -= run->tokens();
  return run->begin + n;
}

PoolSlots held_slots(const PageTable& table, std::span<const std::int64_t> cu, std::int64_t group) {
  const std::int64_t page = table.page_size;
  std::vector<PoolSlots::Page> pages;
  pages.reserve(table.entries.size());
  for (std::size_t s = 0; s < table.sequences(); ++s) {
    const std::int64_t coded = (cu[s + 1] - cu[s]) / group * group;
    std::int64_t first = 0;
    for (const std::int32_t number : table.of(s)) {
      if (first >= coded) break;
      pages.push_back({number, static_cast<std::int32_t>(std::min(page, coded - first))});
      first += page;
    }
  }
  // If several sequences hold a page, the entry with the most tokens is kept.
  std::ranges::sort(pages, std::greater<>());
  const auto same = [](const PoolSlots::Page& a, const PoolSlots::Page& b) { return a.number == b.number; };
  pages.erase(std::unique(pages.begin(), pages.end(), same), pages.end());
  std::ranges::reverse(pages);
  return {std::move(pages), page};
}

}  // namespace ringattn
