// SPDX-License-Identifier: Apache-2.0
// Chunks of a task of dQ and a task of dK and dV: together they have every pair of tiles once, in the order of both
// sums, and finish every row once, within the memory that they were given. The tables of both agree where dS is.
#include "kernels/attention_backward/cuda/backward_chunks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention_backward/cuda/backward_tables.hpp"

namespace ringattn::testing {
namespace {

using cuda::BackwardChunk;
using cuda::BackwardChunker;
using cuda::ChunkLimits;

constexpr int kKeyTile = 128;
constexpr int kHeadDim = 64;
constexpr int kMultiprocessors = 132;

std::int64_t query_tiles_of(const BackwardSequence& s) {
  return s.q_len == 0 ? 0 : (s.q_offset + s.q_len - first_query_tile(s) + kBackwardTile - 1) / kBackwardTile;
}

// One rank's tensors and tasks. Chunks are told apart by addresses, so no memory is behind them.
struct Tasks {
  explicit Tasks(const AttentionSpec& spec, std::vector<BackwardSequence> all) : sequences(std::move(all)) {
    std::int64_t q_rows = 0;
    std::int64_t k_rows = 0;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const BackwardSequence& s = sequences[i];
      const auto number = static_cast<std::int32_t>(i);
      if (s.q_len > 0) queries.push_back({number, s.q_offset, q_rows, s.q_len});
      if (s.k_len > 0) keys.push_back({number, 0, k_rows, s.k_len});
      add_tiles(number, (s.k_len + kKeyTile - 1) / kKeyTile, k_rows, kKeyTile, key_runs, key_tiles);
      // a partial first tile begins where the sequence does
      add_tiles(number, query_tiles_of(s), q_rows, kBackwardTile, query_runs, query_tiles);
      for (std::size_t t = query_tiles.size() - static_cast<std::size_t>(query_tiles_of(s)) + 1; t < query_tiles.size();
           ++t) {
        query_tiles[t].row -= s.q_offset - first_query_tile(s);
      }
      q_rows += s.q_len;
      k_rows += s.k_len;
    }
    const auto view = [](std::uintptr_t at, std::int64_t rows, int heads) {
      return dense_view(reinterpret_cast<void*>(at), Dtype::kBf16, rows, heads, kHeadDim);
    };
    dq_out = view(std::uintptr_t{1} << 40, q_rows, spec.heads);
    dk_out = view(std::uintptr_t{2} << 40, k_rows, spec.kv_heads);
    dq.q = dq.dout = dq_out;
    dkv.k = dkv.v = dk_out;
    key_source = {dk_out, dk_out};
    query_source = {dq_out, dq_out, nullptr};
    fill(dq, queries, key_runs, key_tiles);
    fill(dkv, keys, query_runs, query_tiles);
    dq.sources = {&key_source, 1};
    dkv.sources = {&query_source, 1};
    dq.dq = &dq_out;
    dkv.dk = dkv.dv = &dk_out;
    limits = {std::max(q_rows, k_rows),
              static_cast<std::int64_t>(sequences.size()),
              static_cast<std::int64_t>(sequences.size()),
              static_cast<std::int64_t>(std::max(key_tiles.size(), query_tiles.size())),
              static_cast<std::int64_t>(sequences.size()),
              ScoreSharing::kIfPossible};
  }
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;

  static void add_tiles(std::int32_t sequence, std::int64_t count, std::int64_t first_row, int size,
                        std::vector<KeyRun>& runs, std::vector<PageRun>& tiles) {
    if (count > 0) runs.push_back({sequence, 0, count, static_cast<std::int64_t>(tiles.size())});
    for (std::int64_t i = 0; i < count; ++i) tiles.push_back({0, first_row + i * size});
  }
  void fill(BackwardTask& task, const std::vector<QueryRun>& rows, const std::vector<KeyRun>& runs,
            const std::vector<PageRun>& tiles) const {
    task.sequences = sequences;
    task.rows = rows;
    task.runs = runs;
    task.tiles = tiles;
    task.save = false;
  }

  std::vector<BackwardSequence> sequences;
  std::vector<QueryRun> queries, keys;
  std::vector<KeyRun> key_runs, query_runs;
  std::vector<PageRun> key_tiles, query_tiles;
  MutableTensorView dq_out, dk_out;
  BackwardKeySource key_source;
  BackwardQuerySource query_source;
  DqTask dq;
  DkvTask dkv;
  BackwardLimits limits;
};

// What chunks have computed of one tile of one KV head.
struct Progress {
  std::int64_t pairs = 0;
  std::int64_t last = -1;  // tile of the other side
  int chunk = 0;           // in which it was
  bool is_finished = false;
};
using TileKey = std::tuple<std::int32_t, int, std::int64_t>;  // sequence, KV head, tile

class CheckedCut {
 public:
  CheckedCut(const AttentionSpec& spec, const Tasks& tasks, const ChunkLimits& limits)
      : spec_(spec), tasks_(tasks), limits_(limits) {}

  int cut() {
    BackwardChunker chunker(spec_, kKeyTile);
    chunker.reserve(tasks_.limits);
    const bool is_cut = chunker.cut(tasks_.dq, tasks_.dkv, limits_, dq_sums_, dkv_sums_, [&](const BackwardChunk& c) {
      ++chunks_;
      visit(c);
    });
    EXPECT_TRUE(is_cut);
    expect_all();
    return chunks_;
  }

 private:
  // The first and the last row of a tile at positions, by definition of the mask.
  bool is_seen(const BackwardSequence& s, std::int64_t query_tile, std::int64_t key_tile) const {
    const std::int64_t begin = first_query_tile(s) + query_tile * kBackwardTile;
    const std::int64_t first = std::max(begin, s.q_offset);
    const std::int64_t last = std::min(begin + kBackwardTile, s.q_offset + s.q_len) - 1;
    const std::int64_t first_key = key_tile * kBackwardTile;
    const std::int64_t last_key = std::min(first_key + kBackwardTile, s.k_len) - 1;
    return first <= last && first_key <= last_key && (spec_.mask.left < 0 || last_key >= first - spec_.mask.left) &&
           (spec_.mask.right < 0 || first_key <= last + spec_.mask.right);
  }

  static bool has(std::span<const KeyRun> runs, std::int32_t sequence, std::int64_t tile) {
    return std::ranges::any_of(runs, [&](const KeyRun& run) {
      return run.sequence == sequence && run.first_tile <= tile && tile < run.first_tile + run.tiles;
    });
  }
  static void expect_tiles(const BackwardTask& chunk, const BackwardTask& all) {
    for (const KeyRun& run : chunk.runs) {
      const KeyRun& whole = *std::ranges::find(all.runs, run.sequence, &KeyRun::sequence);
      for (std::int64_t i = 0; i < run.tiles; ++i) {
        ASSERT_EQ(chunk.tiles[static_cast<std::size_t>(run.table + i)],
                  all.tiles[static_cast<std::size_t>(whole.table + run.first_tile + i)]);
      }
    }
  }

  void visit(const BackwardChunk& chunk) {
    const int group = spec_.heads / spec_.kv_heads;
    expect_tiles(chunk.dq, tasks_.dq);
    expect_tiles(chunk.dkv, tasks_.dkv);
    std::int64_t tiles = 0;
    for (int head = chunk.first_kv_head; head < chunk.first_kv_head + chunk.kv_heads; ++head) {
      for (const QueryRun& queries : chunk.dq.rows) {
        const BackwardSequence& s = tasks_.sequences[static_cast<std::size_t>(queries.sequence)];
        for (const QueryRun& keys : chunk.dkv.rows) {
          if (keys.sequence != queries.sequence) continue;
          tiles += group * visit(chunk, head, s, queries, keys);
        }
      }
      finish(chunk.dq, chunk.dq.dq != nullptr, head, dq_);
      finish(chunk.dkv, chunk.dkv.dk != nullptr, head, dkv_);
    }
    EXPECT_LE(tiles, limits_.ds_tiles);
    expect_memory(chunk.dq, chunk.dq.q, tasks_.dq.q, tasks_.queries, chunk.first_kv_head * group, dq_sums_,
                  std::int64_t{chunk.kv_heads} * group * spec_.head_dim, limits_.dq_sum_floats);
    expect_memory(chunk.dkv, chunk.dkv.k, tasks_.dkv.k, tasks_.keys, chunk.first_kv_head, dkv_sums_,
                  std::int64_t{chunk.kv_heads} * (spec_.head_dim + spec_.head_dim_v), limits_.dkv_sum_floats);
  }

  // Returns the number of pairs of tiles.
  std::int64_t visit(const BackwardChunk& chunk, int head, const BackwardSequence& s, const QueryRun& queries,
                     const QueryRun& keys) {
    std::int64_t pairs = 0;
    const std::int64_t zero = first_query_tile(s);
    for (std::int64_t t = (queries.position - zero) / kBackwardTile;
         zero + t * kBackwardTile < queries.position + queries.rows; ++t) {
      for (std::int64_t k = keys.position / kBackwardTile; k * kBackwardTile < keys.position + keys.rows; ++k) {
        if (!is_seen(s, t, k)) continue;
        ++pairs;
        EXPECT_TRUE(has(chunk.dkv.runs, queries.sequence, t));
        EXPECT_TRUE(has(chunk.dq.runs, queries.sequence, k * kBackwardTile / kKeyTile));
        step(chunk.dq, dq_[{queries.sequence, head, t}], k);
        step(chunk.dkv, dkv_[{queries.sequence, head, k}], t);
      }
    }
    return pairs;
  }

  void step(const BackwardTask& task, Progress& progress, std::int64_t other) const {
    EXPECT_FALSE(progress.is_finished);
    EXPECT_GT(other, progress.last);
    EXPECT_TRUE(task.resume || progress.pairs == 0 || progress.chunk == chunks_);
    progress.chunk = chunks_;
    progress.last = other;
    ++progress.pairs;
  }

  // Rows are tiles [position / kBackwardTile, …) of their own side.
  void finish(const BackwardTask& task, bool finishes, int head, std::map<TileKey, Progress>& side) const {
    EXPECT_TRUE(finishes || task.save);
    for (const QueryRun& run : task.rows) {
      const BackwardSequence& s = tasks_.sequences[static_cast<std::size_t>(run.sequence)];
      const std::int64_t zero = &side == &dq_ ? first_query_tile(s) : 0;
      for (std::int64_t t = (run.position - zero) / kBackwardTile; zero + t * kBackwardTile < run.position + run.rows;
           ++t) {
        if (!finishes) continue;
        Progress& progress = side[{run.sequence, head, t}];
        EXPECT_FALSE(progress.is_finished);
        progress.is_finished = true;
      }
    }
  }

  // Where the rows and their sums are.
  static void expect_memory(const BackwardTask& task, const TensorView& view, const TensorView& all,
                            const std::vector<QueryRun>& rows, int first_head, const float* sums, std::int64_t width,
                            std::int64_t capacity) {
    for (const QueryRun& run : task.rows) {
      const QueryRun& whole = *std::ranges::find(rows, run.sequence, &QueryRun::sequence);
      EXPECT_EQ(view.at(run.row, 0), all.at(whole.row + run.position - whole.position, first_head));
      if (!task.resume && !task.save) continue;
      EXPECT_EQ(task.state, sums);
      EXPECT_LE((run.row + run.rows) * width, capacity);
    }
  }

  void expect_all() {
    for (std::size_t i = 0; i < tasks_.sequences.size(); ++i) {
      const BackwardSequence& s = tasks_.sequences[i];
      const std::int64_t query_tiles = query_tiles_of(s);
      const std::int64_t key_tiles = (s.k_len + kBackwardTile - 1) / kBackwardTile;
      std::vector<std::int64_t> seen_by(static_cast<std::size_t>(key_tiles));
      for (std::int64_t t = 0; t < query_tiles; ++t) {
        std::int64_t seen = 0;
        for (std::int64_t k = 0; k < key_tiles; ++k) {
          if (!is_seen(s, t, k)) continue;
          ++seen;
          ++seen_by[static_cast<std::size_t>(k)];
        }
        expect_done(dq_, static_cast<std::int32_t>(i), t, seen);
      }
      for (std::int64_t k = 0; k < key_tiles; ++k) {
        expect_done(dkv_, static_cast<std::int32_t>(i), k, seen_by[static_cast<std::size_t>(k)]);
      }
    }
  }
  void expect_done(std::map<TileKey, Progress>& side, std::int32_t sequence, std::int64_t tile, std::int64_t pairs) {
    for (int head = 0; head < spec_.kv_heads; ++head) {
      const Progress& progress = side[{sequence, head, tile}];
      EXPECT_EQ(progress.pairs, pairs);
      EXPECT_TRUE(progress.is_finished);
    }
  }

  AttentionSpec spec_;
  const Tasks& tasks_;
  ChunkLimits limits_;
  float* const dq_sums_ = reinterpret_cast<float*>(std::uintptr_t{3} << 40);
  float* const dkv_sums_ = reinterpret_cast<float*>(std::uintptr_t{4} << 40);
  std::map<TileKey, Progress> dq_, dkv_;
  int chunks_ = 0;
};

TEST(BackwardChunks, EveryPairOnceInTheOrderOfTheSums) {
  struct Case {
    int heads, kv_heads;
    Mask mask;
    std::vector<BackwardSequence> sequences;
    int chunks;
    ScoreSharing sharing = ScoreSharing::kIfPossible;
  };
  const std::vector<BackwardSequence> ragged = {{130, 200, 70}, {0, 60, 0}, {90, 77, -9}, {20, 0, 0}, {0, 0, 0}};
  const auto among = [](const BackwardSequence& sequence) {
    return std::vector<BackwardSequence>{{200, 300, 70}, sequence, {0, 9, 0}, {90, 100, 10}};
  };
  const Case cases[] = {{4, 2, {-1, 0}, ragged, 1},
                        {6, 2, {-1, 0}, among({9500, 9600, 33}), 5},
                        {6, 2, {-1, -1}, among({2000, 20000, 5}), 5},
                        {6, 2, {9000, 300}, among({5000, 16000, -100}), 3},
                        {71, 1, {-1, 0}, among({900, 9000, 8100}), 3},
                        {16, 4, {-1, 0}, among({16384, 16384, 0}), 3, ScoreSharing::kIfFaster},
                        {4, 4, {-1, 0}, {{20000, 33000, 13000}}, 2, ScoreSharing::kIfFaster}};
  for (const Case& c : cases) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, c.heads, c.kv_heads, kHeadDim, c.mask);
    Tasks tasks(spec, c.sequences);
    tasks.limits.sharing = c.sharing;
    SCOPED_TRACE(describe(AttentionBackwardSpec{spec, spec.dtype}));
    EXPECT_GE(CheckedCut(spec, tasks, cuda::chunk_limits(spec, tasks.limits, kMultiprocessors)).cut(), c.chunks);
    if (::testing::Test::HasFailure()) return;
  }
}

// As measured on an H200: two calls are faster with few work tiles.
TEST(BackwardChunks, FewWorkTilesAreNotCut) {
  const auto is_cut = [](int heads, int kv_heads, std::vector<BackwardSequence> sequences) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, heads, kv_heads, kHeadDim, {-1, 0});
    Tasks tasks(spec, std::move(sequences));
    tasks.limits.sharing = ScoreSharing::kIfFaster;
    BackwardChunker chunker(spec, kKeyTile);
    chunker.reserve(tasks.limits);
    return chunker.cut(tasks.dq, tasks.dkv, cuda::chunk_limits(spec, tasks.limits, kMultiprocessors), nullptr, nullptr,
                       [](const BackwardChunk&) {});
  };
  EXPECT_TRUE(is_cut(32, 8, {{4096, 4096, 0}}));
  EXPECT_TRUE(is_cut(32, 8, {{1024, 1024, 0}, {1024, 1024, 0}, {1024, 1024, 0}, {1024, 1024, 0}}));
  EXPECT_TRUE(is_cut(64, 8, {{32768, 32768, 0}}));
  EXPECT_TRUE(is_cut(16, 16, {{16384, 16384, 0}, {131072, 131072, 0}}));
  EXPECT_FALSE(is_cut(32, 8, {{2048, 2048, 0}}));
  EXPECT_FALSE(is_cut(32, 8, {{8192, 2048, 0}}));
  EXPECT_FALSE(is_cut(16, 2, {{8192, 8192, 0}}));
  EXPECT_FALSE(is_cut(16, 2, {{32768, 32768, 0}}));
  EXPECT_FALSE(is_cut(32, 8, {{1 << 20, 1 << 20, 0}}));
}

TEST(BackwardChunks, PartsOfSequencesAreNotCut) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, kHeadDim, {-1, 0});
  const auto is_cut = [&](const auto& change) {
    Tasks tasks(spec, {{130, 200, 70}, {90, 77, -9}});
    change(tasks);
    BackwardChunker chunker(spec, kKeyTile);
    chunker.reserve(tasks.limits);
    return chunker.cut(tasks.dq, tasks.dkv, cuda::chunk_limits(spec, tasks.limits, kMultiprocessors), nullptr, nullptr,
                       [](const BackwardChunk&) {});
  };
  EXPECT_TRUE(is_cut([](Tasks&) {}));
  EXPECT_FALSE(is_cut([](Tasks& tasks) { --tasks.queries[0].rows; }));
  EXPECT_FALSE(is_cut([](Tasks& tasks) { ++tasks.keys[1].position; }));
  EXPECT_FALSE(is_cut([](Tasks& tasks) { tasks.dq.resume = true; }));
  EXPECT_FALSE(is_cut([](Tasks& tasks) { tasks.dkv.save = true; }));
  EXPECT_FALSE(is_cut([](Tasks& tasks) { tasks.dq.dq = nullptr; }));
  EXPECT_FALSE(is_cut([](Tasks& tasks) { tasks.limits.sharing = ScoreSharing::kNever; }));
}

// The tables of a task.
struct Tables {
  cuda::BackwardTableLayout layout;
  std::vector<std::byte> memory;
  template <class Entry>
  const Entry* at(std::size_t offset) const {
    return reinterpret_cast<const Entry*>(memory.data() + offset);
  }
  // Calls visit(row tile, member, tile, entry of the tile) for all tiles of all head tiles.
  template <class Visit>
  void for_each(int group, const Visit& visit) const {
    for (std::int32_t i = 0; i < layout.pair_count; ++i) {
      const cuda::RowTilePair& pair = at<cuda::RowTilePair>(layout.pairs)[i];
      for (std::int32_t n = pair.head; n < pair.head + pair.count; ++n) {
        const cuda::RowTile& rows = at<cuda::RowTile>(layout.row_tiles)[pair.row_tile + n / group];
        for (std::int32_t r = pair.run_begin; r < pair.run_end; ++r) {
          const cuda::TileRun& run = at<cuda::TileRun>(layout.runs)[r];
          for (std::int32_t t = std::max(rows.begin_tile, run.first_tile);
               t < std::min(rows.end_tile, run.first_tile + run.tiles); ++t) {
            visit(rows, n % group, t, run.table + t - run.first_tile);
          }
        }
      }
    }
  }
};

// Builds the tables of both tasks of a chunk, and compares where dS is stored and read. A pair of tiles is known by the
// rows in memory where its keys and queries begin.
void expect_same_places(cuda::BackwardTableBuilder& builder, const AttentionSpec& spec, const BackwardLimits& limits,
                        const BackwardChunk& chunk) {
  const int group = spec.heads / spec.kv_heads;
  const auto build = [&](const BackwardTask& task, cuda::BackwardSide side, int tile, int heads, int head_tiles) {
    Tables tables{{}, std::vector<std::byte>(cuda::backward_table_bytes(limits, group, /*partials=*/0))};
    const std::int64_t split =
        side == cuda::BackwardSide::kKeys ? backward_query_split(spec) : std::int64_t{kBackwardKvSplit};
    tables.layout = builder.build(
        spec, task, {side, tile, split, heads, head_tiles, /*ctas=*/132, /*partials=*/0, 1 << 20, 1, /*spills=*/true},
        /*finish=*/true, {{}, {}, /*bulk=*/true}, tables.memory);
    return tables;
  };
  const Tables dkv = build(chunk.dkv, cuda::BackwardSide::kKeys, kBackwardTile, 1, cuda::kRowTilesOfPair);
  const Tables dq = build(chunk.dq, cuda::BackwardSide::kQueries, kKeyTile, group, 4);
  std::map<std::pair<std::int64_t, std::int64_t>, std::int32_t> stored;
  dkv.for_each(1, [&](const cuda::RowTile& keys, int, std::int32_t tile, std::int32_t entry) {
    const std::int64_t query = dkv.at<cuda::OtherTile>(dkv.layout.tiles)[entry].row;
    const bool is_new = stored.insert({{keys.row, query}, keys.ds + (tile - keys.begin_tile) * group}).second;
    ASSERT_TRUE(is_new);
  });
  ASSERT_EQ(static_cast<std::int64_t>(stored.size()) * group, dkv.layout.ds_tiles);
  std::int64_t read = 0;
  dq.for_each(group, [&](const cuda::RowTile& queries, int member, std::int32_t, std::int32_t entry) {
    for (int half = 0; half < cuda::kDsTilesOfKeyTile; ++half) {
      const cuda::DsOfKeys& ds = dq.at<cuda::DsOfKeys>(dq.layout.ds)[entry * cuda::kDsTilesOfKeyTile + half];
      const cuda::OtherTile& keys = dq.at<cuda::OtherTile>(dq.layout.tiles)[entry];
      ASSERT_EQ(ds.keys, std::clamp(keys.end - half * kBackwardTile, 0, kBackwardTile));
      const std::int32_t tile = queries.offset / kBackwardTile;
      const auto found = stored.find({keys.row + half * kBackwardTile, queries.row});
      ASSERT_EQ(ds.begin <= tile && tile < ds.end, found != stored.end());
      if (found == stored.end()) continue;
      ASSERT_EQ(ds.first + tile * group + member, found->second + member);
      ++read;
    }
  });
  ASSERT_EQ(read, static_cast<std::int64_t>(stored.size()) * group);
}

TEST(BackwardChunks, DsIsReadWhereItIsStored) {
  ChunkLimits whole;
  whole.ds_tiles = 1 << 20;
  for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{100, 40}, Mask{-1, 5}}) {
    for (const int heads : {2, 6, 142}) {
      const AttentionSpec spec = make_spec(Dtype::kBf16, heads, 2, kHeadDim, mask);
      const Tasks tasks(spec, {{130, 200, 70}, {0, 60, 0}, {90, 77, -9}, {700, 900, 133}, {20, 0, 0}, {70, 64, -64}});
      BackwardChunker chunker(spec, kKeyTile);
      cuda::BackwardTableBuilder builder;
      chunker.reserve(tasks.limits);
      builder.reserve(tasks.limits, heads / 2, /*partials=*/0);
      const bool is_cut = chunker.cut(tasks.dq, tasks.dkv, whole, nullptr, nullptr, [&](const BackwardChunk& chunk) {
        expect_same_places(builder, spec, tasks.limits, chunk);
      });
      EXPECT_TRUE(is_cut);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
