// SPDX-License-Identifier: Apache-2.0
// Data that breaks careless kernels: NaN and ∞ planted, huge logits, outliers, a dominant first token.
#include <cmath>
#include <limits>
#include <utility>

#include "tests/kernels/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"

namespace ringattn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};

class FoldAdversarial : public KernelRowTest {
 protected:
  void check(const FoldInputs& inputs, const char* what) {
    if (!cannot_run(row(), inputs.spec).empty()) return;
    const FoldResult result = fold_with(row(), inputs);
    EXPECT_EQ(check_accuracy(inputs, result.out, result.lse), "") << what << ": " << describe(inputs.spec);
  }

  // Every mask and dtype with `plant` applied to random inputs of two sequences.
  template <typename Plant>
  void check_planted(const char* what, Plant plant) {
    for (const Dtype dtype : kDtypes) {
      for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{60, 0}, Mask{50, 20}}) {
        for (const float softcap : {0.0F, 30.0F}) {
          FoldSpec spec = make_spec(dtype, 4, 2, 40, mask);
          spec.softcap = softcap;
          FoldInputs inputs = random_inputs(spec, {{90, 260, 170}, {20, 140, 120}}, 11);
          plant(inputs);
          check(inputs, what);
        }
      }
    }
  }
};

TEST_P(FoldAdversarial, NanInQ) {
  check_planted("NaN in q", [](FoldInputs& inputs) { inputs.set_q(77, 3, 5, kNan); });
}

TEST_P(FoldAdversarial, NanInK) {
  check_planted("NaN in k", [](FoldInputs& inputs) { inputs.set_k(131, 1, 39, kNan); });
}

TEST_P(FoldAdversarial, NanInV) {
  check_planted("NaN in v", [](FoldInputs& inputs) {
    inputs.set_v(140, 0, 7, kNan);
    inputs.set_v(259, 1, 8, kNan);  // in the tail tile, the last key
    inputs.set_v(260, 0, 9, kNan);  // the next sequence's first key
  });
}

TEST_P(FoldAdversarial, InfinityInV) {
  check_planted("infinity in v", [](FoldInputs& inputs) {
    inputs.set_v(100, 0, 0, kInfinity);
    inputs.set_v(101, 0, 1, -kInfinity);
    inputs.set_v(150, 0, 1, kInfinity);  // with the one above: NaN where both are seen
    inputs.set_v(399, 1, 39, -kInfinity);
  });
}

TEST_P(FoldAdversarial, InfinityInK) {
  check_planted("infinity in k", [](FoldInputs& inputs) {
    inputs.set_k(99, 0, 3, kInfinity);  // scores of ±∞, by the sign of q
    inputs.set_k(200, 1, 3, -kInfinity);
    inputs.set_k(200, 1, 4, kInfinity);  // and ∞ − ∞
  });
}

TEST_P(FoldAdversarial, InfinityInQ) {
  check_planted("infinity in q", [](FoldInputs& inputs) {
    inputs.set_q(10, 0, 2, kInfinity);
    inputs.set_q(100, 3, 2, -kInfinity);
  });
}

// A row whose every score is −∞ has nothing to weigh.
TEST_P(FoldAdversarial, EveryScoreMinusInfinity) {
  for (const bool sinks : {false, true}) {
    FoldSpec spec = make_spec(Dtype::kF32, 2, 1, 8, {-1, 0});
    spec.sinks = sinks;
    FoldInputs inputs = random_inputs(spec, {{150, 150, 0}}, 12);
    for (std::int64_t key = 0; key < 140; ++key) inputs.set_k(key, 0, 0, -kInfinity);
    for (std::int64_t token = 0; token < 150; ++token) {
      for (int head = 0; head < 2; ++head) inputs.set_q(token, head, 0, 1.0F);
    }
    check(inputs, "all scores −∞");
  }
}

TEST_P(FoldAdversarial, InfiniteSinks) {
  FoldSpec spec = make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0});
  spec.sinks = true;
  FoldInputs inputs = random_inputs(spec, {{140, 130, -10}}, 13);
  inputs.sinks = {kInfinity, -kInfinity, kNan, 200.0F};
  check(inputs, "sinks");
}

// ∞ in V keeps its place even where its weight is far below the least fp32 number.
TEST_P(FoldAdversarial, InfinityOfNegligibleWeight) {
  const FoldSpec spec = make_spec(Dtype::kF32, 1, 1, 16, {-1, -1});
  FoldInputs inputs = random_inputs(spec, {{4, 300, 0}}, 14);
  for (std::int64_t token = 0; token < 4; ++token) inputs.set_q(token, 0, 0, 40.0F);
  for (const std::int64_t dominant : {std::int64_t{0}, std::int64_t{290}}) {
    FoldInputs planted = inputs;
    planted.set_k(dominant, 0, 0, 400.0F);
    planted.set_v(150, 0, 3, kInfinity);
    check(planted, "negligible weight");
  }
}

TEST_P(FoldAdversarial, LogitsOfTenThousand) {
  for (const Dtype dtype : kDtypes) {
    const FoldSpec spec = make_spec(dtype, 4, 2, 64, {-1, 0});
    FoldInputs inputs = random_inputs(spec, {{300, 300, 0}}, 15);
    for (std::size_t at = 0; at < inputs.q.size(); at += size_of(dtype)) {
      const float value = load_element(inputs.q.data() + at, dtype);
      store_element(inputs.q.data() + at, dtype, 3000.0F * value);
    }
    check(inputs, "logits of 1e4");
  }
}

TEST_P(FoldAdversarial, OutlierChannels) {
  for (const Dtype dtype : kDtypes) {
    const FoldSpec spec = make_spec(dtype, 4, 2, 64, {-1, 0});
    FoldInputs inputs = random_inputs(spec, {{300, 300, 0}}, 16);
    for (std::int64_t token = 0; token < 300; ++token) {
      for (int head = 0; head < 2; ++head) {
        inputs.set_k(token, head, 9, 80.0F + static_cast<float>(token % 3));
        inputs.set_v(token, head, 17, 1000.0F);
      }
    }
    check(inputs, "outlier channels");
  }
}

TEST_P(FoldAdversarial, DominantFirstToken) {
  for (const Dtype dtype : kDtypes) {
    const FoldSpec spec = make_spec(dtype, 4, 2, 64, {-1, 0});
    FoldInputs inputs = random_inputs(spec, {{300, 300, 0}}, 17);
    for (std::int64_t token = 0; token < 300; ++token) {
      for (int head = 0; head < 4; ++head) inputs.set_q(token, head, 0, 4.0F);
    }
    for (int head = 0; head < 2; ++head) {
      inputs.set_k(0, head, 0, 20.0F);
      for (int dim = 0; dim < 64; ++dim) inputs.set_v(0, head, dim, 0.0F);
    }
    check(inputs, "dominant first token");
  }
}

TEST_P(FoldAdversarial, ScalesOfZeroAndBelow) {
  for (const float scale : {0.0F, -0.2F}) {
    FoldSpec spec = make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0});
    spec.softmax_scale = scale;
    check(random_inputs(spec, {{200, 200, 0}}, 18), "scale");
  }
}

RINGATTN_FOR_EVERY_KERNEL(FoldAdversarial);

}  // namespace
}  // namespace ringattn::testing
