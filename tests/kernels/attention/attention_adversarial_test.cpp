// SPDX-License-Identifier: Apache-2.0
// Finite data that breaks careless kernels: huge logits, outliers, a dominant first token; and rows that have nothing
// to weigh, or an infinite sink. What is not finite in q, k and v has a file of its own.
#include <algorithm>
#include <array>
#include <string>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

class AttentionAdversarial : public KernelRowTest {
 protected:
  // Against the oracle, and the same bits cut into tasks.
  void check(const AttentionInputs& inputs, const char* what) {
    SCOPED_TRACE(std::string(what) + ": " + describe(inputs.spec));
    AttentionRunner runner(row(), inputs.spec);
    const AttentionResult result = runner.run(inputs);
    const TileSizes tiles{runner.kernel().query_tile(), runner.kernel().key_tile()};
    EXPECT_EQ(check_accuracy(inputs, result.out, result.lse, tiles), "");
    expect_same_in_tasks(inputs, result);
  }

  void expect_same_in_tasks(const AttentionInputs& inputs, const AttentionResult& whole) {
    EXPECT_TRUE(attend_with(row(), inputs, {.tiles_per_task = 1}).same_bits(whole));
    EXPECT_TRUE(attend_with(row(), inputs, {.run_rows = 13, .shuffle = 19, .keep_state = true}).same_bits(whole));
  }
};

// A row whose every score is −∞ has nothing to weigh.
TEST_P(AttentionAdversarial, EveryScoreMinusInfinity) {
  for (const Dims& dims : usual_dims(row())) {
    for (const bool sinks : {false, true}) {
      for (const Mask& mask : {Mask{-1, 0}, Mask{30, 10}, Mask{-1, -1}}) {
        AttentionSpec spec = make_spec(dims, 2, 1, mask);
        spec.sinks = sinks;
        AttentionInputs inputs = random_inputs(spec, {{150, 150, 0}}, 12);
        const std::int64_t seen = mask.is_full() ? 150 : 140;  // under the others the last rows see finite scores
        for (std::int64_t key = 0; key < seen; ++key) inputs.set_k(key, 0, 0, -kInfinity);
        for (std::int64_t token = 0; token < 150; ++token) {
          for (int head = 0; head < 2; ++head) inputs.set_q(token, head, 0, 1.0F);
        }
        check(inputs, "all scores −∞");
      }
    }
  }
}

// Scores of −∞ in the first tiles, or in those between others, weigh nothing and move no reference.
TEST_P(AttentionAdversarial, TilesOfMinusInfinity) {
  for (const Dims& dims : usual_dims(row())) {
    const int key_tile = AttentionRunner(row(), make_spec(dims, 2, 1, {-1, 0})).kernel().key_tile();
    for (const std::int64_t first : {0, 1}) {
      AttentionInputs inputs =
          random_inputs(make_spec(dims, 2, 1, {-1, 0}), {{40, 4 * key_tile, 4 * key_tile - 40}}, 20);
      for (std::int64_t key = first * key_tile; key < (first + 2) * key_tile; ++key) {
        inputs.set_k(key, 0, 0, -kInfinity);
      }
      for (std::int64_t token = 0; token < 40; ++token) {
        for (int head = 0; head < 2; ++head) inputs.set_q(token, head, 0, 1.0F);
      }
      check(inputs, "tiles of −∞");
    }
  }
}

TEST_P(AttentionAdversarial, SinksThatAreNotFinite) {
  for (const Dims& dims : usual_dims(row())) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{20, 0}, Mask{-1, -1}}) {
      AttentionSpec spec = make_spec(dims, 4, 2, mask);
      spec.sinks = true;
      AttentionInputs inputs = random_inputs(spec, {{140, 130, -10}, {3, 0, 0}}, 13);  // some rows see no key
      for (std::int64_t key = 0; key < 130; ++key) {
        inputs.set_k(key, 1, 0, -kInfinity);  // rows of heads 2 and 3 whose q is positive there have no weight at all
      }
      inputs.sinks = {kInfinity, -kInfinity, -kInfinity, kNan};
      check(inputs, "sinks");
      inputs.sinks = {kNan, 200.0F, kInfinity, -200.0F};
      check(inputs, "sinks");
    }
  }
}

// Exact scores about ±10⁴, whose tiles rise and fall by 2 · 10⁴.
TEST_P(AttentionAdversarial, LogitsOfPlusAndMinusTenThousand) {
  constexpr std::int64_t kKeys = 480;
  constexpr float kLevel = 312.0F;  // times 32: 9,984
  CaseChoice cases = choose_cases(3);
  for (const Dims& dims : usual_dims(row())) {
    AttentionSpec spec = make_spec(dims, 2, 1, {-1, 0});
    spec.softmax_scale = 1.0F;
    // The sign of each 160 keys' scores: more than a tile of any kernel, and no multiple of one.
    for (const auto& signs : {std::array{1, 1, 1}, {-1, -1, -1}, {-1, 1, -1}, {1, -1, 1}}) {
      if (!cases.take()) continue;
      AttentionInputs inputs = random_inputs(spec, {{kKeys, kKeys, 0}}, 15);
      std::fill(inputs.q.begin(), inputs.q.end(), std::byte{0});
      for (std::int64_t token = 0; token < kKeys; ++token) {
        for (int head = 0; head < 2; ++head) {
          inputs.set_q(token, head, 0, 32.0F);
          inputs.set_q(token, head, 1, 1.0F);
        }
        const int sign = signs[static_cast<std::size_t>(token / 160)];
        inputs.set_k(token, 0, 0, static_cast<float>(sign) * kLevel);
        inputs.set_k(token, 0, 1, static_cast<float>(token * 7 % 33 - 16) / 8.0F);
      }
      AttentionRunner runner(row(), spec);
      const AttentionResult result = runner.run(inputs);
      // A product of 10⁴ and log2(e), and its softmax_offset, round to 2^−11 each.
      EXPECT_EQ(check_weights(inputs, result.out, result.lse, 0x1p-9), "") << describe(spec) << ", " << signs[0];
      expect_same_in_tasks(inputs, result);
    }
  }
}

TEST_P(AttentionAdversarial, LogitsOfTenThousand) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    AttentionInputs inputs = random_inputs(spec, {{300, 300, 0}}, 15);
    for (std::size_t at = 0; at < inputs.q.size(); at += size_of(dims.dtype)) {
      const float value = load_element(inputs.q.data() + at, dims.dtype);
      store_element(inputs.q.data() + at, dims.dtype, 3000.0F * value);
    }
    check(inputs, "logits of 1e4");
  }
}

TEST_P(AttentionAdversarial, OutlierChannels) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    AttentionInputs inputs = random_inputs(spec, {{300, 300, 0}}, 16);
    for (std::int64_t token = 0; token < 300; ++token) {
      for (int head = 0; head < 2; ++head) {
        inputs.set_k(token, head, 9 % dims.head_dim, 80.0F + static_cast<float>(token % 3));
        inputs.set_v(token, head, 17 % dims.head_dim_v, 1000.0F);
      }
    }
    check(inputs, "outlier channels");
  }
}

TEST_P(AttentionAdversarial, DominantFirstToken) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    AttentionInputs inputs = random_inputs(spec, {{300, 300, 0}}, 17);
    for (std::int64_t token = 0; token < 300; ++token) {
      for (int head = 0; head < 4; ++head) inputs.set_q(token, head, 0, 4.0F);
    }
    for (int head = 0; head < 2; ++head) {
      inputs.set_k(0, head, 0, 20.0F);
      for (int dim = 0; dim < dims.head_dim_v; ++dim) inputs.set_v(0, head, dim, 0.0F);
    }
    check(inputs, "dominant first token");
  }
}

TEST_P(AttentionAdversarial, ScalesOfZeroAndBelow) {
  for (const Dims& dims : usual_dims(row())) {
    for (const float scale : {0.0F, -0.2F}) {
      AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
      spec.softmax_scale = scale;
      check(random_inputs(spec, {{200, 200, 0}}, 18), "scale");
    }
  }
}

RINGATTN_FOR_EVERY_KERNEL(AttentionAdversarial);

}  // namespace
}  // namespace ringattn::testing
