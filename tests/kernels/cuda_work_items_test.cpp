// SPDX-License-Identifier: Apache-2.0
// The tables that CUDA fold kernels read, checked on the host: every row of a task once, with exactly the tiles that it
// folds, in order; bundles that hold every item's heads once; the longest of both first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "kernels/cuda/work_items.hpp"
#include "kernels/registry.hpp"
#include "tests/support/fold_inputs.hpp"

namespace ringattn::cuda {
namespace {

constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {300, 0}, {40, 25}, {-1, 70}, {10, -1}};
constexpr WorkShape kShapes[] = {
    {128, 128, 64, 1, 1 << 30}, {64, 64, 128, 1, 100'000}, {16, 1, 128, 1, 1 << 20}, {64, 64, 80, 2, 1 << 20, 132}};
constexpr WorkShape kBundleShapes[] = {{64, 64, 128, 3, 1 << 20, 132}, {64, 64, 80, 2, std::int64_t{1} << 40, 7}};

struct HostTask {
  std::vector<QueryRun> queries;
  std::vector<std::int64_t> key_lengths;
  std::vector<KeyRun> key_runs;
  std::vector<KeyTile> tiles;
  std::vector<KeySource> sources;
  std::int64_t rows = 0;
  FoldTask task;

  void add_sequence(std::int64_t key_length) { key_lengths.push_back(key_length); }
  void add_queries(std::int64_t position, std::int64_t count) {
    queries.push_back({sequence(), position, rows, count});
    rows += count;
  }
  void add_keys(std::int64_t first_tile, std::int64_t count) {
    key_runs.push_back({sequence(), first_tile, count, static_cast<std::int64_t>(tiles.size())});
    for (std::int64_t i = 0; i < count; ++i) tiles.push_back({0, 100'000 * sequence() + first_tile + i});
  }
  void finish() {
    sources.resize(1);
    task.q.tokens = rows;
    task.queries = queries;
    task.key_lengths = key_lengths;
    task.key_runs = key_runs;
    task.tiles = tiles;
    task.sources = sources;
  }
  std::int32_t sequence() const { return static_cast<std::int32_t>(key_lengths.size()) - 1; }
};

// Sequences with random runs of queries and of key tiles, some without either.
HostTask random_task(const WorkShape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  HostTask t;
  const std::int64_t sequences = 1 + below(5);
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t length = below(4) == 0 ? below(3) : below(3000);
    t.add_sequence(length);
    std::int64_t position = below(500) - 200;
    for (std::int64_t runs = below(6); runs > 0; --runs) {
      const std::int64_t rows = 1 + below(400);
      t.add_queries(position, rows);
      position += rows + below(3) * 57;
    }
    const std::int64_t tiles = (length + shape.key_tile - 1) / shape.key_tile;
    for (std::int64_t tile = below(3); tile < tiles;) {
      const std::int64_t count = std::min(1 + below(7), tiles - tile);
      t.add_keys(tile, count);
      tile += count + below(4);
    }
  }
  t.finish();
  return t;
}

// Causal sequences as they come in a batch: long ones, one of one token, one of none, one without keys, one with a
// prefix of its keys elsewhere. Every fourth tile is missing.
HostTask ragged_task(const WorkShape& shape) {
  HostTask t;
  for (const auto& [queries, keys] :
       {std::pair<std::int64_t, std::int64_t>{1500, 1500}, {1, 1}, {0, 0}, {70, 0}, {333, 2000}, {1, 900}}) {
    t.add_sequence(keys);
    if (queries > 0) t.add_queries(keys - queries, queries);
    const std::int64_t tiles = (keys + shape.key_tile - 1) / shape.key_tile;
    for (std::int64_t tile = 0; tile < tiles; tile += 4) t.add_keys(tile, std::min<std::int64_t>(3, tiles - tile));
  }
  t.finish();
  return t;
}

// Sequences of `tokens` queries and as many keys, all of them in the task.
HostTask whole_task(const WorkShape& shape, int sequences, std::int64_t tokens) {
  HostTask t;
  for (int s = 0; s < sequences; ++s) {
    t.add_sequence(tokens);
    t.add_queries(0, tokens);
    t.add_keys(0, (tokens + shape.key_tile - 1) / shape.key_tile);
  }
  t.finish();
  return t;
}

struct Built {
  std::vector<std::byte> memory;
  TableLayout layout;

  template <typename Entry>
  const Entry* at(std::size_t offset) const {
    return reinterpret_cast<const Entry*>(memory.data() + offset);
  }
};

FoldLimits limits_of(const FoldTask& task) {
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  return {task.q.tokens,     count(task.queries), count(task.key_runs),
          count(task.tiles), count(task.sources), count(task.key_lengths)};
}

Built build(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape) {
  Built built;
  built.memory.assign(table_bytes(spec, shape, limits_of(task)), std::byte{0xff});
  WorkBuilder builder;
  builder.reserve(spec, shape, limits_of(task));
  built.layout = builder.build(spec, task, shape, built.memory);
  return built;
}

// The rows of the tile map (100'000 · sequence + tile) that an item or a bundle walks over.
template <typename Work>
std::vector<std::int64_t> walk(const Built& built, const Work& item) {
  std::vector<std::int64_t> tiles;
  for (std::int64_t number = item.first; number < item.first + item.tiles; ++number) {
    const auto* runs = built.at<RunEntry>(built.layout.runs) + item.run_begin;
    int run = 0;
    while (run + 1 < item.runs && runs[run + 1].first <= number) ++run;
    const std::int64_t index = number - runs[run].first;
    const std::int64_t row = built.at<TileEntry>(built.layout.tiles)[runs[run].table + index].row;
    EXPECT_EQ(row % 100'000, runs[run].first_tile + index);
    if (item.runs == 1) {  // what the item itself says
      EXPECT_EQ(runs[run].table + index, item.table + number - item.first);
      EXPECT_EQ(runs[run].first_tile + index, item.first_tile + number - item.first);
    }
    tiles.push_back(row);
  }
  return tiles;
}

TEST(WorkItems, EveryRowOnceWithItsTilesInOrder) {
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    for (const WorkShape& shape : kShapes) {
      const HostTask random = random_task(shape, seed);
      FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, kMasks[seed % std::size(kMasks)]);
      const Built built = build(spec, random.task, shape);
      std::vector<int> visits(static_cast<std::size_t>(random.task.q.tokens), 0);
      for (std::int32_t i = 0; i < built.layout.item_count; ++i) {
        const WorkItem& item = built.at<WorkItem>(built.layout.items)[i];
        ASSERT_LE(item.slot_end, shape.item_rows);
        const std::vector<std::int64_t> tiles = walk(built, item);
        for (std::int64_t slot = item.slot_begin; slot < item.slot_end; ++slot) {
          const std::int64_t row = item.row + slot;
          ++visits[static_cast<std::size_t>(row)];
          const auto run = std::find_if(random.queries.begin(), random.queries.end(),
                                        [&](const QueryRun& q) { return q.row <= row && row < q.row + q.rows; });
          ASSERT_EQ(item.position + slot, run->position + row - run->row);
          const std::int64_t length = random.key_lengths[static_cast<std::size_t>(run->sequence)];
          ASSERT_EQ(item.key_length, length);
          const TileRange folded =
              folded_tiles(spec.mask, item.position + slot, length, shape.query_tile, shape.key_tile);
          std::vector<std::int64_t> expected;
          for (const KeyRun& keys : random.key_runs) {
            if (keys.sequence != run->sequence) continue;
            for (std::int64_t tile = keys.first_tile; tile < keys.first_tile + keys.tiles; ++tile) {
              if (folded.begin <= tile && tile < folded.end) expected.push_back(100'000 * keys.sequence + tile);
            }
          }
          if (shape.query_tile > 1) {
            ASSERT_EQ(tiles, expected) << "seed " << seed;
          } else {
            ASSERT_TRUE(std::includes(tiles.begin(), tiles.end(), expected.begin(), expected.end())) << "seed " << seed;
          }
        }
      }
      ASSERT_EQ(visits, std::vector<int>(visits.size(), 1)) << "seed " << seed;
    }
  }
}

TEST(WorkItems, RowsThatNothingHappensToAreLeftOut) {
  const WorkShape& shape = kShapes[0];
  const FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  HostTask random = random_task(shape, 3);
  random.task.resume = true;
  const Built built = build(spec, random.task, shape);
  for (std::int32_t i = 0; i < built.layout.item_count; ++i) {
    EXPECT_GT(built.at<WorkItem>(built.layout.items)[i].tiles, 0);
  }
  random.task.key_runs = {};
  EXPECT_EQ(build(spec, random.task, shape).layout.item_count, 0);
}

// What is folded in sections comes longest first in each; then what is left for last, longest first too, shorter than all
// before and none longer than a quarter of the longest. `section_of` the n-th piece.
template <typename Work>
void expect_order(const Built& built, std::span<const Work> pieces, const std::function<int(std::size_t)>& section_of) {
  const auto early = static_cast<std::size_t>(built.layout.early_count);
  ASSERT_LE(early, pieces.size());
  const auto by_tiles = [](const Work& a, const Work& b) { return a.tiles < b.tiles; };
  const auto most = std::max_element(pieces.begin(), pieces.end(), by_tiles)->tiles;
  for (std::size_t i = 0; i + 1 < pieces.size(); ++i) {
    const bool new_section = i + 1 < early && section_of(i) != section_of(i + 1);
    EXPECT_TRUE(new_section || pieces[i].tiles >= pieces[i + 1].tiles) << i;
    EXPECT_TRUE(!new_section || section_of(i) < section_of(i + 1)) << i;
  }
  for (std::size_t i = 0; i < early; ++i) {
    EXPECT_TRUE(early == pieces.size() || pieces[i].tiles > pieces[early].tiles) << i;
  }
  for (std::size_t i = early; i < pieces.size(); ++i) EXPECT_LE(pieces[i].tiles, most / 4) << i;
}

TEST(WorkItems, LongestFirst) {
  // One long causal sequence, then a batch whose sequences fill the cache one by one.
  for (const std::int64_t cache : {std::int64_t{1} << 40, std::int64_t{1}}) {
    WorkShape shape = kShapes[0];
    shape.cache_bytes = cache;
    const FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
    const HostTask task = whole_task(shape, 3, 1024);
    const Built built = build(spec, task.task, shape);
    ASSERT_EQ(built.layout.item_count, 24);
    EXPECT_EQ(built.layout.section_heads, cache == 1 ? 4 : 8);
    const std::span items(built.at<WorkItem>(built.layout.items), 24);
    expect_order(built, items, [&](std::size_t i) { return cache == 1 ? items[i].run_begin : 0; });
    EXPECT_EQ(built.layout.early_count, 21);  // of each sequence the first item
  }
}

class WorkBundles : public ::testing::Test {
 protected:
  void check(const FoldSpec& spec, const HostTask& host, const WorkShape& shape) {
    SCOPED_TRACE(describe(spec));
    const Built built = build(spec, host.task, shape);
    ASSERT_LE(built.layout.bytes, built.memory.size());
    const auto* items = built.at<WorkItem>(built.layout.items);
    const int group = spec.heads / spec.kv_heads;
    std::vector<int> visits(static_cast<std::size_t>(built.layout.item_count * group), 0);
    for (std::int32_t i = 0; i < built.layout.bundle_count; ++i) {
      const WorkBundle& bundle = built.at<WorkBundle>(built.layout.bundles)[i];
      ASSERT_GE(bundle.units, 1);
      ASSERT_LE(bundle.units, shape.units);
      ASSERT_LT(bundle.head, group);
      if (bundle.units < shape.units) {  // the first one of its sequence
        EXPECT_EQ(bundle.head, 0);
        EXPECT_TRUE(bundle.item == 0 ||
                    sequence_of(host, items[bundle.item - 1]) != sequence_of(host, items[bundle.item]));
      }
      const std::vector<std::int64_t> tiles = walk(built, bundle);
      std::int64_t begin = std::numeric_limits<std::int64_t>::max();
      std::int64_t end = 0;
      for (std::int32_t n = 0; n < bundle.units; ++n) {
        const std::int32_t index = bundle.item + (bundle.head + n) / group;
        ASSERT_LT(index, built.layout.item_count);
        ++visits[static_cast<std::size_t>(index * group + (bundle.head + n) % group)];
        const WorkItem& item = items[index];
        ASSERT_EQ(sequence_of(host, item), sequence_of(host, items[bundle.item]));
        if (item.tiles == 0) continue;
        begin = std::min(begin, item.first);
        end = std::max(end, item.first + item.tiles);
        // The unit's tiles are a part of the walk, where the kernel looks for them.
        const std::vector<std::int64_t> own = walk(built, item);
        ASSERT_LE(item.first - bundle.first + item.tiles, bundle.tiles);
        ASSERT_TRUE(std::equal(own.begin(), own.end(), tiles.begin() + (item.first - bundle.first)));
      }
      if (end == 0) {
        EXPECT_EQ(bundle.tiles, 0);
      } else {
        EXPECT_EQ(bundle.first, begin);
        EXPECT_EQ(bundle.first + bundle.tiles, end);
      }
    }
    ASSERT_EQ(visits, std::vector<int>(visits.size(), 1));
    if (built.layout.bundle_count > 0) expect_counters_are_zero(built, shape);
  }

  static std::int32_t sequence_of(const HostTask& host, const WorkItem& item) {
    const std::int64_t row = item.row + item.slot_begin;
    const auto run = std::find_if(host.queries.begin(), host.queries.end(),
                                  [row](const QueryRun& q) { return q.row <= row && row < q.row + q.rows; });
    return run->sequence;
  }

  static void expect_counters_are_zero(const Built& built, const WorkShape& shape) {
    const auto count = static_cast<std::size_t>(1 + shape.ctas);
    ASSERT_LE(built.layout.counters + count * sizeof(std::int32_t), built.memory.size());
    const auto* counters = built.at<std::int32_t>(built.layout.counters);
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(counters[i], 0) << i;
  }

  static FoldSpec spec_of(int group, const Mask& mask) {
    return testing::make_spec(Dtype::kBf16, 2 * group, 2, 64, mask);
  }
};

TEST_F(WorkBundles, EveryItemAndHeadOnce) {
  for (const WorkShape& shape : kBundleShapes) {
    for (const Mask& mask : kMasks) {
      for (const int group : {1, 3, 4, 8}) {
        const FoldSpec spec = spec_of(group, mask);
        for (const bool resume : {false, true}) {
          HostTask ragged = ragged_task(shape);
          ragged.task.resume = resume;
          check(spec, ragged, shape);
        }
        for (std::uint64_t seed = 1; seed <= 30; ++seed) check(spec, random_task(shape, seed), shape);
      }
    }
  }
}

// As many items as rows, and a rest in every sequence: the most that table_bytes() must make room for.
TEST_F(WorkBundles, ManyShortSequencesHaveRoom) {
  for (const WorkShape& shape : kBundleShapes) {
    for (const int group : {1, 4}) check(spec_of(group, {-1, 0}), whole_task(shape, 500, 1), shape);
  }
}

TEST_F(WorkBundles, LongestFirst) {
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{300, 0}}) {
    // Everything in the cache; sequences that fill it one by one.
    for (const auto& [cache, ctas] : {std::pair{std::int64_t{1} << 40, 1}, {1, 1}, {1, 132}}) {
      WorkShape shape = kBundleShapes[0];
      shape.cache_bytes = cache;
      shape.ctas = ctas;
      const Built built = build(spec_of(4, mask), whole_task(shape, 3, 1024).task, shape);
      constexpr std::int32_t kOfSequence = (1024 / 64 * 4 + 2) / 3;
      ASSERT_EQ(built.layout.bundle_count, 3 * kOfSequence);
      EXPECT_EQ(built.layout.section_heads, cache == 1 ? 4 : 8);
      const std::span bundles(built.at<WorkBundle>(built.layout.bundles), 3 * kOfSequence);
      expect_order(built, bundles, [&](std::size_t i) { return cache == 1 ? bundles[i].item / 16 : 0; });
      EXPECT_EQ(built.layout.early_count == built.layout.bundle_count, mask == Mask(-1, -1));
    }
  }
}

// Half of the longest piece for each CTA: of a long sequence as many as that takes, of a short one all short ones.
TEST_F(WorkBundles, EnoughIsLeftForLast) {
  for (const std::int64_t tokens : {std::int64_t{2048}, std::int64_t{1} << 16}) {
    const WorkShape& shape = kBundleShapes[0];
    const FoldSpec spec = spec_of(4, {-1, 0});
    const Built built = build(spec, whole_task(shape, 2, tokens).task, shape);
    const auto* bundles = built.at<WorkBundle>(built.layout.bundles);
    const std::int64_t most = tokens / shape.key_tile;
    const std::int64_t enough = shape.ctas * most / 2;
    std::int64_t work = 0;
    std::int64_t of_longest = 0;
    for (std::int32_t i = built.layout.early_count; i < built.layout.bundle_count; ++i) {
      work += std::int64_t{bundles[i].tiles} * spec.kv_heads;
      if (bundles[i].tiles == bundles[built.layout.early_count].tiles) {
        of_longest += std::int64_t{bundles[i].tiles} * spec.kv_heads;
      }
    }
    EXPECT_LE(work - of_longest, enough);
    if (tokens == 2048) {
      EXPECT_EQ(bundles[built.layout.early_count].tiles, most / 4);
    } else {
      EXPECT_LT(bundles[built.layout.early_count].tiles, most / 4);
      EXPECT_GT(work, enough);
    }
  }
}

// Nothing depends on how long the walks are against how many there are.
TEST_F(WorkBundles, FewRowsOfManyKeys) {
  const WorkShape& shape = kBundleShapes[0];
  HostTask t;
  t.add_sequence(1 << 20);
  t.add_queries((1 << 20) - 5, 5);
  t.add_keys(0, (1 << 20) / shape.key_tile);
  t.finish();
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}}) check(spec_of(4, mask), t, shape);
}

TEST_F(WorkBundles, CtasKeepPaceOnWalksFarBeyondTheCache) {
  for (const int group : {1, 4}) {
    const FoldSpec spec = spec_of(group, {-1, -1});
    WorkShape shape = kBundleShapes[0];
    const HostTask one = whole_task(shape, 1, 64 * 128);
    const HostTask many = whole_task(shape, 64, 128);
    const std::int64_t head_bytes = std::int64_t{64} * 128 * (64 + 64) * 2;
    shape.cache_bytes = (head_bytes + 5) / 6;
    EXPECT_FALSE(build(spec, one.task, shape).layout.keep_pace);
    shape.cache_bytes -= 1;
    EXPECT_TRUE(build(spec, one.task, shape).layout.keep_pace);
    // As many keys in all, but no walk is long.
    EXPECT_FALSE(build(spec, many.task, shape).layout.keep_pace);
    // A window makes the walk short, however long the sequence is.
    EXPECT_FALSE(build(spec_of(group, {256, 0}), one.task, shape).layout.keep_pace);
  }
}

// Tables that are kept for a task must be the ones that another task would get: every change of a task that can change
// them is noticed, and the same task with other tensors is not taken for another one.
TEST(TaskGeometry, FitsWhatHasTheSameTables) {
  const WorkShape& shape = kBundleShapes[0];
  const FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  FoldOutput output;
  std::vector<HostTask> tasks;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    for (int change = 0; change < 10; ++change) {
      HostTask t = random_task(shape, seed);
      if (change == 1) t.task.finish = &output;
      if (change == 2) t.task.resume = true;
      if (change == 3) t.task.save = false;
      if (change == 4 && !t.queries.empty()) t.queries.back().position += 64;
      if (change == 5 && !t.queries.empty()) t.queries.front().row += 1;
      if (change == 6) t.key_lengths.front() += 1000;
      if (change == 8 && !t.key_runs.empty()) t.key_runs.front().first_tile -= 1;
      if (change == 9) t.task.q.tokens += 1;
      if (change == 7 && !t.tiles.empty()) t.tiles.back().row += 128;
      tasks.push_back(std::move(t));
    }
  }
  int fitting = 0;
  for (const HostTask& kept : tasks) {
    TaskGeometry geometry;
    EXPECT_FALSE(geometry.fits(kept.task));
    geometry.reserve(limits_of(kept.task));
    geometry.remember(kept.task);
    EXPECT_TRUE(geometry.fits(kept.task));
    const Built expected = build(spec, kept.task, shape);
    for (const HostTask& other : tasks) {
      if (&other == &kept || !geometry.fits(other.task)) continue;
      ++fitting;
      const Built found = build(spec, other.task, shape);
      ASSERT_EQ(found.layout, expected.layout);
      const auto same = [&](std::size_t from, std::size_t to) {
        return std::memcmp(found.memory.data() + from, expected.memory.data() + from, to - from) == 0;
      };
      ASSERT_TRUE(same(0, expected.layout.tiles));
      for (std::size_t i = 0; i < kept.tiles.size(); ++i) {  // tile entries have gaps, which may hold anything
        ASSERT_EQ(found.at<TileEntry>(found.layout.tiles)[i].row, expected.at<TileEntry>(found.layout.tiles)[i].row);
      }
      ASSERT_TRUE(same(expected.layout.sources, expected.layout.bytes));
    }
    geometry.forget();
    EXPECT_FALSE(geometry.fits(kept.task));
  }
  EXPECT_GT(fitting, 40);  // the unchanged task, and the one that resumes nothing and saves nothing
}

TEST(TaskGeometry, NeverFitsSourcesThatTheTablesHold) {
  HostTask t = random_task(kShapes[0], 3);
  TaskGeometry geometry;
  t.sources.resize(kNearSources + 1);
  t.task.sources = t.sources;
  geometry.reserve(limits_of(t.task));
  geometry.remember(t.task);
  EXPECT_FALSE(geometry.fits(t.task));
  t.task.sources = std::span(t.sources).first(kNearSources);
  EXPECT_FALSE(geometry.fits(t.task));
  geometry.remember(t.task);
  EXPECT_TRUE(geometry.fits(t.task));
  t.task.sources = t.sources;
  EXPECT_FALSE(geometry.fits(t.task));
}

TEST(WorkItems, RefusesMoreThanWasReserved) {
  const WorkShape& shape = kShapes[0];
  const HostTask random = random_task(shape, 5);
  const FoldSpec spec = testing::make_spec(Dtype::kBf16, 8, 2, 64, {-1, 0});
  std::vector<std::byte> memory(64);
  WorkBuilder builder;
  EXPECT_THROW(builder.build(spec, random.task, shape, memory), Error);
}

}  // namespace
}  // namespace ringattn::cuda
