// SPDX-License-Identifier: Apache-2.0
// Rows over many key tiles: scores that grow beyond any softmax_offset chosen early, and KV splits that a kernel
// closes and opens again on the way. Against the oracle, and, by memcmp, with the state saved and resumed in between.
#include <algorithm>
#include <initializer_list>
#include <optional>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"

namespace ringattn::testing {
namespace {

class AttentionScoreGrowth : public KernelRowTest {
 protected:
  static constexpr std::int64_t kRows = 24;  // of two query tiles
  static constexpr std::int64_t kKeys = 1300;
  static constexpr std::int64_t kOffset = 1270;
  static constexpr std::int64_t kLevel = 64;  // keys of one score

  // Where many keys have the same score, the same-precision reference's weights are exact and those of a kernel with
  // another reference are all rounded alike: so the check goes by weights.
  //
  // direction(row, head) 1: the row's scores are 0, step, 2 · step, … for 64 keys each; −1: they fall likewise; 0: they
  // are random, and stay.
  template <typename Direction>
  void check(Direction direction) {
    CaseChoice cases = choose_cases(2);
    for (const Dims& dims : varied_dims(row())) {
      AttentionSpec spec = make_spec(dims, 2, 1, {-1, 0});
      SCOPED_TRACE(describe(spec));
      spec.softmax_scale = 0.125F;
      // Scores rise by these steps per level. A tile of 128 keys has two levels: 11, 46 and 185 in powers of two.
      for (const float step : {4.0F, 16.0F, 64.0F}) {
        if (!cases.take()) continue;
        SCOPED_TRACE(step);
        AttentionInputs inputs = random_inputs(spec, {{kRows, kKeys, kOffset}}, 41);
        for (std::int64_t key = 0; key < kKeys; ++key) {
          inputs.set_k(key, 0, 0, step * static_cast<float>(key / kLevel));
        }
        for (std::int64_t token = 0; token < kRows; ++token) {
          for (int head = 0; head < spec.heads; ++head) {
            const int sign = direction(token, head);
            for (int dim = 1; dim < spec.head_dim && sign != 0; ++dim) inputs.set_q(token, head, dim, 0.0F);
            inputs.set_q(token, head, 0, 8.0F * static_cast<float>(sign));
          }
        }
        AttentionRunner runner(row(), spec);
        const AttentionResult whole = runner.run(inputs);
        // What a score of 1,300 leaves to a weight in fp32.
        ASSERT_EQ(check_weights(inputs, whole.out, whole.lse, 0x1p-11), "");
        for (const std::int64_t tiles : {1, 3, 5}) {
          ASSERT_TRUE(runner.run(inputs, {.tiles_per_task = tiles}).same_bits(whole)) << tiles << " tiles a task";
        }
      }
    }
  }
};

TEST_P(AttentionScoreGrowth, InEveryRow) {
  check([](std::int64_t, int) { return 1; });
}

TEST_P(AttentionScoreGrowth, InOneRowAmongOthersThatStay) {
  check([](std::int64_t token, int head) { return token == 13 && head == 1 ? 1 : 0; });
}

TEST_P(AttentionScoreGrowth, BesideRowsThatFall) {
  check([](std::int64_t token, int head) { return static_cast<int>((token + head) % 3) - 1; });
}

RINGATTN_FOR_EVERY_KERNEL(AttentionScoreGrowth);

class AttentionLong : public KernelRowTest {
 protected:
  // Two KV splits and the beginning of a third: no result shows where a split begins.
  static constexpr std::int64_t kTiles = 2 * kTilesPerKvSplit + 3;

  void check(const std::optional<Dims>& dims) {
    if (!dims) GTEST_SKIP() << row().name << " has no kernel for the dtype";
    AttentionSpec spec = make_spec(*dims, dims->head_dim > 128 ? 1 : 2, 1, {-1, 0});  // the oracle is slow
    SCOPED_TRACE(describe(spec));
    const int key_tile = AttentionRunner(row(), spec).kernel().key_tile();
    const std::int64_t keys = kTiles * key_tile + 5;
    // Rows at the end of all keys, and rows of which some end with a KV split and some just after it.
    AttentionInputs inputs = random_inputs(
        spec, {{3, keys, keys - 3}, {4, (kTilesPerKvSplit + 2) * key_tile, kTilesPerKvSplit * key_tile - 2}}, 42);
    expect_right_in_any_cut(inputs, {kTilesPerKvSplit - 1, kTilesPerKvSplit, kTilesPerKvSplit + 1, 2 * kTilesPerKvSplit,
                                     2 * kTilesPerKvSplit + 1});
    // A window that begins inside a KV split.
    inputs.spec.mask = {100 * key_tile + 17, 0};
    expect_right_in_any_cut(inputs, {kTilesPerKvSplit - 1, kTilesPerKvSplit, 2 * kTilesPerKvSplit + 1});
  }

  void expect_right_in_any_cut(const AttentionInputs& inputs, std::initializer_list<std::int64_t> cuts) {
    AttentionRunner runner(row(), inputs.spec);
    const AttentionResult whole = runner.run(inputs);
    ASSERT_EQ(check_accuracy(inputs, whole.out, whole.lse), "");
    for (const std::int64_t tiles : cuts) {
      ASSERT_TRUE(runner.run(inputs, {.tiles_per_task = tiles}).same_bits(whole)) << tiles << " tiles a task";
    }
    ASSERT_TRUE(runner.run(inputs, {.keep_state = true}).same_bits(whole));
    ASSERT_TRUE(runner.run(inputs, {.tiles_per_task = kTilesPerKvSplit + 1, .keep_state = true}).same_bits(whole));
  }
};

TEST_P(AttentionLong, SumsOfManyTilesFp32) { check(usual_dims(row(), Dtype::kF32)); }
TEST_P(AttentionLong, SumsOfManyTilesBf16) { check(usual_dims(row(), Dtype::kBf16)); }
TEST_P(AttentionLong, SumsOfManyTilesFp16) { check(usual_dims(row(), Dtype::kF16)); }

TEST_P(AttentionLong, SumsOfManyTilesInOtherDims) {
  const std::vector<Dims> usual = usual_dims(row());
  for (const Dims& dims : varied_dims(row())) {
    if (std::find(usual.begin(), usual.end(), dims) == usual.end()) check(dims);
  }
}

RINGATTN_FOR_EVERY_KERNEL(AttentionLong);

}  // namespace
}  // namespace ringattn::testing
