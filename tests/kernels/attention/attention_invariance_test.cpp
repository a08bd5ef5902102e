// SPDX-License-Identifier: Apache-2.0
// The promise, by memcmp: a row's bits don't depend on how the work is cut, placed, ordered or spread.
#include <fmt/format.h>

#include <limits>

#include "tests/kernels/common/kernel_row_test.hpp"

namespace ringattn::testing {
namespace {

constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {100, 0}, {150, 33}};

std::string to_string(const Arrangement& a) {
  return fmt::format(
      "threads {}, tiles per task {}, run rows {}, shuffle {}, sources {}, strided {}, separate finish {}, odd {}{}{}",
      a.threads, a.tiles_per_task, a.run_rows, a.shuffle, a.sources, a.strided, a.separate_finish, a.odd_q ? "q" : "",
      a.odd_keys ? "k" : "", a.odd_out ? "o" : "");
}

class AttentionInvariance : public KernelRowTest {
 protected:
  // Ragged, with offsets before, at and after the keys; a value of −0 and one that underflows to it.
  AttentionInputs inputs_for(const AttentionSpec& spec) {
    AttentionInputs inputs =
        random_inputs(spec, {{300, 700, 400}, {0, 60, 0}, {130, 257, -9}, {1, 1, 0}, {20, 0, 0}}, 21);
    inputs.set_v(690, 0, 1, -0.0F);
    inputs.set_v(300, 0, 2, -1e-41F);
    return inputs;
  }

  void expect_same(const AttentionInputs& inputs, const std::vector<Arrangement>& arrangements) {
    const AttentionResult expected = attend_with(row(), inputs);
    for (const Arrangement& arrangement : arrangements) {
      ASSERT_TRUE(attend_with(row(), inputs, arrangement).same_bits(expected))
          << describe(inputs.spec) << "; " << to_string(arrangement);
    }
  }
};

TEST_P(AttentionInvariance, ResumesAtEveryTile) {
  for (const Dims& dims : usual_dims(row())) {
    for (const Mask& mask : kMasks) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      expect_same(inputs_for(spec), {{.tiles_per_task = 1},
                                     {.tiles_per_task = 2},
                                     {.tiles_per_task = 5},
                                     {.separate_finish = true},
                                     {.tiles_per_task = 1, .separate_finish = true}});
    }
  }
}

TEST_P(AttentionInvariance, RowsGroupedAndPlacedAnyhow) {
  for (const int kv_heads : {1, 2, 6}) {
    for (const Mask& mask : kMasks) {
      AttentionSpec spec = make_spec(usual_dims(row()).front(), 6, kv_heads, mask);
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
TEST_P(AttentionInvariance, AnyNumberOfSourcesAtAnyAlignment) {
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

TEST_P(AttentionInvariance, AnyNumberOfThreads) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 8, 2, {-1, 0});
  expect_same(inputs_for(spec), {{.threads = 0},
                                 {.threads = 2},
                                 {.threads = 3, .tiles_per_task = 1},
                                 {.threads = 7, .tiles_per_task = 3, .run_rows = 50, .shuffle = 41},
                                 {.threads = 16, .strided = true}});
}

// NaN and ∞ take their own path through a tile: it must be the same for every arrangement too.
TEST_P(AttentionInvariance, WithNonFiniteValues) {
  for (const Dims& dims : usual_dims(row())) {
    for (const Mask& mask : kMasks) {
      AttentionInputs inputs = inputs_for(make_spec(dims, 4, 2, mask));
      inputs.set_v(600, 0, 3, std::numeric_limits<float>::quiet_NaN());
      inputs.set_v(500, 1, 4, std::numeric_limits<float>::infinity());
      inputs.set_k(450, 1, 4, -std::numeric_limits<float>::infinity());
      inputs.set_q(299, 1, 4, std::numeric_limits<float>::quiet_NaN());
      expect_same(inputs, {{.tiles_per_task = 1}, {.threads = 3, .run_rows = 5, .shuffle = 51, .strided = true}});
    }
  }
}

// A value that a row doesn't see decides which path the tile takes, but no bit of the row. Where rows share query
// tiles, those that use the value's tile may become NaN, and no others.
TEST_P(AttentionInvariance, UnseenNanMovesNoBit) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
  AttentionInputs inputs = inputs_for(spec);
  const AttentionResult clean = attend_with(row(), inputs);
  inputs.set_v(690, 0, 1, std::numeric_limits<float>::quiet_NaN());  // seen from row 290 on
  AttentionRunner runner(row(), spec);
  const AttentionResult planted = runner.run(inputs);
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

// A sum that underflows to −0 keeps that sign only until +0 is added. The products of masked keys, which a kernel
// computes for a row's neighbours and skips for a row without neighbours, would be just that.
TEST_P(AttentionInvariance, SignsOfZeroDontTellWhatIsMultiplied) {
  for (const Dims& dims : usual_dims(row())) {
    if (dims.dtype == Dtype::kF16) continue;  // its least values are too large to underflow
    const AttentionSpec spec = make_spec(dims, 1, 1, {-1, 0});
    const int key_tile = AttentionRunner(row(), spec).kernel().key_tile();
    constexpr std::int64_t kRows = 20;
    const std::int64_t keys = 2 * key_tile + 40;
    AttentionInputs together = random_inputs(spec, {{kRows, keys, keys - kRows}}, 65);
    std::fill(together.q.begin(), together.q.end(), std::byte{0});
    std::fill(together.k.begin(), together.k.end(), std::byte{0});
    for (std::int64_t token = 0; token < kRows; ++token) together.set_q(token, 0, 0, 64.0F);
    together.set_k(key_tile, 0, 0, 64.0F);  // outweighs all others by far
    for (std::int64_t key = 0; key < keys; ++key) {
      const float tiny = -1e-39F;
      // Less than nothing in the first tile; then weighed down to −0; then −0 is added; then keys that few rows see.
      together.set_v(key, 0, 3, key < key_tile ? tiny : key < 2 * key_tile ? 0.0F : key < keys - kRows ? tiny : 1.0F);
    }
    // Only the first row: the same keys, of which it sees all but the last ones.
    AttentionInputs alone = together;
    alone.sequences[0].q_len = 1;
    alone.q.resize(alone.q.size() / kRows);
    alone.set_v(keys - kRows, 0, 3, -1e-39F);
    together.set_v(keys - kRows, 0, 3, -1e-39F);
    const AttentionResult expected = attend_with(row(), alone);
    const AttentionResult result = attend_with(row(), together);
    EXPECT_TRUE(std::equal(expected.out.begin(), expected.out.end(), result.out.begin())) << describe(spec);
    EXPECT_EQ(expected.lse[0], result.lse[0]);
    count_check();
  }
}

// What a sequence is packed with, and the queries beside a query, don't matter: chunked prefill is whole prefill.
TEST_P(AttentionInvariance, BatchAndChunksMoveNoBit) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
  const AttentionInputs whole = random_inputs(spec, {{333, 333, 0}}, 61);
  const AttentionResult expected = attend_with(row(), whole);

  // The usual head_dim_v is head_dim: rows of out are as long as those of q.
  const std::size_t q_row = static_cast<std::size_t>(4 * spec.head_dim) * size_of(spec.dtype);
  const std::size_t k_row = static_cast<std::size_t>(2 * spec.head_dim) * size_of(spec.dtype);
  AttentionResult chunks;
  for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, 1}, {1, 100}, {100, 257}, {257, 333}}) {
    AttentionInputs chunk;
    chunk.spec = spec;
    const auto queries = static_cast<std::int64_t>(end - begin);
    // A neighbour before the chunk, and only the keys up to its last query.
    const AttentionInputs neighbour = random_inputs(spec, {{5, 77, 72}}, 62);
    chunk.sequences = {neighbour.sequences[0],
                       {queries, static_cast<std::int64_t>(end), static_cast<std::int64_t>(begin)}};
    const auto bytes = [](std::size_t count) { return static_cast<std::ptrdiff_t>(count); };
    chunk.q = neighbour.q;
    chunk.q.insert(chunk.q.end(), whole.q.begin() + bytes(begin * q_row), whole.q.begin() + bytes(end * q_row));
    chunk.k = neighbour.k;
    chunk.k.insert(chunk.k.end(), whole.k.begin(), whole.k.begin() + bytes(end * k_row));
    chunk.v = neighbour.v;
    chunk.v.insert(chunk.v.end(), whole.v.begin(), whole.v.begin() + bytes(end * k_row));
    const AttentionResult result = attend_with(row(), chunk);
    chunks.out.insert(chunks.out.end(), result.out.begin() + bytes(5 * q_row), result.out.end());
    chunks.lse.insert(chunks.lse.end(), result.lse.begin() + 5 * 4, result.lse.end());
  }
  EXPECT_TRUE(chunks.same_bits(expected));
}

// Scratch keeps what the last run left there.
TEST_P(AttentionInvariance, ScratchLeavesNoTrace) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    const AttentionInputs clean = inputs_for(spec);
    AttentionInputs poison = clean;
    for (std::vector<std::byte>* tensor : {&poison.q, &poison.k, &poison.v}) {
      std::fill(tensor->begin(), tensor->end(), std::byte{0xff});
    }
    AttentionRunner runner(row(), spec, 2);
    const AttentionResult expected = runner.run(clean);
    runner.run(poison);
    EXPECT_TRUE(runner.run(clean).same_bits(expected)) << describe(spec);
  }
}

RINGATTN_FOR_EVERY_KERNEL(AttentionInvariance);

}  // namespace
}  // namespace ringattn::testing
