// SPDX-License-Identifier: Apache-2.0
// Pages that sequences share: dealt so, and found again.
#include "attention/tokens/page_table.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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
  EXPECT_EQ(shared_pages(table, batch, 8, 9), (SharedPages{{0, 1, 0, -1, 1, -1, -1}, {16, 12}}));
  EXPECT_EQ(shared_pages(table, batch, 8, 1), (SharedPages{{0, -1, 0, -1, -1, -1, -1}, {16}}));
  EXPECT_EQ(shared_pages(table, batch, 12, 9), (SharedPages{{0, 1, 0, -1, 1, -1, -1}, {16, 12}}));
  EXPECT_EQ(shared_pages(table, batch, 16, 9), (SharedPages{{0, -1, 0, -1, -1, -1, -1}, {16}}));
  EXPECT_EQ(shared_pages(table, batch, 17, 9), SharedPages());
  EXPECT_EQ(shared_pages(PageTable(), batch_of({}), 8, 9), SharedPages());
}

// Of nested prefixes, a few sequences with much in common or many with little, those that spare most are chosen.
TEST(PageTables, SharedPagesSpareAsManyTilesAsTheyCan) {
  const auto found = [](const std::vector<std::vector<std::int32_t>>& pages) {
    std::vector<std::int64_t> lengths;
    for (const std::vector<std::int32_t>& of : pages) lengths.push_back(4 * static_cast<std::int64_t>(of.size()));
    return shared_pages(table_of(pages, 4), batch_of(lengths), 4, 9);
  };
  // One page of four sequences spares three tiles: fewer than four pages of two of them, and as many as three pages.
  EXPECT_EQ(found({{0, 1, 2, 3, 9}, {0, 4}, {0, 1, 2, 3, 8}, {0, 5}}), (SharedPages{{0, -1, 0, -1}, {16}}));
  EXPECT_EQ(found({{0, 1, 2, 9}, {0, 4}, {0, 1, 2, 8}, {0, 5}}), (SharedPages{{0, 0, 0, 0}, {4}}));
  EXPECT_EQ(found({{0, 4}, {0, 1, 9}, {0, 5}, {0, 1, 8}, {7}}), (SharedPages{{0, 0, 0, 0, -1}, {4}}));
  // Two nested pairs spare more than what all four have; identical sequences share all that they have.
  EXPECT_EQ(found({{0, 1, 2, 3}, {0, 5, 6, 7}, {0, 1, 2, 4}, {0, 5, 6, 8}}), (SharedPages{{0, 1, 0, 1}, {12, 12}}));
  EXPECT_EQ(found({{3, 4}, {3, 4}, {3, 4}}), (SharedPages{{0, 0, 0}, {8}}));
  EXPECT_EQ(found({{3}, {4}, {5}}), SharedPages());
}

}  // namespace
}  // namespace ringattn::testing
