// SPDX-License-Identifier: Apache-2.0
// Linear layers with quantized weights on a GPU: wgmma in tiles for few and for many rows, and mma.sync, have the same
// bits.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/linear/linear.hpp"
#include "tests/support/linear_runner.hpp"

namespace ringattn::testing {
namespace {

const KernelRow<LinearSpec>* linear_row(std::string_view name) {
  const auto table = kernel_table<LinearSpec>();
  const auto found = std::ranges::find(table, name, &KernelRow<LinearSpec>::name);
  return found == table.end() ? nullptr : &*found;
}

// K of whole splits, and K with a shorter last split and leaves of different lengths; N of whole tiles and not.
constexpr std::pair<std::int64_t, std::int64_t> kQuantizedShapes[] = {{4096, 256}, {4480, 200}};

void expect_equal_forms(std::string_view hopper_name, std::string_view ampere_name, WeightFormat format) {
  const KernelRow<LinearSpec>* const hopper = linear_row(hopper_name);
  const KernelRow<LinearSpec>* const ampere = linear_row(ampere_name);
  if (hopper == nullptr || ampere == nullptr) GTEST_SKIP() << "needs: a build with sm90 kernels";
  if (const std::string reason = hopper->unavailable(); !reason.empty()) GTEST_SKIP() << "needs: " << reason;
  std::size_t activation = 0;
  for (const auto& [k, n] : kQuantizedShapes) {
    for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
        LinearSpec spec{dtype, format, k, n};
        spec.parallel = parallel;
        parse_activation(activation_names()[activation++ % activation_names().size()], spec.activation, spec.gated);
        spec.bias = activation % 2 == 0;
        LinearData data = linear_data(spec, 900, 12);
        data.set_x(1, 5, std::numeric_limits<float>::quiet_NaN());
        const std::vector<std::byte> expected = multiplied(*ampere, data);
        // Tasks of 1, 8, 16, 32, 64, 128, 250 and 401 rows; and one of all.
        const LinearArrangement cut{.cuts = {1, 9, 25, 57, 121, 249, 499}};
        EXPECT_EQ(first_difference(data, multiplied(*hopper, data, cut), expected), "") << describe(spec);
        EXPECT_EQ(first_difference(data, multiplied(*hopper, data), expected), "") << describe(spec);
        if (parallel == LinearParallel::kNone) continue;
        for (const int devices : {2, 3, 7}) {
          EXPECT_EQ(first_difference(data, multiplied_in_parts(*hopper, data, devices), expected), "")
              << devices << " devices, " << describe(spec);
        }
      }
    }
  }
}

TEST(QuantizedLinear, Int8KernelsHaveOneAnothersBits) {
  expect_equal_forms("sm90_linear_int8", "sm80_linear_int8", WeightFormat::kInt8);
}

TEST(QuantizedLinear, Int4KernelsHaveOneAnothersBits) {
  expect_equal_forms("sm90_linear_int4", "sm80_linear_int4", WeightFormat::kInt4);
}

}  // namespace
}  // namespace ringattn::testing
