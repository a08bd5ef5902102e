// SPDX-License-Identifier: Apache-2.0
// Gradients of matrices, by every kernel of the table: against sums in fp64, as a left fold of units, and with the same
// bits for any strides, threads and heads at a time.
#include "kernels/gemm/weight_gradient.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/common/token_units.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn {
inline void PrintTo(const KernelRow<WeightGradientSpec>& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

struct WeightGradientInputs {
  WeightGradientSpec spec;
  std::int64_t heads = 0;
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> dout;  // [tokens, heads, dim_n]
  std::vector<std::byte> rows;  // [tokens, dim_k]

  std::int64_t tokens() const { return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}); }
  double at(const std::vector<std::byte>& from, std::int64_t index) const {
    return load_element(from.data() + static_cast<std::size_t>(index) * size_of(spec.dtype), spec.dtype);
  }
};

WeightGradientInputs random_weight_gradient_inputs(const WeightGradientSpec& spec, std::int64_t heads,
                                                   const std::vector<std::int64_t>& lengths) {
  std::mt19937_64 random(7);
  WeightGradientInputs inputs{spec, heads, lengths, {}, {}};
  inputs.dout = random_elements(inputs.tokens() * heads * spec.dim_n, spec.dtype, random);
  inputs.rows = random_elements(inputs.tokens() * spec.dim_k, spec.dtype, random);
  return inputs;
}

class WeightGradients : public ::testing::TestWithParam<KernelRow<WeightGradientSpec>> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(GetParam().name, checks_made() - checks_before_);
  }

  // Rows lie `gap` elements apart and begin `shift` elements after an aligned address; NaN lies between.
  std::vector<float> computed(const WeightGradientInputs& inputs, int threads = 1, std::int64_t gap = 0,
                              std::int64_t shift = 0) const {
    const WeightGradientSpec& spec = inputs.spec;
    const auto backend = GetParam().make_backend({threads, 0});
    const auto kernel = GetParam().make_kernel(spec, *backend);
    const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
    const auto placed = [&](const std::vector<std::byte>& rows, std::int64_t row) {
      std::vector<std::byte> bytes(static_cast<std::size_t>((shift + inputs.tokens() * (row + gap)) * element),
                                   std::byte{0xff});
      for (std::int64_t token = 0; token < inputs.tokens(); ++token) {
        std::memcpy(bytes.data() + (shift + token * (row + gap)) * element, rows.data() + token * row * element,
                    static_cast<std::size_t>(row * element));
      }
      return bytes;
    };
    const std::vector<std::byte> dout_bytes = placed(inputs.dout, inputs.heads * spec.dim_n);
    const std::vector<std::byte> row_bytes = placed(inputs.rows, spec.dim_k);
    DeviceArray dout(*backend, dout_bytes.size()), rows(*backend, row_bytes.size());
    dout.write(dout_bytes);
    rows.write(row_bytes);
    DeviceArray dw(*backend, static_cast<std::size_t>(inputs.heads * spec.dim_n * spec.dim_k) * sizeof(float));
    const auto view = [&](DeviceArray& array, std::int64_t heads, std::int64_t dim) {
      TensorView made =
          dense_view(static_cast<const void*>(array.data() + shift * element), spec.dtype, inputs.tokens(), heads, dim);
      made.token_stride += gap;
      return made;
    };
    kernel->compute({view(dout, inputs.heads, spec.dim_n), view(rows, 1, spec.dim_k), inputs.lengths, dw.floats()},
                    backend->stream(), {});
    return dw.read_floats();
  }

  void for_every_spec(const std::function<void(const WeightGradientSpec&)>& body) const {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const auto& [n, k] : {std::pair(24, 136), std::pair(136, 40), std::pair(72, 8)}) {
        if (GetParam().missing({dtype, n, k}).empty()) body({dtype, n, k});
      }
    }
  }

  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    count_check();
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

 private:
  std::int64_t checks_before_ = 0;
};

TEST_P(WeightGradients, AreAccurateFoldsOfUnits) {
  for_every_spec([&](const WeightGradientSpec& spec) {
    const WeightGradientInputs inputs = random_weight_gradient_inputs(spec, 2, {3, 0, kTokenUnit + 70, 1});
    const std::vector<float> made = computed(inputs);
    std::mt19937_64 random(3);
    for (int sample = 0; sample < 100; ++sample) {
      const auto at = static_cast<std::int64_t>(random() % made.size());
      const std::int64_t k = at % spec.dim_k;
      const std::int64_t column = at / spec.dim_k;  // head and n
      double sum = 0.0;
      double size = 0.0;
      for (std::int64_t token = 0; token < inputs.tokens(); ++token) {
        const double term = inputs.at(inputs.dout, token * inputs.heads * spec.dim_n + column) *
                            inputs.at(inputs.rows, token * spec.dim_k + k);
        sum += term;
        size += std::abs(term);
      }
      EXPECT_NEAR(made[static_cast<std::size_t>(at)], sum, 2e-6 * size) << describe(spec);
    }
    std::vector<float> total;
    for (const TokenUnit& unit : token_units(inputs.lengths)) {
      const auto part = [&](const std::vector<std::byte>& rows, std::int64_t row) {
        const auto bytes = row * static_cast<std::int64_t>(size_of(spec.dtype));
        return std::vector<std::byte>(rows.begin() + unit.first * bytes,
                                      rows.begin() + (unit.first + unit.tokens) * bytes);
      };
      const std::vector<float> sum = computed({spec,
                                               inputs.heads,
                                               {unit.tokens},
                                               part(inputs.dout, inputs.heads * spec.dim_n),
                                               part(inputs.rows, spec.dim_k)});
      if (total.empty()) {
        total = sum;
      } else {
        for (std::size_t i = 0; i < sum.size(); ++i) total[i] += sum[i];
      }
    }
    EXPECT_TRUE(same(made, total)) << describe(spec);
  });
}

TEST_P(WeightGradients, StridesAndThreadsChangeNoBit) {
  for_every_spec([&](const WeightGradientSpec& spec) {
    const WeightGradientInputs inputs = random_weight_gradient_inputs(spec, 3, {130, 65});
    const std::vector<float> made = computed(inputs);
    EXPECT_TRUE(same(computed(inputs, 3, 8), made)) << describe(spec);
    EXPECT_TRUE(same(computed(inputs, 2, 3, 1), made)) << describe(spec);
  });
}

// A NaN reaches the elements that it is a factor of. Without tokens the gradient is 0.
TEST_P(WeightGradients, NanAndNoTokens) {
  const Dtype dtype = GetParam().missing({Dtype::kBf16, 24, 40}).empty() ? Dtype::kBf16 : Dtype::kF32;
  const WeightGradientSpec spec{dtype, 24, 40};
  WeightGradientInputs inputs = random_weight_gradient_inputs(spec, 2, {70});
  store_element(inputs.dout.data() + (20 * 2 * spec.dim_n + spec.dim_n + 5) * size_of(dtype), dtype,
                std::numeric_limits<float>::quiet_NaN());
  const std::vector<float> made = computed(inputs);
  count_check();
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(std::isnan(made[i]), i / 40 == 24 + 5) << i;
  }
  for (const float value : computed(random_weight_gradient_inputs(spec, 2, {0, 0}))) EXPECT_EQ(value, 0.0F);
}

INSTANTIATE_TEST_SUITE_P(Kernels, WeightGradients,
                         ::testing::ValuesIn(kernel_table<WeightGradientSpec>().begin(),
                                             kernel_table<WeightGradientSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ringattn::testing
