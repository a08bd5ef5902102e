// SPDX-License-Identifier: Apache-2.0
// A gradient row has the same bits however the work is arranged, also next to values that are not finite.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/kernels/attention_backward/backward_data.hpp"

namespace ringattn::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const std::vector<SequenceShape> kSequences = {{150, 150, 0}, {0, 9, 0}, {1, 1, 0}, {170, 260, -45}, {130, 300, 171}};

void expect_invariant(const BackwardInputs& inputs) {
  const Gradients whole = differentiate(inputs);
  for (const BackwardArrangement& arrangement :
       {BackwardArrangement{.threads = 3}, BackwardArrangement{.tiles_per_task = 1, .seed = 2, .strided = true},
        BackwardArrangement{.tiles_per_task = 2, .separate_finish = true},
        BackwardArrangement{.ranks = 2, .max_run = 33, .seed = 3},
        BackwardArrangement{.tiles_per_task = 3, .ranks = 3, .seed = 4},
        BackwardArrangement{.tiles_per_task = 1, .ranks = 7, .max_run = 5, .seed = 5, .strided = true}}) {
    EXPECT_TRUE(differentiate(inputs, arrangement).same_bits(whole))
        << describe(inputs.spec()) << ": " << arrangement.ranks << " ranks, " << arrangement.threads << " threads, "
        << arrangement.tiles_per_task << " tiles per task";
  }
}

TEST(BackwardInvariance, TasksRanksAndThreads) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{40, 0}, Mask{23, 70}}) {
      for (const auto& [heads, kv_heads] : {std::pair{2, 2}, {3, 1}, {4, 1}}) {
        AttentionSpec spec = make_spec(dtype, heads, kv_heads, 40, mask, 24);
        spec.sinks = heads == 3;
        spec.softcap = heads == 4 ? 5.0F : 0.0F;
        expect_invariant(random_backward_inputs(spec, kSequences, 21, heads == 3));
      }
    }
  }
}

// Query splits of one tile each.
TEST(BackwardInvariance, QuerySplits) {
  expect_invariant(random_backward_inputs(make_spec(Dtype::kBf16, 64, 1, 16, {-1, 0}), kSequences, 22));
  expect_invariant(random_backward_inputs(make_spec(Dtype::kF32, 71, 1, 8, {100, 30}), kSequences, 23));
}

TEST(BackwardInvariance, KvSplits) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{9000, 10}}) {
    const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 16, mask);
    expect_invariant(random_backward_inputs(spec, {{20, 2 * kBackwardKvSplit + 77, 2 * kBackwardKvSplit + 49}}, 24));
  }
}

// One element of a tensor is not finite: rows and keys that see none of it keep their bits.
class PlantedValues : public ::testing::TestWithParam<float> {};

bool sees(const Mask& mask, std::int64_t position, std::int64_t key) {
  return (mask.left < 0 || key >= position - mask.left) && (mask.right < 0 || key <= position + mask.right);
}

TEST_P(PlantedValues, DoNotCrossTheMask) {
  constexpr std::int64_t kQueries = 200, kKeys = 260, kOffset = 30, kDim = 24;
  constexpr std::int64_t kQuery = 77, kKey = 120;  // where it is planted
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const Mask& mask : {Mask{-1, 0}, Mask{20, 0}, Mask{13, 11}}) {
      const AttentionSpec spec = make_spec(dtype, 3, 1, kDim, mask);
      const BackwardInputs clean = random_backward_inputs(spec, {{kQueries, kKeys, kOffset}}, 25);
      const Gradients expected = differentiate(clean);
      for (const char tensor : {'q', 'k', 'v', 'o'}) {
        BackwardInputs inputs = clean;
        if (tensor == 'q') inputs.forward.set_q(kQuery, 1, 5, GetParam());
        if (tensor == 'k') inputs.forward.set_k(kKey, 0, 5, GetParam());
        if (tensor == 'v') inputs.forward.set_v(kKey, 0, 5, GetParam());
        if (tensor == 'o') inputs.set_dout(kQuery, 1, 5, GetParam());
        if (tensor != 'o') run_forward(inputs);
        expect_invariant(inputs);
        const Gradients result = differentiate(inputs);
        const bool in_query = tensor == 'q' || tensor == 'o';
        const std::size_t row = kDim * size_of(dtype);
        const auto same = [row](const std::vector<std::byte>& a, const std::vector<std::byte>& b, std::int64_t index) {
          return std::memcmp(a.data() + static_cast<std::size_t>(index) * row,
                             b.data() + static_cast<std::size_t>(index) * row, row) == 0;
        };
        bool spreads = false;
        // The planted value reaches a query that sees the key or is the query itself. Its gradient then reaches every
        // key that it sees.
        const auto reached = [&](std::int64_t i, int head) {
          return in_query ? i == kQuery && head == 1 : sees(mask, i + kOffset, kKey);
        };
        for (std::int64_t i = 0; i < kQueries; ++i) {
          for (int head = 0; head < 3; ++head) {
            const bool is_same = same(result.dq, expected.dq, i * 3 + head);
            spreads = spreads || !is_same;
            if (reached(i, head)) continue;
            ASSERT_TRUE(is_same) << tensor << " in dq of query " << i << ", " << describe(mask);
          }
        }
        for (std::int64_t key = 0; key < kKeys; ++key) {
          bool of_reached = key == kKey && !in_query;
          for (std::int64_t i = 0; i < kQueries; ++i) {
            for (int head = 0; head < 3; ++head) {
              of_reached = of_reached || (reached(i, head) && sees(mask, i + kOffset, key));
            }
          }
          if (of_reached) continue;
          ASSERT_TRUE(same(result.dk, expected.dk, key)) << tensor << " in dk of key " << key << ", " << describe(mask);
          ASSERT_TRUE(same(result.dv, expected.dv, key)) << tensor << " in dv of key " << key << ", " << describe(mask);
        }
        EXPECT_TRUE(spreads) << tensor;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(NotFinite, PlantedValues, ::testing::Values(kNan, kInfinity, -kInfinity),
                         [](const auto& test) {
                           return std::isnan(test.param) ? std::string("NaN") : test.param > 0 ? "Infinity" : "Minus";
                         });

}  // namespace
}  // namespace ringattn::testing
