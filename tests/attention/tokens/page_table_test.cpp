// SPDX-License-Identifier: Apache-2.0
// Pages that sequences share: dealt so, and found again.
#include "attention/tokens/page_table.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

namespace ringattn::testing {
namespace {

Batch batch_of(const std::vector<std::int64_t>& lengths) {
  std::vector<Sequence> sequences;
  for (const std::int64_t length : lengths) sequences.push_back({1, length, length - 1});
  return Batch(std::move(sequences));
}

// Rows of pages, one a sequence.
PageTable table_of(const std::vector<std::vector<std::int32_t>>& rows, std::int64_t page_size) {
  PageTable table;
  table.page_size = page_size;
  for (const std::vector<std::int32_t>& row : rows) {
    table.entries.insert(table.entries.end(), row.begin(), row.end());
    table.begin.push_back(static_cast<std::int64_t>(table.entries.size()));
    for (const std::int32_t page : row) table.pages = std::max<std::int64_t>(table.pages, page + 1);
  }
  return table;
}

TEST(PageTables, DealtWithAPrefixShareItsWholePages) {
  const Batch batch = batch_of({100, 70, 30, 0, 64});
  for (const std::int64_t prefix : {0, 15, 16, 50, 64, 200}) {
    const PageTable table = deal_pages(batch, 16, 5, prefix);
    std::set<std::int32_t> used(table.entries.begin(), table.entries.end());
    EXPECT_EQ(static_cast<std::int64_t>(used.size()), table.pages) << prefix;
    EXPECT_EQ(*used.rbegin(), table.pages - 1) << prefix;
    for (std::size_t s = 1; s < table.sequences(); ++s) {
      ASSERT_EQ(static_cast<std::int64_t>(table.of(s).size()), pages_of(batch.sequences[s].k_len, 16));
      const std::int64_t shared = std::min(prefix, batch.sequences[s].k_len) / 16;
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(table.of(s).size()); ++i) {
        const auto at = static_cast<std::size_t>(i);
        const bool same = std::ranges::count(table.of(0), table.of(s)[at]) > 0;
        EXPECT_EQ(same, i < shared) << "prefix " << prefix << ", sequence " << s << ", place " << i;
        if (same) {
          EXPECT_EQ(table.of(s)[at], table.of(0)[at]);
        }
      }
    }
  }
}

TEST(PageTables, SharedPagesAreFoundFromOneTileOn) {
  const std::int64_t page = 4;
  const PageTable table = table_of(
      {{0, 1, 2, 3, 4, 5}, {6, 7, 8, 9}, {0, 1, 2, 3, 10, 11}, {0, 1}, {6, 7, 8, 12}, {0, 13}, {14, 15}}, page);
  const Batch batch = batch_of({24, 16, 23, 7, 16, 8, 8});
  // Sequence 3 fills one page of those that it has in common with others.
  EXPECT_EQ(shared_prefix_pages(table, batch, 8, 9), (SharedPrefixPages{{0, 1, 0, -1, 1, -1, -1}, {16, 12}}));
  EXPECT_EQ(shared_prefix_pages(table, batch, 8, 1), (SharedPrefixPages{{0, -1, 0, -1, -1, -1, -1}, {16}}));
  EXPECT_EQ(shared_prefix_pages(table, batch, 12, 9), (SharedPrefixPages{{0, 1, 0, -1, 1, -1, -1}, {16, 12}}));
  EXPECT_EQ(shared_prefix_pages(table, batch, 16, 9), (SharedPrefixPages{{0, -1, 0, -1, -1, -1, -1}, {16}}));
  EXPECT_EQ(shared_prefix_pages(table, batch, 17, 9), SharedPrefixPages());
  EXPECT_EQ(shared_prefix_pages(PageTable(), batch_of({}), 8, 9), SharedPrefixPages());
}

// Nested prefixes: either a few sequences share much, or many share little. Those that save most tiles are chosen.
TEST(PageTables, SharedPagesSpareAsManyTilesAsTheyCan) {
  const auto found = [](const std::vector<std::vector<std::int32_t>>& pages) {
    std::vector<std::int64_t> lengths;
    for (const std::vector<std::int32_t>& of : pages) lengths.push_back(4 * static_cast<std::int64_t>(of.size()));
    return shared_prefix_pages(table_of(pages, 4), batch_of(lengths), 4, 9);
  };
  // One page of four sequences spares three tiles: fewer than more pages of two of them, and one of the others.
  EXPECT_EQ(found({{0, 1, 2, 3, 9}, {0, 4}, {0, 1, 2, 3, 8}, {0, 5}}), (SharedPrefixPages{{0, 1, 0, 1}, {16, 4}}));
  EXPECT_EQ(found({{0, 1, 2, 9}, {0, 4}, {0, 1, 2, 8}, {0, 5}}), (SharedPrefixPages{{0, 1, 0, 1}, {12, 4}}));
  // As many as one page more of two of them and the first one of the others, with one prefix less.
  EXPECT_EQ(found({{0, 4}, {0, 1, 9}, {0, 5}, {0, 1, 8}, {7}}), (SharedPrefixPages{{0, 0, 0, 0, -1}, {4}}));
  EXPECT_EQ(found({{0, 1, 2, 9}, {0, 4}, {0, 1, 2, 8}}), (SharedPrefixPages{{0, -1, 0}, {12}}));
  // Two nested pairs spare more than what all four have; identical sequences share all that they have.
  EXPECT_EQ(found({{0, 1, 2, 3}, {0, 5, 6, 7}, {0, 1, 2, 4}, {0, 5, 6, 8}}),
            (SharedPrefixPages{{0, 1, 0, 1}, {12, 12}}));
  EXPECT_EQ(found({{3, 4}, {3, 4}, {3, 4}}), (SharedPrefixPages{{0, 0, 0}, {8}}));
  EXPECT_EQ(found({{3}, {4}, {5}}), SharedPrefixPages());
}

// Tiles that are loaded once instead of again, computed only from the pages.
std::int64_t spared(const std::vector<std::vector<std::int32_t>>& pages, const std::vector<int>& of_sequence, int tile,
                    std::int64_t page) {
  std::int64_t sum = 0;
  for (int prefix = 0; prefix < static_cast<int>(pages.size()); ++prefix) {
    std::vector<std::int32_t> common;
    std::int64_t members = 0;
    for (std::size_t s = 0; s < pages.size(); ++s) {
      if (of_sequence[s] != prefix) continue;
      if (members++ == 0) common = pages[s];
      common.resize(static_cast<std::size_t>(std::ranges::mismatch(common, pages[s]).in1 - common.begin()));
    }
    if (members > 1) sum += (members - 1) * (static_cast<std::int64_t>(common.size()) * page / tile);
  }
  return sum;
}

// All ways to share are tried for five sequences whose pages are drawn; no other spares more.
TEST(PageTables, NoOtherChoiceOfSharedPagesSparesMore) {
  constexpr std::size_t kSequences = 5;
  constexpr std::int64_t kPage = 4;
  std::uint32_t state = 1;
  const auto draw = [&state](std::uint32_t below) {
    state = state * 1664525U + 1013904223U;
    return static_cast<std::int32_t>((state >> 16) % below);
  };
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<std::vector<std::int32_t>> pages(kSequences);
    std::vector<std::int64_t> lengths;
    for (std::vector<std::int32_t>& of : pages) {
      std::int32_t path = 0;  // a page follows from those before it, as in a tree
      const std::int32_t count = draw(6);
      for (std::int32_t i = 0; i < count; ++i) of.push_back(path = path * 3 + (i == 0 ? 1 : 1 + draw(2)));
      lengths.push_back(kPage * count);
    }
    const int tile = trial % 3 == 0 ? 8 : 4;
    const SharedPrefixPages found = shared_prefix_pages(table_of(pages, kPage), batch_of(lengths), tile, kSequences);
    std::vector<int> choice(found.of_sequence.begin(), found.of_sequence.end());
    choice.resize(kSequences, -1);
    const std::int64_t here = spared(pages, choice, tile, kPage);
    for (std::size_t prefix = 0; prefix < found.keys.size(); ++prefix) {
      EXPECT_GE(std::ranges::count(choice, static_cast<int>(prefix)), 2) << trial;
      EXPECT_GE(found.keys[prefix], tile) << trial;
    }
    std::int64_t most = 0;
    std::vector<int> other(kSequences, 0);
    const std::function<void(std::size_t)> try_all = [&](std::size_t s) {
      if (s == kSequences) {
        most = std::max(most, spared(pages, other, tile, kPage));
        return;
      }
      for (int prefix = 0; prefix <= static_cast<int>(s); ++prefix) {
        other[s] = prefix;
        try_all(s + 1);
      }
    };
    try_all(0);
    EXPECT_EQ(here, most) << "trial " << trial;
  }
}

}  // namespace
}  // namespace ringattn::testing
