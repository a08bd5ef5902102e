// SPDX-License-Identifier: Apache-2.0
// NaN and ±∞ planted in q, k and v: where a row sees them, where it doesn't see them but their tile is computed, in the
// last key, in the next sequence, and in the memory after a tile. They come out where the oracle has them and nowhere
// else, and in the same bits however the work is cut.
#include <string>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

constexpr float kPlants[] = {kNan, kInfinity, -kInfinity};

// Tokens of the packed axis. The first sequence has 90 queries at 170 … 259 and 260 keys, so its last key tile is not
// full, and what follows it in memory is the second sequence.
constexpr std::int64_t kInside = 215;   // a key that half of the causal rows see, and the others don't
constexpr std::int64_t kLastKey = 259;  // only the last causal row sees it
constexpr std::int64_t kNextSequence = 260;
constexpr std::int64_t kFirstRow = 0;
constexpr std::int64_t kLastRow = 89;
constexpr std::int64_t kNextSequenceRow = 90;

class AttentionNonFinite : public KernelRowTest {
 protected:
  // Every mask, dtype and value, in every place for which `plant(inputs, value)` has one. With a soft-cap ±∞ is a score
  // of ±softcap.
  template <typename Plant>
  void check_planted(Plant plant) {
    std::vector<Dims> list = usual_dims(row());
    for (const Dims& dims : unequal_dims(row())) list.push_back(dims);
    CaseChoice cases = choose_cases(7);  // of 24 masks, soft-caps and values, all of which it meets
    for (const Dims& dims : list) {
      for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{60, 0}, Mask{50, 20}}) {
        for (const float softcap : {0.0F, 30.0F}) {
          AttentionSpec spec = make_spec(dims, 4, 2, mask);
          spec.softcap = softcap;
          AttentionRunner runner(row(), spec);
          const AttentionInputs clean = random_inputs(spec, {{90, 260, 170}, {20, 140, 120}}, 11);
          for (const float value : kPlants) {
            if (!cases.take()) continue;
            AttentionInputs inputs = clean;
            plant(inputs, value);
            SCOPED_TRACE(describe(spec) + ", planted " + std::to_string(value));
            check(runner, inputs);
          }
        }
      }
    }
  }

  static void check(AttentionRunner& runner, const AttentionInputs& inputs) {
    const AttentionResult result = runner.run(inputs);
    const TileSizes tiles{runner.kernel().query_tile(), runner.kernel().key_tile()};
    // A score of ±∞ towers over all others once it is capped.
    const double slack = inputs.spec.softcap > 0.0F ? slack_of_towering_scores(inputs.spec.dtype) : 0.0;
    ASSERT_EQ(check_accuracy(inputs, result.out, result.lse, tiles, slack), "");
    ASSERT_TRUE(runner.run(inputs, {.tiles_per_task = 1}).same_bits(result));
    ASSERT_TRUE(
        runner.run(inputs, {.tiles_per_task = 2, .run_rows = 23, .shuffle = 5, .strided = true}).same_bits(result));
  }
};

TEST_P(AttentionNonFinite, InQ) {
  check_planted([](AttentionInputs& inputs, float value) {
    inputs.set_q(kFirstRow, 0, 2, value);
    inputs.set_q(kLastRow, 1, 3, value);
    inputs.set_q(77, 3, 5, value);
    inputs.set_q(kNextSequenceRow, 2, 7, value);
  });
}

TEST_P(AttentionNonFinite, InK) {
  check_planted([](AttentionInputs& inputs, float value) {
    inputs.set_k(kInside, 0, 3, value);
    inputs.set_k(kNextSequence, 1, 4, value);  // kv head 1 of the first sequence must stay finite
  });
}

TEST_P(AttentionNonFinite, InTheLastK) {
  check_planted([](AttentionInputs& inputs, float value) {
    inputs.set_k(kLastKey, 1, 5, value);
    inputs.set_k(inputs.k_tokens() - 1, 0, 6, value);
  });
}

TEST_P(AttentionNonFinite, InV) {
  check_planted([](AttentionInputs& inputs, float value) {
    inputs.set_v(kInside, 0, 7, value);
    inputs.set_v(kNextSequence, 1, 8, value);
  });
}

TEST_P(AttentionNonFinite, InTheLastV) {
  check_planted([](AttentionInputs& inputs, float value) {
    inputs.set_v(kLastKey, 1, 9, value);
    inputs.set_v(inputs.k_tokens() - 1, 0, 10, value);
  });
}

// ∞ and −∞ in one column, and ∞ − ∞ within a score.
TEST_P(AttentionNonFinite, OfBothSigns) {
  check_planted([](AttentionInputs& inputs, float value) {
    inputs.set_v(180, 0, 1, value);
    inputs.set_v(230, 0, 1, -value);
    inputs.set_k(200, 1, 3, value);
    inputs.set_k(200, 1, 4, -value);
    inputs.set_k(201, 1, 4, -value);
  });
}

// Memory after a tile's last key belongs to no tile: bits are those of a run without it.
TEST_P(AttentionNonFinite, BehindTheKeys) {
  for (const Dims& dims : varied_dims(row())) {
    for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{50, 20}}) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      AttentionRunner runner(row(), spec);
      const AttentionInputs inputs = random_inputs(spec, {{90, 260, 170}, {20, 1, 0}, {5, 140, 135}}, 11);
      const AttentionResult clean = runner.run(inputs);
      for (const float value : kPlants) {
        ASSERT_TRUE(runner.run(inputs, {.shuffle = 6, .behind = value}).same_bits(clean)) << describe(spec) << value;
      }
    }
  }
}

// ∞ in V keeps its place even where its weight is far below the least fp32 number. Where weights are rounded to 16 bits
// they are 0 there, and 0 · ∞ is NaN: not finite either.
TEST_P(AttentionNonFinite, OfNegligibleWeight) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 1, 1, {-1, -1});
    AttentionInputs inputs = random_inputs(spec, {{4, 300, 0}}, 14);
    for (std::int64_t token = 0; token < 4; ++token) inputs.set_q(token, 0, 0, 40.0F);
    for (const std::int64_t dominant : {std::int64_t{0}, std::int64_t{290}}) {
      AttentionInputs planted = inputs;
      planted.set_k(dominant, 0, 0, 400.0F);
      planted.set_v(150, 0, 3, kInfinity);
      AttentionRunner runner(row(), spec);
      SCOPED_TRACE(describe(spec));
      check(runner, planted);
    }
  }
}

// All that a kernel is compiled for: q in one sequence, K, V and a sink beside it.
TEST_P(AttentionNonFinite, InEveryHeadDim) {
  CaseChoice cases = choose_cases(2);
  for (const Dims& dims : all_dims(row())) {
    for (const float value : kPlants) {
      if (!cases.take()) continue;
      AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
      spec.sinks = true;
      AttentionRunner runner(row(), spec);
      AttentionInputs inputs = random_inputs(spec, {{90, 260, 170}, {20, 140, 120}}, 15);
      inputs.set_q(kLastRow, 1, dims.head_dim - 1, value);
      inputs.set_q(kNextSequenceRow, 2, 0, value);
      inputs.set_k(kInside, 0, dims.head_dim - 1, value);
      inputs.set_v(kLastKey, 1, dims.head_dim_v - 1, value);
      inputs.sinks = {0.5F, value, -kInfinity, 1.0F};
      SCOPED_TRACE(describe(spec) + ", planted " + std::to_string(value));
      check(runner, inputs);
    }
  }
}

RINGATTN_FOR_EVERY_KERNEL(AttentionNonFinite);

}  // namespace
}  // namespace ringattn::testing
