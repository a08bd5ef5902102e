// SPDX-License-Identifier: Apache-2.0
// Keys at positions of their own, as in a cache with evicted tokens: with all keys at their indices they give the
// bits of attention without positions; others give the same bits however the work is arranged, and are as accurate as
// attention.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/random_key_positions.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = 4;
constexpr int kKvHeads = 2;

void set_positions(AttentionInputs& inputs, std::shared_ptr<const KeyPositions> positions) {
  inputs.spec.positions = positions == nullptr ? 0 : positions->heads();
  inputs.positions = std::move(positions);
}

std::vector<std::int64_t> keys_of(const AttentionInputs& inputs) {
  std::vector<std::int64_t> keys;
  for (const SequenceShape& shape : inputs.sequences) keys.push_back(shape.k_len);
  return keys;
}

// Key i stands at position i.
std::shared_ptr<const KeyPositions> all_tokens(const AttentionInputs& inputs, int heads) {
  std::vector<KeptSequence> sequences;
  std::vector<std::int32_t> rows;
  for (const std::int64_t keys : keys_of(inputs)) {
    sequences.push_back({keys, keys});
    for (std::int64_t key = 0; key < keys; ++key) rows.insert(rows.end(), heads, static_cast<std::int32_t>(key));
  }
  return std::make_shared<const KeyPositions>("positions", heads, std::move(sequences), rows);
}

class AttentionPositions : public KernelRowTest {
 protected:
  void SetUp() override {
    KernelRowTest::SetUp();
    if (IsSkipped()) return;
    if (known(usual_dims(row())).empty()) GTEST_SKIP() << row().name << " has no kernel for positions of keys";
  }

  // Dims for which the kernel supports positions.
  std::vector<Dims> known(const std::vector<Dims>& dims) const {
    std::vector<Dims> known;
    for (const Dims& one : dims) {
      AttentionSpec spec = make_spec(one, kHeads, kKvHeads, {-1, 0});
      spec.positions = kKvHeads;
      if (row().missing(spec).empty()) known.push_back(one);
    }
    return known;
  }
  AttentionResult attend(const AttentionInputs& inputs, const Arrangement& arrangement = {}) {
    return attend_with(row(), inputs, arrangement);
  }
  TileSizes tiles_of(const AttentionSpec& spec) {
    AttentionRunner runner(row(), spec);
    return {runner.kernel().query_tile(), runner.kernel().key_tile()};
  }
  void expect_accurate(const AttentionInputs& inputs, const AttentionResult& result) {
    EXPECT_EQ(check_accuracy(inputs, result.out, result.lse, tiles_of(inputs.spec)), "") << describe(inputs.spec);
  }
};

// Some queries stand before all keys, some after, most between keys that are there and some that are not.
const std::vector<SequenceShape> kRagged = {{300, 300, 100}, {1, 1, 0},    {0, 0, 0},    {170, 700, 630},
                                            {90, 40, 13},    {64, 0, 0},   {17, 5, -12}, {129, 256, 100},
                                            {5, 128, 255},   {40, 17, -20}};
constexpr Mask kMasks[] = {{-1, 0}, {150, 0}, {100, 90}, {-1, 70}, {0, 0}, {40, -1}};

TEST_P(AttentionPositions, OfAllTokensAreAttentionWithoutPositions) {
  std::size_t turn = 0;
  CaseChoice cases = choose_cases(5);
  for (const Dims& dims : known(varied_dims(row()))) {
    for (const Mask& mask : kMasks) {
      if (!cases.take()) continue;
      AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, mask);
      spec.sinks = mask.left >= 0;
      AttentionInputs inputs = random_inputs(spec, kRagged, 11);
      const AttentionResult plain = attend(inputs, {.export_state = true});
      set_positions(inputs, all_tokens(inputs, turn++ % 2 == 0 ? 1 : kKvHeads));
      EXPECT_TRUE(attend(inputs, {.export_state = true}).same_bits(plain)) << describe(inputs.spec);
      EXPECT_TRUE(
          attend(inputs, {.tiles_per_task = 2, .run_rows = 37, .shuffle = 3, .export_state = true}).same_bits(plain))
          << describe(inputs.spec);
    }
  }
}

TEST_P(AttentionPositions, OfAllTokensOverSeveralKvSplitsAreAttentionWithoutPositions) {
  for (const Dims& dims : known(usual_dims(row()))) {
    const std::int64_t group = std::int64_t{kTilesPerKvSplit} * tiles_of(make_spec(dims, kHeads, kKvHeads, {})).key;
    for (const Mask& mask : {Mask{-1, 0}, Mask{group + group / 3, 0}}) {
      const AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, mask);
      AttentionInputs inputs = random_inputs(spec, {{5, 2 * group + 70, 2 * group + 60}, {3, group, group - 3}}, 12);
      const AttentionResult plain = attend(inputs, {.export_state = true});
      for (const int heads : {1, kKvHeads}) {
        set_positions(inputs, all_tokens(inputs, heads));
        for (const std::int64_t tiles : {0, 64, 23}) {
          EXPECT_TRUE(attend(inputs, {.tiles_per_task = tiles, .export_state = true}).same_bits(plain))
              << describe(inputs.spec) << ", " << tiles << " tiles a task";
        }
      }
    }
  }
}

TEST_P(AttentionPositions, GiveTheSameBitsInAnyArrangement) {
  std::size_t turn = 0;
  CaseChoice cases = choose_cases(7);
  for (const Dims& dims : known(varied_dims(row()))) {
    for (const Mask& mask : kMasks) {
      if (!cases.take()) continue;
      AttentionSpec spec = make_spec(dims, kHeads, kKvHeads, mask);
      spec.softcap = mask.right > 0 ? 20.0F : 0.0F;
      spec.sinks = mask.left >= 0;
      AttentionInputs inputs = random_inputs(spec, kRagged, 13);
      ++turn;
      set_positions(inputs, random_positions(keys_of(inputs), turn % 2 == 0 ? 1 : kKvHeads, turn));
      const AttentionResult expected = attend(inputs);
      expect_accurate(inputs, expected);
      for (const Arrangement& arrangement :
           {Arrangement{.tiles_per_task = 1},
            {.tiles_per_task = 2, .run_rows = 19, .shuffle = 34},
            {.threads = 3, .run_rows = 64, .shuffle = 33, .strided = true},
            {.tiles_per_task = 3, .shuffle = 83, .sources = 40},
            {.threads = 2, .separate_finish = true, .keep_state = true},
            {.tiles_per_task = 2, .shuffle = 84, .sources = 4, .odd_q = true, .odd_keys = true}}) {
        EXPECT_TRUE(attend(inputs, arrangement).same_bits(expected))
            << describe(inputs.spec) << ", tiles per task " << arrangement.tiles_per_task << ", shuffle "
            << arrangement.shuffle;
      }
      Arrangement paged{.tiles_per_task = 3};
      paged.pages = {16, turn % 2 == 0, turn + 7};
      EXPECT_TRUE(attend(inputs, paged).same_bits(expected)) << describe(inputs.spec) << ", in pages";
    }
  }
}

TEST_P(AttentionPositions, OverSeveralKvSplitsAreAccurate) {
  const Dims dims = known(usual_dims(row())).front();
  const std::int64_t group = std::int64_t{kTilesPerKvSplit} * tiles_of(make_spec(dims, kHeads, kKvHeads, {})).key;
  const std::int64_t keys = 3 * group + 77;
  for (const Mask& mask : {Mask{-1, 0}, Mask{2 * group + 500, 0}}) {
    for (const int heads : {1, kKvHeads}) {
      AttentionInputs inputs =
          random_inputs(make_spec(dims, kHeads, kKvHeads, mask), {{4, keys, 2 * keys - 900}, {3, keys, keys}}, 15);
      set_positions(inputs, random_positions(keys_of(inputs), heads, 16));
      const AttentionResult expected = attend(inputs);
      expect_accurate(inputs, expected);
      for (const std::int64_t tiles : {64, 17, 1}) {
        EXPECT_TRUE(attend(inputs, {.tiles_per_task = tiles}).same_bits(expected)) << tiles;
      }
      for (const std::uint64_t apart : {2, 3}) {
        EXPECT_TRUE(attend(inputs, {.tiles_per_task = 20, .apart = apart}).same_bits(expected)) << apart;
      }
    }
  }
}

// A prompt over a cache that is there already, in pieces.
TEST_P(AttentionPositions, OfChunksAreThoseOfTheWhole) {
  const Dims dims = known(usual_dims(row())).front();
  for (const Mask& mask : {Mask{-1, 0}, Mask{70, 0}}) {
    AttentionInputs whole = random_inputs(make_spec(dims, kHeads, kKvHeads, mask), {{444, 444, 300}}, 18);
    set_positions(whole, random_positions(keys_of(whole), kKvHeads, 19));
    const AttentionResult expected = attend(whole);
    AttentionResult chunks;
    for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 130}, {130, 257}, {257, 444}}) {
      AttentionInputs chunk = whole;
      chunk.sequences = {{end - begin, 444, 300 + begin}};
      const auto row = static_cast<std::ptrdiff_t>(whole.q.size() / 444);
      chunk.q.assign(whole.q.begin() + begin * row, whole.q.begin() + end * row);
      const AttentionResult result = attend(chunk);
      chunks.out.insert(chunks.out.end(), result.out.begin(), result.out.end());
      chunks.lse.insert(chunks.lse.end(), result.lse.begin(), result.lse.end());
    }
    EXPECT_TRUE(chunks.same_bits(expected)) << describe(whole.spec);
  }
}

// Positions as far as their type goes, and queries beyond.
TEST_P(AttentionPositions, MayBeTheGreatest) {
  const Dims dims = known(usual_dims(row())).front();
  constexpr std::int64_t kLast = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> rows(200);
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<std::int32_t>(kLast - 3 * (199 - static_cast<std::int64_t>(i)));
  rows.front() = 0;
  for (const Mask& mask : {Mask{-1, 0}, Mask{90, 0}, Mask{10, 30}, Mask{0, 0}, Mask{-1, 5}, Mask{5, -1}}) {
    for (const std::int64_t offset : {std::int64_t{0}, kLast - 20, kLast + 1, 2 * kLast}) {
      AttentionInputs inputs = random_inputs(make_spec(dims, kHeads, kKvHeads, mask), {{40, 200, offset}}, 20);
      set_positions(inputs, std::make_shared<const KeyPositions>("positions", 1,
                                                                 std::vector<KeptSequence>{{200, kLast + 1}}, rows));
      expect_accurate(inputs, attend(inputs));
    }
  }
}

// NaN stays with the rows that see it; the others of its tile, on kernels whose rows share tiles, have it in its
// column.
TEST_P(AttentionPositions, KeepNaNWhereItIs) {
  const Dims dims = known(usual_dims(row())).front();
  for (const Mask& mask : {Mask{-1, 0}, Mask{60, 0}}) {
    AttentionInputs inputs = random_inputs(make_spec(dims, kHeads, kKvHeads, mask), {{500, 400, 100}}, 21);
    set_positions(inputs, random_positions(keys_of(inputs), kKvHeads, 22));
    inputs.set_v(170, 1, 3, kNan);
    inputs.set_v(399, 0, 0, std::numeric_limits<float>::infinity());
    expect_accurate(inputs, attend(inputs));
  }
}

TEST_P(AttentionPositions, ThatDontFitAreRefused) {
  const Dims dims = known(usual_dims(row())).front();
  AttentionInputs inputs = random_inputs(make_spec(dims, kHeads, kKvHeads, {-1, 0}), {{50, 90, 40}}, 23);
  set_positions(inputs, random_positions(keys_of(inputs), 1, 24));
  AttentionRunner runner(row(), inputs.spec);
  AttentionInputs none = inputs;
  none.positions = nullptr;
  EXPECT_THROW(runner.run(none), Error);
  AttentionInputs others = inputs;
  others.positions = random_positions(std::array<std::int64_t, 1>{80}, 1, 24);
  EXPECT_THROW(runner.run(others), Error);
  AttentionInputs of_heads = inputs;
  of_heads.positions = random_positions(keys_of(inputs), kKvHeads, 24);
  EXPECT_THROW(runner.run(of_heads), Error);
  EXPECT_TRUE(runner.run(inputs).same_bits(attend(inputs)));
}

RINGATTN_FOR_EVERY_KERNEL(AttentionPositions);

}  // namespace
}  // namespace ringattn::testing
