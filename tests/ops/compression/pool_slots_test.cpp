// SPDX-License-Identifier: Apache-2.0
// Which tokens of a pool are quantized: each once, however many sequences hold it, and some at a time.
#include "ops/compression/pool_slots.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace ringattn::testing {
namespace {

std::vector<PackedRun> parts_of(const PoolSlots& slots, std::int64_t most,
                                std::vector<std::int64_t>* firsts = nullptr) {
  std::vector<PackedRun> all;
  std::int64_t expected = 0;
  slots.for_each_part(most, [&](std::int64_t first, std::span<const PackedRun> runs) {
    EXPECT_EQ(first, expected);
    EXPECT_GT(total_tokens(runs), 0);
    expected += total_tokens(runs);
    if (firsts != nullptr) firsts->push_back(first);
    all.insert(all.end(), runs.begin(), runs.end());
  });
  EXPECT_EQ(expected, slots.tokens());
  return all;
}

// Pages of 16 tokens in a pool of two billion: a full one and a part of one, a shared one of which the second sequence
// has more, and a sequence of nothing.
TEST(PoolSlots, AreWhatSequencesHold) {
  constexpr std::int32_t kLast = 2'147'483'646;
  PageTable table;
  table.pages = std::int64_t{kLast} + 1;
  table.page_size = 16;
  table.entries = {kLast, 7, 5, 6, 7};
  table.begin = {0, 2, 5, 5};
  const std::vector<std::int64_t> cu{0, 20, 63, 63};
  const PoolSlots slots = held_slots(table, cu);
  constexpr std::int64_t kSlot = std::int64_t{kLast} * 16;
  EXPECT_EQ(slots.tokens(), 16 + 16 + 11 + 16);
  EXPECT_EQ(parts_of(slots, 1 << 20), (std::vector<PackedRun>{{80, 80 + 43}, {kSlot, kSlot + 16}}));
  std::vector<std::int64_t> firsts;
  EXPECT_EQ(parts_of(slots, 1, &firsts),
            (std::vector<PackedRun>{{80, 96}, {96, 112}, {112, 123}, {kSlot, kSlot + 16}}));
  EXPECT_EQ(firsts, (std::vector<std::int64_t>{0, 16, 32, 43}));
  // Only full quantization groups.
  EXPECT_EQ(parts_of(held_slots(table, cu, 16), 1 << 20), (std::vector<PackedRun>{{80, 112}, {kSlot, kSlot + 16}}));
  EXPECT_EQ(held_slots(PageTable{}, std::vector<std::int64_t>{0}).tokens(), 0);
}

}  // namespace
}  // namespace ringattn::testing
