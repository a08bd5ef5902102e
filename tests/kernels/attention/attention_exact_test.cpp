// SPDX-License-Identifier: Apache-2.0
// Inputs whose result is exactly known. They detect a tile that is computed twice, left out or misplaced.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

// V = 1 gives O = 1: within 2 ulp of a 16-bit output, 1e-5 in fp32.
float one_tolerance(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return 1e-5F;
    case Dtype::kBf16:
      return 2.0F * 0x1p-7F;
    case Dtype::kF16:
      return 2.0F * 0x1p-10F;
  }
  return 0.0F;
}

float out_at(const AttentionInputs& inputs, const AttentionResult& result, std::int64_t token, int head, int dim) {
  const std::int64_t index = (token * inputs.spec.heads + head) * inputs.spec.head_dim_v + dim;
  const Dtype dtype = inputs.spec.dtype;
  return load_element(result.out.data() + static_cast<std::size_t>(index) * size_of(dtype), dtype);
}

class AttentionExact : public KernelRowTest {};

TEST_P(AttentionExact, ValuesOfOneGiveOne) {
  for (const Dims& dims : varied_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 4, 2, {-1, 0});
    AttentionInputs inputs = random_inputs(spec, {{600, 600, 0}}, 3);
    for (std::size_t at = 0; at < inputs.v.size(); at += size_of(dims.dtype)) {
      store_element(inputs.v.data() + at, dims.dtype, 1.0F);
    }
    const AttentionResult result = attend_with(row(), inputs);
    for (std::int64_t token = 0; token < 600; ++token) {
      for (int head = 0; head < 4; ++head) {
        for (const int dim : {0, dims.head_dim_v / 2 + 3, dims.head_dim_v - 1}) {
          ASSERT_NEAR(out_at(inputs, result, token, head, dim), 1.0F, one_tolerance(dims.dtype)) << token;
        }
      }
    }
    count_check();
  }
}

// v = position: the mean of 0 … p is p / 2, every partial sum is an exact integer, and as far as positions and their
// halves are numbers of the dtype, so is the result.
TEST_P(AttentionExact, QueriesOfZeroGiveMeans) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 2, 1, {-1, 0});
    const std::int64_t tokens = dims.dtype == Dtype::kBf16 ? 257 : 700;
    AttentionInputs inputs = random_inputs(spec, {{tokens, tokens, 0}}, 4);
    std::fill(inputs.q.begin(), inputs.q.end(), std::byte{0});
    for (std::int64_t token = 0; token < tokens; ++token) inputs.set_v(token, 0, 5, static_cast<float>(token));
    const AttentionResult result = attend_with(row(), inputs);
    for (std::int64_t token = 0; token < tokens; ++token) {
      ASSERT_EQ(out_at(inputs, result, token, 1, 5), static_cast<float>(token) / 2.0F) << describe(spec);
      ASSERT_NEAR(result.lse[static_cast<std::size_t>(token * 2)], std::log(static_cast<double>(token + 1)), 1e-6);
    }
    count_check();
  }
}

// One key that outweighs all others: O is its value, bit for bit, wherever it lies.
TEST_P(AttentionExact, NeedleAtEveryPosition) {
  for (const Dims& dims : usual_dims(row())) {
    const AttentionSpec spec = make_spec(dims, 2, 1, {-1, -1});
    constexpr std::int64_t kKeys = 400;
    const int half = dims.head_dim / 2;
    ASSERT_GE(half * half, kKeys) << "each key has a pair of dims of its own";
    AttentionInputs inputs = random_inputs(spec, {{kKeys, kKeys, 0}}, 5);
    // Query i finds key i: both are large in dims i mod half and half + i / half, and in nothing else.
    std::fill(inputs.q.begin(), inputs.q.end(), std::byte{0});
    std::fill(inputs.k.begin(), inputs.k.end(), std::byte{0});
    for (std::int64_t i = 0; i < kKeys; ++i) {
      for (const int dim : {static_cast<int>(i % half), half + static_cast<int>(i / half)}) {
        for (int head = 0; head < 2; ++head) inputs.set_q(i, head, dim, 64.0F);
        inputs.set_k(i, 0, dim, 64.0F);
      }
    }
    const AttentionResult result = attend_with(row(), inputs);
    const std::size_t row_bytes = static_cast<std::size_t>(spec.head_dim_v) * size_of(spec.dtype);
    for (std::size_t token = 0; token < kKeys; ++token) {
      for (std::size_t head = 0; head < 2; ++head) {
        ASSERT_EQ(std::memcmp(result.out.data() + (token * 2 + head) * row_bytes, inputs.v.data() + token * row_bytes,
                              row_bytes),
                  0)
            << describe(spec) << ", query " << token << ", head " << head;
      }
    }
    count_check();
  }
}

TEST_P(AttentionExact, RowsWithoutKeysAreZero) {
  for (const Dims& dims : varied_dims(row())) {
    for (const bool sinks : {false, true}) {
      AttentionSpec spec = make_spec(dims, 4, 1, {-1, 0});
      spec.sinks = sinks;
      // Rows −30 … −1 stand before the first key; the second sequence has no keys.
      const AttentionInputs inputs = random_inputs(spec, {{40, 200, -30}, {3, 0, 0}}, 6);
      const AttentionResult result = attend_with(row(), inputs, {.tiles_per_task = 1});
      for (std::int64_t token = 0; token < 43; ++token) {
        if (token >= 30 && token < 40) continue;
        for (int head = 0; head < 4; ++head) {
          for (int dim = 0; dim < dims.head_dim_v; ++dim) {
            ASSERT_EQ(out_at(inputs, result, token, head, dim), 0.0F) << token;
          }
          ASSERT_EQ(result.lse[static_cast<std::size_t>(token * 4 + head)],
                    sinks ? inputs.sinks[static_cast<std::size_t>(head)] : -kInfinity);
        }
      }
      count_check();
    }
  }
}

// Keys that no row sees don't matter, whatever finite numbers they hold.
TEST_P(AttentionExact, UnseenKeysMoveNoBit) {
  for (const Dims& dims : usual_dims(row())) {
    const float huge = dims.dtype == Dtype::kF16 ? -6e4F : -3e30F;
    for (const Mask& mask : {Mask{-1, 0}, Mask{40, 0}, Mask{20, 15}}) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      AttentionInputs inputs = random_inputs(spec, {{50, 420, 200}}, 8);
      const AttentionResult before = attend_with(row(), inputs);
      const KeyRange first = Visibility(mask, 420).keys(200);
      const KeyRange last = Visibility(mask, 420).keys(249);
      for (std::int64_t key = 0; key < 420; ++key) {
        if (key >= first.begin && key < last.end) continue;
        for (int dim = 0; dim < dims.head_dim; ++dim) inputs.set_k(key, 0, dim, -9.0F);
        for (int dim = 0; dim < dims.head_dim_v; ++dim) inputs.set_v(key, 1, dim, huge);
      }
      EXPECT_TRUE(attend_with(row(), inputs).same_bits(before)) << describe(spec);
    }
  }
}

RINGATTN_FOR_EVERY_KERNEL(AttentionExact);

}  // namespace
}  // namespace ringattn::testing
