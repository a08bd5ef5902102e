// SPDX-License-Identifier: Apache-2.0
// Rows over many key tiles: scores that grow beyond any reference chosen early, and sums that a kernel closes and opens
// again on the way. Against the oracle, and, by memcmp, with the state saved and resumed in between.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <span>

#include "tests/kernels/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"

namespace ringattn::testing {
namespace {

struct Dims {
  Dtype dtype;
  int head_dim;
  int head_dim_v;
};

// Calls check(spec) for those that the row can do.
template <typename Check>
void for_dims(const FoldRow& row, std::span<const Dims> list, Check check) {
  for (const Dims& dims : list) {
    FoldSpec spec = make_spec(dims.dtype, 2, 1, dims.head_dim, {-1, 0}, dims.head_dim_v);
    if (!cannot_run(row, spec).empty()) continue;
    SCOPED_TRACE(describe(spec));
    check(spec);
  }
}

class FoldGrowth : public KernelRowTest {
 protected:
  static constexpr std::int64_t kRows = 24;  // of two query tiles
  static constexpr std::int64_t kKeys = 1300;
  static constexpr std::int64_t kOffset = 1270;
  static constexpr std::int64_t kLevel = 64;  // keys of one score

  // direction(row, head) 1: the row's scores are 0, step, 2 · step, … for 64 keys each; −1: they fall likewise; 0: they
  // are random, and stay.
  template <typename Direction>
  void check(Direction direction) {
    constexpr Dims kDims[] = {{Dtype::kF32, 64, 64},    {Dtype::kBf16, 64, 64}, {Dtype::kBf16, 128, 128},
                              {Dtype::kBf16, 256, 256}, {Dtype::kF16, 64, 64},  {Dtype::kF16, 192, 128}};
    for_dims(row(), kDims, [&](FoldSpec spec) {
      spec.softmax_scale = 0.125F;
      // Of two levels, and so of a tile of 128 keys, in powers of two: 11, 46 and 185.
      for (const float step : {4.0F, 16.0F, 64.0F}) {
        SCOPED_TRACE(step);
        FoldInputs inputs = random_inputs(spec, {{kRows, kKeys, kOffset}}, 41);
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
        FoldRunner runner(row(), spec);
        const FoldResult whole = runner.run(inputs);
        expect_close(inputs, whole);
        for (const std::int64_t tiles : {1, 3, 5}) {
          ASSERT_TRUE(runner.run(inputs, {.tiles_per_task = tiles}).same_bits(whole)) << tiles << " tiles a task";
        }
      }
    });
  }

  // Where many keys have the same score, the straightforward computation's weights are exact and those of a kernel with
  // another reference are all rounded alike. So: O within the rounding of weights and of O itself, and what a score of
  // 1,300 leaves to a weight in fp32, each relative to Σ w |v|.
  static void expect_close(const FoldInputs& inputs, const FoldResult& result) {
    constexpr double kScores = 0x1p-11;
    const Dtype dtype = inputs.spec.dtype;
    const double rounding = dtype == Dtype::kBf16 ? 0x1p-8 : dtype == Dtype::kF16 ? 0x1p-11 : 0.0;
    const Numbers oracle = oracle_numbers(inputs);
    FoldInputs positive = inputs;
    for (std::size_t at = 0; at < inputs.v.size(); at += size_of(dtype)) {
      store_element(positive.v.data() + at, dtype, std::abs(load_element(inputs.v.data() + at, dtype)));
    }
    const Numbers magnitudes = oracle_numbers(positive);
    for (std::size_t i = 0; i < oracle.out.size(); ++i) {
      const double value = load_element(result.out.data() + i * size_of(dtype), dtype);
      ASSERT_NEAR(value, oracle.out[i], (2.0 * rounding + kScores) * magnitudes.out[i]) << i;
    }
    for (std::size_t i = 0; i < oracle.lse.size(); ++i) {
      ASSERT_NEAR(result.lse[i], oracle.lse[i], std::max(kLseAbsoluteSixteenBit, kLseUlps * std::abs(oracle.lse[i])))
          << i;
    }
  }
};

TEST_P(FoldGrowth, InEveryRow) {
  check([](std::int64_t, int) { return 1; });
}

TEST_P(FoldGrowth, InOneRowAmongOthersThatStay) {
  check([](std::int64_t token, int head) { return token == 13 && head == 1 ? 1 : 0; });
}

TEST_P(FoldGrowth, BesideRowsThatFall) {
  check([](std::int64_t token, int head) { return static_cast<int>((token + head) % 3) - 1; });
}

RINGATTN_FOR_EVERY_KERNEL(FoldGrowth);

class FoldLong : public KernelRowTest {
 protected:
  // Sums of sm90_fold hold 64 tiles; no kernel's should show where they begin.
  static constexpr std::int64_t kTiles = 131;
  static constexpr std::int64_t kSum = 64;

  void check(const Dims& dims) {
    for_dims(row(), {&dims, 1}, [&](FoldSpec spec) {
      if (spec.head_dim > 128) spec.heads = 1;  // the oracle is slow
      const int key_tile = FoldRunner(row(), spec).kernel().key_tile();
      const std::int64_t keys = kTiles * key_tile + 5;
      // Rows at the end of all, and rows of which some end with a sum and some just behind it.
      FoldInputs inputs =
          random_inputs(spec, {{3, keys, keys - 3}, {4, (kSum + 2) * key_tile, kSum * key_tile - 2}}, 42);
      expect_right_in_any_cut(inputs, {kSum - 1, kSum, kSum + 1, 2 * kSum, 2 * kSum + 1});
      // A window that begins inside of a sum.
      inputs.spec.mask = {100 * key_tile + 17, 0};
      expect_right_in_any_cut(inputs, {kSum - 1, kSum, 2 * kSum + 1});
    });
  }

  void expect_right_in_any_cut(const FoldInputs& inputs, std::initializer_list<std::int64_t> cuts) {
    FoldRunner runner(row(), inputs.spec);
    const FoldResult whole = runner.run(inputs);
    ASSERT_EQ(check_accuracy(inputs, whole.out, whole.lse), "");
    for (const std::int64_t tiles : cuts) {
      ASSERT_TRUE(runner.run(inputs, {.tiles_per_task = tiles}).same_bits(whole)) << tiles << " tiles a task";
    }
    ASSERT_TRUE(runner.run(inputs, {.keep_state = true}).same_bits(whole));
    ASSERT_TRUE(runner.run(inputs, {.tiles_per_task = kSum + 1, .keep_state = true}).same_bits(whole));
  }
};

TEST_P(FoldLong, SumsOfManyTilesFp32) { check({Dtype::kF32, 64, 64}); }
TEST_P(FoldLong, SumsOfManyTilesBf16) { check({Dtype::kBf16, 64, 64}); }
TEST_P(FoldLong, SumsOfManyTilesFp16) { check({Dtype::kF16, 64, 64}); }
TEST_P(FoldLong, SumsOfManyTilesHeadDim96) { check({Dtype::kBf16, 96, 96}); }
TEST_P(FoldLong, SumsOfManyTilesHeadDim128) { check({Dtype::kBf16, 128, 128}); }
TEST_P(FoldLong, SumsOfManyTilesHeadDim192) { check({Dtype::kF16, 192, 128}); }
TEST_P(FoldLong, SumsOfManyTilesHeadDim256) { check({Dtype::kBf16, 256, 256}); }

RINGATTN_FOR_EVERY_KERNEL(FoldLong);

}  // namespace
}  // namespace ringattn::testing
