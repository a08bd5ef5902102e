// SPDX-License-Identifier: Apache-2.0
// The promise, by memcmp: a row's bits don't depend on how the work is cut, placed, ordered or spread.
#include <fmt/format.h>

#include <limits>

#include "tests/kernels/kernel_row_test.hpp"

namespace ringattn::testing {
namespace {

constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {100, 0}, {150, 33}};

std::string to_string(const Arrangement& a) {
  return fmt::format(
      "threads {}, tiles per task {}, run rows {}, shuffle {}, sources {}, strided {}, separate finish {}, odd {}{}{}",
      a.threads, a.tiles_per_task, a.run_rows, a.shuffle, a.sources, a.strided, a.separate_finish, a.odd_q ? "q" : "",
      a.odd_keys ? "k" : "", a.odd_out ? "o" : "");
}

class FoldInvariance : public KernelRowTest {
 protected:
  // Ragged, with offsets before, at and behind the keys; a value of −0 and one that underflows to it.
  FoldInputs inputs_for(const FoldSpec& spec) {
    FoldInputs inputs = random_inputs(spec, {{300, 700, 400}, {0, 60, 0}, {130, 257, -9}, {1, 1, 0}, {20, 0, 0}}, 21);
    inputs.set_v(690, 0, 1, -0.0F);
    inputs.set_v(300, 0, 2, -1e-41F);
    return inputs;
  }

  void expect_same(const FoldInputs& inputs, const std::vector<Arrangement>& arrangements) {
    const FoldResult expected = fold_with(row(), inputs);
    for (const Arrangement& arrangement : arrangements) {
      ASSERT_TRUE(fold_with(row(), inputs, arrangement).same_bits(expected))
          << describe(inputs.spec) << "; " << to_string(arrangement);
    }
  }
};

TEST_P(FoldInvariance, ResumesAtEveryTile) {
  for (const Dims& dims : usual_dims(row())) {
    for (const Mask& mask : kMasks) {
      const FoldSpec spec = make_spec(dims, 4, 2, mask);
      expect_same(inputs_for(spec), {{.tiles_per_task = 1},
                                     {.tiles_per_task = 2},
                                     {.tiles_per_task = 5},
                                     {.separate_finish = true},
                                     {.tiles_per_task = 1, .separate_finish = true}});
    }
  }
}

TEST_P(FoldInvariance, RowsGroupedAndPlacedAnyhow) {
  for (const int kv_heads : {1, 2, 6}) {
    for (const Mask& mask : kMasks) {
      FoldSpec spec = make_spec(usual_dims(row()).front(), 6, kv_heads, mask);
      spec.softcap = 25.0F;
      spec.sinks = true;
      expect_same(inputs_for(spec), {{.run_rows = 1, .shuffle = 31},
                                     {.run_rows = 7, .shuffle = 32},
                                     {.run_rows = 64, .shuffle = 33, .strided = true},
                                     {.tiles_per_task = 2, .run_rows = 19, .shuffle = 34}});
    }
  }
}

// Kernels may fetch in different ways, by how many sources there are and how views are aligned, in tasks of one state.
TEST_P(FoldInvariance, AnyNumberOfSourcesAtAnyAlignment) {
  for (const Dims& dims : varied_dims(row())) {
    expect_same(inputs_for(make_spec(dims, 4, 2, {-1, 0})),
                {{.shuffle = 81, .sources = 4},
                 {.shuffle = 82, .sources = 5},
                 {.tiles_per_task = 3, .shuffle = 83, .sources = 40},
                 {.odd_q = true},
                 {.odd_keys = true},
                 {.odd_out = true},
                 {.tiles_per_task = 1, .odd_q = true},
                 {.tiles_per_task = 2, .shuffle = 84, .sources = 4, .odd_keys = true},
                 {.tiles_per_task = 3, .shuffle = 85, .strided = true, .odd_q = true, .odd_out = true},
                 {.run_rows = 9, .shuffle = 86, .sources = 7, .odd_q = true, .odd_keys = true, .odd_out = true}});
  }
}

TEST_P(FoldInvariance, AnyNumberOfThreads) {
  const FoldSpec spec = make_spec(usual_dims(row()).front(), 8, 2, {-1, 0});
  expect_same(inputs_for(spec), {{.threads = 0},
                                 {.threads = 2},
                                 {.threads = 3, .tiles_per_task = 1},
                                 {.threads = 7, .tiles_per_task = 3, .run_rows = 50, .shuffle = 41},
                                 {.threads = 16, .strided = true}});
}

// NaN and ∞ take their own path through a tile: it must be the same for every arrangement too.
TEST_P(FoldInvariance, WithNonFiniteValues) {
  for (const Dims& dims : usual_dims(row())) {
    for (const Mask& mask : kMasks) {
      FoldInputs inputs = inputs_for(make_spec(dims, 4, 2, mask));
      inputs.set_v(600, 0, 3, std::numeric_limits<float>::quiet_NaN());
      inputs.set_v(500, 1, 4, std::numeric_limits<float>::infinity());
      inputs.set_k(450, 1, 4, -std::numeric_limits<float>::infinity());
      inputs.set_q(299, 1, 4, std::numeric_limits<float>::quiet_NaN());
      expect_same(inputs, {{.tiles_per_task = 1}, {.threads = 3, .run_rows = 5, .shuffle = 51, .strided = true}});
    }
  }
}

// A value that a row doesn't see decides which path the tile takes, but no bit of the row. Where rows share query
// tiles, those that fold the value's tile may become NaN, and no others.
TEST_P(FoldInvariance, UnseenNanMovesNoBit) {
  const FoldSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
  FoldInputs inputs = inputs_for(spec);
  const FoldResult clean = fold_with(row(), inputs);
  inputs.set_v(690, 0, 1, std::numeric_limits<float>::quiet_NaN());  // seen from row 290 on
  FoldRunner runner(row(), spec);
  const FoldResult planted = runner.run(inputs);
  const int query_tile = runner.kernel().query_tile();
  const int key_tile = runner.kernel().key_tile();
  std::int64_t untouched = 290;
  while (query_tile > 1 &&
         Visibility(spec.mask, 700).tiles(400 + untouched - 1, {query_tile, key_tile}).end > 690 / key_tile)
    --untouched;
  ASSERT_GT(untouched, 100);
  const std::size_t seen_bytes = static_cast<std::size_t>(untouched * 4 * spec.head_dim_v) * size_of(spec.dtype);
  EXPECT_TRUE(
      std::equal(clean.out.begin(), clean.out.begin() + static_cast<std::ptrdiff_t>(seen_bytes), planted.out.begin()));
  EXPECT_FALSE(clean.same_bits(planted));
}

// What a sequence is packed with, and the queries beside a query, don't matter: chunked prefill is whole prefill.
TEST_P(FoldInvariance, BatchAndChunksMoveNoBit) {
  const FoldSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
  const FoldInputs whole = random_inputs(spec, {{333, 333, 0}}, 61);
  const FoldResult expected = fold_with(row(), whole);

  // The usual head_dim_v is head_dim: rows of out are as long as those of q.
  const std::size_t q_row = static_cast<std::size_t>(4 * spec.head_dim) * size_of(spec.dtype);
  const std::size_t k_row = static_cast<std::size_t>(2 * spec.head_dim) * size_of(spec.dtype);
  FoldResult chunks;
  for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, 1}, {1, 100}, {100, 257}, {257, 333}}) {
    FoldInputs chunk;
    chunk.spec = spec;
    const auto queries = static_cast<std::int64_t>(end - begin);
    // A neighbour in front of the chunk, and only the keys up to its last query.
    const FoldInputs neighbour = random_inputs(spec, {{5, 77, 72}}, 62);
    chunk.sequences = {neighbour.sequences[0],
                       {queries, static_cast<std::int64_t>(end), static_cast<std::int64_t>(begin)}};
    const auto bytes = [](std::size_t count) { return static_cast<std::ptrdiff_t>(count); };
    chunk.q = neighbour.q;
    chunk.q.insert(chunk.q.end(), whole.q.begin() + bytes(begin * q_row), whole.q.begin() + bytes(end * q_row));
    chunk.k = neighbour.k;
    chunk.k.insert(chunk.k.end(), whole.k.begin(), whole.k.begin() + bytes(end * k_row));
    chunk.v = neighbour.v;
    chunk.v.insert(chunk.v.end(), whole.v.begin(), whole.v.begin() + bytes(end * k_row));
    const FoldResult result = fold_with(row(), chunk);
    chunks.out.insert(chunks.out.end(), result.out.begin() + bytes(5 * q_row), result.out.end());
    chunks.lse.insert(chunks.lse.end(), result.lse.begin() + 5 * 4, result.lse.end());
  }
  EXPECT_TRUE(chunks.same_bits(expected));
}

// Scratch keeps what the last fold left there.
TEST_P(FoldInvariance, ScratchLeavesNoTrace) {
  for (const Dims& dims : usual_dims(row())) {
    const FoldSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const FoldInputs clean = inputs_for(spec);
    FoldInputs poison = clean;
    for (std::vector<std::byte>* tensor : {&poison.q, &poison.k, &poison.v}) {
      std::fill(tensor->begin(), tensor->end(), std::byte{0xff});
    }
    FoldRunner runner(row(), spec, 2);
    const FoldResult expected = runner.run(clean);
    runner.run(poison);
    EXPECT_TRUE(runner.run(clean).same_bits(expected)) << describe(spec);
  }
}

RINGATTN_FOR_EVERY_KERNEL(FoldInvariance);

}  // namespace
}  // namespace ringattn::testing
