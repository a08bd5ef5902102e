// SPDX-License-Identifier: Apache-2.0
// The tables of backward tasks: every tile of every row is computed once, and splits that CTAs share are merged in
// order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention_backward/cuda/backward_tables.hpp"

namespace ringattn::cuda {
namespace {

constexpr int kCtas = 132;

struct Case {
  BackwardSide rows;
  int heads, kv_heads;
  Mask mask;
  BackwardSequence sequence;
};
constexpr Case kCases[] = {
    {BackwardSide::kKeys, 16, 2, {-1, 0}, {4096, 4096, 0}},
    {BackwardSide::kKeys, 16, 2, {700, 20}, {4000, 4100, 77}},
    {BackwardSide::kKeys, 71, 1, {-1, -1}, {500, 300, -131}},
    {BackwardSide::kQueries, 16, 2, {-1, 0}, {200, 40000, 39800}},
    {BackwardSide::kQueries, 3, 1, {9000, 0}, {130, 30000, 29000}},
};

// One task with all tiles of one sequence.
class Tables {
 public:
  Tables(const Case& c, std::int64_t partials, bool save)
      : spec_(make_spec(Dtype::kBf16, c.heads, c.kv_heads, 128, c.mask)), sequence_(c.sequence) {
    const bool of_queries = c.rows == BackwardSide::kQueries;
    const int other_tile = of_queries ? 128 : kBackwardTile;
    const std::int64_t split = of_queries ? kBackwardKvSplit : backward_query_split(spec_);
    shape_ = {c.rows,
              other_tile,
              split,
              of_queries ? c.heads / c.kv_heads : 1,
              kRowTilesOfPair,
              kCtas,
              partials,
              std::int64_t{1} << 40,
              1};
    const std::int64_t begin = of_queries ? 0 : c.sequence.q_offset - first_query_tile(c.sequence);
    const std::int64_t others = begin + (of_queries ? c.sequence.k_len : c.sequence.q_len);
    const std::int64_t count = (others + other_tile - 1) / other_tile;
    for (std::int64_t i = 0; i < count; ++i) tiles_.push_back({0, std::max(i * other_tile - begin, std::int64_t{0})});
    const KeyRun run{0, 0, count, 0};
    const std::int64_t own = of_queries ? c.sequence.q_len : c.sequence.k_len;
    const QueryRun rows{0, of_queries ? c.sequence.q_offset : 0, 0, own};
    BackwardTask task;
    task.sequences = {&sequence_, 1};
    task.rows = {&rows, 1};
    task.runs = {&run, 1};
    task.tiles = tiles_;
    task.save = save;
    const BackwardLimits limits{own, 1, 1, count, 1};
    memory_.resize(backward_table_bytes(limits, shape_.group, partials));
    BackwardTableBuilder builder;
    builder.reserve(limits, shape_.group, partials);
    layout_ = builder.build(spec_, task, shape_, true, {{}, {}, true}, memory_);
  }

  std::span<const RowTilePair> pairs() const {
    return {at<RowTilePair>(layout_.pairs), static_cast<std::size_t>(layout_.pair_count)};
  }
  std::span<const MergedHeadTile> merged() const {
    return {at<MergedHeadTile>(layout_.merged), static_cast<std::size_t>(layout_.merged_count)};
  }
  const RowTile& row_tile(int index) const { return at<RowTile>(layout_.row_tiles)[index]; }
  int split_of(const RowTilePair& pair, int tile) const {
    return (tile + pair.split_phase) / static_cast<int>(shape_.split / shape_.other_tile);
  }
  const BackwardShape& shape() const { return shape_; }

 private:
  template <class Table>
  const Table* at(std::size_t offset) const {
    return reinterpret_cast<const Table*>(memory_.data() + offset);
  }

  AttentionSpec spec_;
  BackwardSequence sequence_;
  BackwardShape shape_{};
  std::vector<PageRun> tiles_;
  std::vector<std::byte> memory_;
  BackwardTableLayout layout_;
};

int longest(const Tables& tables) {
  int tiles = 0;
  for (const RowTilePair& pair : tables.pairs()) tiles = std::max(tiles, pair.tiles);
  return tiles;
}

void expect_complete(const Tables& tables) {
  using HeadTile = std::pair<int, int>;                      // row tile, head
  std::map<HeadTile, std::map<int, int>> computed;           // times of a tile
  std::map<HeadTile, std::map<int, std::vector<int>>> sums;  // partial sums of a split
  for (const RowTilePair& pair : tables.pairs()) {
    if (pair.partial != RowTilePair::kNoPartial) {
      EXPECT_EQ(tables.split_of(pair, pair.begin_tile), tables.split_of(pair, pair.end_tile - 1));
    }
    for (int n = 0; n < pair.count; ++n) {
      const HeadTile head_tile{pair.row_tile + (pair.head + n) / tables.shape().group,
                               (pair.head + n) % tables.shape().group};
      const RowTile& rows = tables.row_tile(head_tile.first);
      const int begin = std::max(pair.begin_tile, rows.begin_tile);
      const int end = std::min(pair.end_tile, rows.end_tile);
      for (int tile = begin; tile < end; ++tile) ++computed[head_tile][tile];
      if (pair.partial != RowTilePair::kNoPartial && begin < end) {
        sums[head_tile][tables.split_of(pair, begin)].push_back(pair.partial);
      }
    }
  }
  for (const auto& [head_tile, tiles] : computed) {
    const RowTile& rows = tables.row_tile(head_tile.first);
    EXPECT_EQ(static_cast<int>(tiles.size()), rows.end_tile - rows.begin_tile);
    for (const auto& [tile, times] : tiles) EXPECT_EQ(times, 1) << "tile " << tile;
  }
  EXPECT_GE(tables.merged().size(), sums.size());
  for (const MergedHeadTile& merged : tables.merged()) {
    std::vector<int> expected;
    for (const auto& [split, partials] : sums[{merged.row_tile, merged.head}]) {
      ASSERT_EQ(partials.size(), 1U) << "split " << split;
      expected.push_back(partials[0]);
    }
    std::vector<int> read;
    for (int n = 0; n < merged.splits; ++n) read.push_back(merged.partial + n);
    EXPECT_EQ(read, expected);
  }
}

TEST(BackwardTables, LongPairsAreSharedSplitBySplit) {
  for (const Case& c : kCases) {
    const Tables whole(c, 0, false), shared(c, 4096, false);
    expect_complete(whole);
    expect_complete(shared);
    EXPECT_TRUE(whole.merged().empty());
    EXPECT_FALSE(shared.merged().empty());
    EXPECT_LT(longest(shared), longest(whole));
  }
}

TEST(BackwardTables, ScratchLimitsWhatIsShared) {
  const Tables tables(kCases[0], 20, false);
  expect_complete(tables);
  int partials = 0;
  for (const RowTilePair& pair : tables.pairs()) partials += pair.partial == RowTilePair::kNoPartial ? 0 : 1;
  EXPECT_GT(partials, 0);
  EXPECT_LE(partials, 20);
}

TEST(BackwardTables, TasksWithAStateShareNothing) {
  for (const Case& c : kCases) EXPECT_TRUE(Tables(c, 4096, true).merged().empty());
}

// 32/8 heads at 16k: the even share of a CTA is longer than any pair.
TEST(BackwardTables, ManyPairsAreNotShared) {
  EXPECT_TRUE(Tables({BackwardSide::kKeys, 32, 8, {-1, 0}, {16384, 16384, 0}}, 4096, false).merged().empty());
}

// The work of rows grows with the window and not with the sequence, for dQ as for dK and dV.
TEST(BackwardTables, WindowsBoundTheTilesOfRows) {
  constexpr std::int64_t kTokens = 1 << 15;
  constexpr std::int64_t kWindow = 1024;
  for (const BackwardSide side : {BackwardSide::kQueries, BackwardSide::kKeys}) {
    const Tables tables({side, 4, 2, {kWindow - 1, 0}, {kTokens, kTokens, 0}}, 0, false);
    expect_complete(tables);
    ASSERT_GE(static_cast<std::int64_t>(tables.pairs().size()), kTokens / kBackwardTile / kRowTilesOfPair);
    const std::int64_t most = (kWindow + kRowTilesOfPair * kBackwardTile) / tables.shape().other_tile + 1;
    for (const RowTilePair& pair : tables.pairs()) {
      ASSERT_GT(pair.tiles, 0);
      ASSERT_LE(pair.tiles, most);
      ASSERT_LE(pair.end_tile - pair.begin_tile, most);
    }
  }
}

}  // namespace
}  // namespace ringattn::cuda
