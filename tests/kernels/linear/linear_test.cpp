// SPDX-License-Identifier: Apache-2.0
// Linear layers, every kernel of the table: against sums in fp64, int8 against integers exactly, and the same bits
// however rows, columns and leaves of K are dealt.
#include "kernels/linear/linear.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/linear/linear_oracle.hpp"
#include "tests/kernels/common/forced_target.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/linear_runner.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn {
inline void PrintTo(const KernelRow<LinearSpec>& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};
constexpr WeightFormat kFormats[] = {WeightFormat::kFloat, WeightFormat::kInt8, WeightFormat::kInt4};

class Linear : public ::testing::TestWithParam<KernelRow<LinearSpec>> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const KernelRow<LinearSpec>& row() const { return GetParam(); }
  bool is_able(const LinearSpec& spec) const { return row().missing(spec).empty(); }
  // The first dtype that the kernel has with weights of the format.
  std::optional<Dtype> dtype_of(WeightFormat format) const {
    for (const Dtype dtype : kDtypes) {
      if (is_able({dtype, format, kInt4Group, 8})) return dtype;
    }
    return {};
  }
  bool has(WeightFormat format) const { return dtype_of(format).has_value(); }

  // Formats and dtypes of one shape, with what else a layer may have in turn. int4 takes the K that it can. A kernel of
  // one dtype has it with a gate, too.
  std::vector<LinearSpec> specs(std::int64_t k, std::int64_t n, LinearParallel parallel) const {
    std::vector<LinearSpec> able;
    for (const WeightFormat format : kFormats) {
      for (const Dtype dtype : kDtypes) {
        LinearSpec spec{dtype, format, k, n};
        if (format == WeightFormat::kInt4) spec.in_features = (k + kInt4Group - 1) / kInt4Group * kInt4Group;
        spec.parallel = parallel;
        const std::string_view name = activation_names()[able.size() % activation_names().size()];
        parse_activation(name, spec.activation, spec.gated);
        spec.bias = able.size() % 2 == 0;
        if (is_able(spec)) able.push_back(spec);
      }
    }
    if (able.size() == 1) {
      able.push_back(able.front());
      parse_activation("swiglu", able.back().activation, able.back().gated);
    }
    return able;
  }

  void expect_same(const LinearData& data, const std::vector<std::byte>& y, const std::vector<std::byte>& expected,
                   const std::string& what) const {
    count_check();
    EXPECT_EQ(first_difference(data, y, expected), "") << describe(data.spec) << "; " << what;
  }

 private:
  std::int64_t checks_before_ = 0;
};

TEST_P(Linear, IsAccurate) {
  // Every activation in every dtype.
  for (const Dtype dtype : kDtypes) {
    for (const std::string_view name : activation_names()) {
      for (const bool bias : {false, true}) {
        LinearSpec spec{dtype, WeightFormat::kFloat, 72, 43};
        parse_activation(name, spec.activation, spec.gated);
        spec.bias = bias;
        if (!is_able(spec)) continue;
        LinearData data = linear_data(spec, 9, 1);
        // z from −40 to 40, beyond where exp2 is 0 or 1 of it.
        for (std::int64_t k = 0; k < 72; ++k) data.set_x(3, k, data.spec.dtype == Dtype::kF16 ? 8.0F : 30.0F);
        count_check();
        EXPECT_EQ(first_inaccuracy(data, multiplied(row(), data)), "") << describe(spec);
      }
    }
  }
  // Every format and kind of parallelism, with K over several splits.
  for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
    for (const LinearSpec& spec : specs(4200, 37, parallel)) {
      const LinearData data = linear_data(spec, 5, 2);
      count_check();
      EXPECT_EQ(first_inaccuracy(data, multiplied(row(), data)), "") << describe(spec);
    }
  }
}

TEST_P(Linear, RowsCutAnywhereHaveTheSameBits) {
  for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
    for (const LinearSpec& spec : specs(2200, 70, parallel)) {
      const LinearData data = linear_data(spec, 141, 3);
      const std::vector<std::byte> whole = multiplied(row(), data);
      std::vector<std::int64_t> alone(140);
      std::iota(alone.begin(), alone.end(), 1);
      // With the last, rows of 140 bytes begin at multiples of 16 bytes: TMA could store them, and 4 bytes more.
      for (const LinearArrangement& arrangement :
           {LinearArrangement{.cuts = alone}, LinearArrangement{.threads = 2, .cuts = {1, 9, 73}, .gap = 8},
            LinearArrangement{.cuts = {1}, .y_gap = 10}}) {
        expect_same(data, multiplied(row(), data, arrangement), whole, describe(arrangement));
      }
    }
  }
}

TEST_P(Linear, ColumnsCutAnywhereHaveTheSameBits) {
  for (const LinearSpec& spec : specs(300, 90, LinearParallel::kColumn)) {
    const LinearData data = linear_data(spec, 11, 4);
    const std::vector<std::byte> whole = multiplied(row(), data);
    const std::size_t element = size_of(spec.dtype);
    std::vector<std::byte> joined(whole.size());
    for (const auto& [begin, end] : {std::pair{0, 17}, {17, 64}, {64, 90}}) {
      const std::vector<std::byte> part = multiplied(row(), columns_of(data, begin, end));
      const auto bytes = static_cast<std::size_t>(end - begin) * element;
      for (std::size_t i = 0; i < 11; ++i) {
        std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(i * bytes), bytes,
                    joined.begin() + static_cast<std::ptrdiff_t>((i * 90 + static_cast<std::size_t>(begin)) * element));
      }
    }
    expect_same(data, joined, whole, "columns cut at 17 and 64");
    LinearData ordinary = data;
    ordinary.spec.parallel = LinearParallel::kNone;
    expect_same(data, multiplied(row(), ordinary), whole, "not parallel");
  }
}

TEST_P(Linear, EveryNumberOfDevicesHasTheBitsOfOne) {
  // 40 features are 3 units of 16, so most leaves are empty.
  for (const std::int64_t k : {40, 1496}) {
    for (const LinearSpec& spec : specs(k, 50, LinearParallel::kRow)) {
      LinearData data = linear_data(spec, 13, 5);
      data.set_x(7, k - 1, kNan);
      data.set_x(9, 0, kInfinity);
      const std::vector<std::byte> one = multiplied(row(), data);
      for (const int devices : {1, 2, 3, 4, 5, 6, 7, 8}) {
        expect_same(data, multiplied_in_parts(row(), data, devices), one, fmt::format("{} devices", devices));
      }
      if (spec.weights != WeightFormat::kInt8) continue;
      data.spec.parallel = LinearParallel::kNone;  // sums are exact in any order
      expect_same(data, multiplied(row(), data), one, "not parallel");
    }
  }
}

// Sums that are exact within a split or leaf, and not between them.
TEST_P(Linear, SplitsAndLeavesAreAddedInTheirOrder) {
  if (!has(WeightFormat::kFloat)) GTEST_SKIP() << "the kernel has no floating-point weights";
  constexpr std::int64_t kLeaf = 1024;  // of 8,192 features
  constexpr float kLarge = 4096.0F;     // its square + 1 is not a float
  for (const Dtype dtype : kDtypes) {
    for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
      LinearSpec spec{dtype, WeightFormat::kFloat, kLinearLeaves * kLeaf, 8};
      spec.parallel = parallel;
      if (!is_able(spec)) continue;
      LinearData data = linear_data(spec, 1, 6);
      std::ranges::fill(data.x, std::byte{0});
      std::ranges::fill(data.matrices[0].values, std::byte{0});
      const auto plant = [&](std::int64_t n, std::int64_t k, float x, float weight) {
        data.set_x(0, k, x);
        data.set_weight(0, n, k, weight);
      };
      // Column 0: 2^24 in leaf 0, 1 in leaves 1 to 3, −2^24 in leaf 4.
      plant(0, 0, kLarge, kLarge);
      for (int leaf = 1; leaf <= 3; ++leaf) plant(0, leaf * kLeaf + 5, 1.0F, 1.0F);
      plant(0, 4 * kLeaf, kLarge, -kLarge);
      // Column 1: 2^24 in split 0, 1 in splits 1 and 2, −2^24 in split 3.
      data.set_weight(0, 1, 0, kLarge);
      plant(1, 2 * kLeaf + 9, 1.0F, 1.0F);
      plant(1, 5 * kLeaf + 9, 1.0F, 1.0F);
      plant(1, 6 * kLeaf, kLarge, -kLarge);
      const std::vector<std::byte> y = multiplied(row(), data);
      const auto at = [&](std::size_t n) { return load_element(y.data() + n * size_of(dtype), dtype); };
      count_check();
      if (parallel == LinearParallel::kRow) {
        EXPECT_EQ(at(0), 2.0F) << describe(spec);  // (2^24 + 1) + (1 + 1) − 2^24
        EXPECT_EQ(at(1), 1.0F) << describe(spec);  // (2^24 + 1) + (1 − 2^24)
      } else {
        EXPECT_EQ(at(1), 0.0F) << describe(spec);  // ((2^24 + 1) + 1) − 2^24
      }
    }
  }
}

TEST_P(Linear, Int8SumsAreExact) {
  if (!has(WeightFormat::kInt8)) GTEST_SKIP() << "the kernel has no int8 weights";
  for (const Dtype dtype : kDtypes) {
    for (const std::int64_t k : {100, 1024, 5000}) {
      LinearSpec spec{dtype, WeightFormat::kInt8, k, 33};
      spec.bias = true;
      if (!is_able(spec)) continue;
      LinearData data = linear_data(spec, 6, 7);
      const std::size_t element = size_of(dtype);
      for (std::int64_t i = 0; i < k; ++i) {
        data.set_x(1, i, 0.0F);                                // scale 1
        data.set_x(2, i, i % 2 == 0 ? 3.0F : -3.0F);           // ±127 throughout
        data.set_x(3, i, static_cast<float>(i % 127) + 0.5F);  // halves, with 127 below
      }
      data.set_x(3, k - 1, 127.0F);
      for (std::int64_t i = 0; i < k; ++i) data.matrices[0].values[static_cast<std::size_t>(i)] = std::byte{127};
      std::vector<std::byte> expected(6 * 33 * element);
      for (std::int64_t r = 0; r < 6; ++r) {
        const auto x = [&](std::int64_t i) {
          return load_element(data.x.data() + static_cast<std::size_t>(r * k + i) * element, dtype);
        };
        float absmax = 0.0F;
        for (std::int64_t i = 0; i < k; ++i) absmax = std::max(absmax, std::abs(x(i)));
        const float scale = absmax == 0.0F ? 1.0F : absmax / 127.0F;
        for (std::int64_t n = 0; n < 33; ++n) {
          std::int64_t sum = 0;
          for (std::int64_t i = 0; i < k; ++i) {
            const auto weight = static_cast<std::int8_t>(data.matrices[0].values[static_cast<std::size_t>(n * k + i)]);
            sum += static_cast<std::int64_t>(std::nearbyint(x(i) / scale)) * weight;
          }
          const float bias = load_element(data.matrices[0].bias.data() + static_cast<std::size_t>(n) * element, dtype);
          const float z =
              std::fma(static_cast<float>(sum) * scale, data.matrices[0].scales[static_cast<std::size_t>(n)], bias);
          store_element(expected.data() + static_cast<std::size_t>(r * 33 + n) * element, dtype, z);
        }
      }
      expect_same(data, multiplied(row(), data), expected, "int64 sums");
    }
  }
}

TEST_P(Linear, NanAndInfinityStayInTheirRowsAndColumns) {
  for (const auto& [parallel, rows] : {std::pair{LinearParallel::kNone, 8}, {LinearParallel::kRow, 40}}) {
    for (const LinearSpec& spec : specs(260, 20, parallel)) {
      const LinearData clean = linear_data(spec, rows, 8);
      const std::vector<std::byte> before = multiplied(row(), clean);
      for (const float value : {kNan, kInfinity, -kInfinity}) {
        LinearData data = clean;
        data.set_x(2, 259, value);
        data.set_x(5, 0, value);
        if (spec.weights == WeightFormat::kFloat) {
          data.set_weight(0, 4, 7, value);
        } else {
          data.matrices[0]
              .scales[spec.weights == WeightFormat::kInt8 ? 4 : static_cast<std::size_t>(4 * data.groups())] = value;
        }
        const std::vector<std::byte> y = multiplied(row(), data);
        count_check();
        EXPECT_EQ(first_inaccuracy(data, y), "") << describe(spec) << ", " << value;
        std::vector<std::byte> mixed = y;
        const std::size_t element = size_of(spec.dtype);
        for (std::size_t i = 0; i < static_cast<std::size_t>(rows) * 20; ++i) {
          if (i / 20 == 2 || i / 20 == 5 || i % 20 == 4) {
            std::copy_n(y.begin() + static_cast<std::ptrdiff_t>(i * element), element,
                        mixed.begin() + static_cast<std::ptrdiff_t>(i * element));
          } else {
            std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(i * element), element,
                        mixed.begin() + static_cast<std::ptrdiff_t>(i * element));
          }
        }
        expect_same(data, y, mixed, "other rows and columns");
      }
    }
  }
}

// dy and z of LinearGradientTask.
struct GradientData {
  LinearSpec spec;
  std::int64_t rows = 0;
  std::vector<float> dy, z;  // [rows, N], [rows, sum_columns()]
};

GradientData gradient_data(const LinearSpec& spec, std::int64_t rows) {
  GradientData data{spec, rows, {}, {}};
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto rounded = [&](float value) {
    std::byte bytes[sizeof(float)];
    store_element(bytes, spec.dtype, value);
    return load_element(bytes, spec.dtype);
  };
  for (std::int64_t i = 0; i < rows * spec.out_features; ++i) data.dy.push_back(rounded(normal(random)));
  // Most of z is where slopes bend, and some of it where exp2 is 0 or infinite.
  for (std::int64_t i = 0; i < rows * spec.sum_columns(); ++i) {
    data.z.push_back(rounded(normal(random) * (i % 16 == 0 ? 60.0F : 3.0F)));
  }
  return data;
}

// dz, [rows, sum_columns()]. gap: elements between rows, odd to prevent vectors. cuts as in LinearArrangement.
std::vector<std::byte> activation_gradient(const KernelRow<LinearSpec>& row, const GradientData& data,
                                           const LinearArrangement& arrangement, bool in_place) {
  const LinearSpec& spec = data.spec;
  const std::unique_ptr<Backend> backend = row.make_backend({arrangement.threads, 0});
  const std::unique_ptr<LinearKernel> kernel = row.make_kernel(spec, *backend);
  const std::size_t element = size_of(spec.dtype);
  const auto bytes = [&](std::int64_t count) { return static_cast<std::size_t>(count) * element; };
  const auto rows_of = [&](const std::vector<float>& values, std::int64_t columns) {
    std::vector<std::byte> made(bytes(data.rows * (columns + arrangement.gap)), std::byte{0xff});
    for (std::int64_t i = 0; i < data.rows * columns; ++i) {
      const std::int64_t at = i / columns * (columns + arrangement.gap) + i % columns;
      store_element(made.data() + bytes(at), spec.dtype, values[static_cast<std::size_t>(i)]);
    }
    return made;
  };
  const std::int64_t n = spec.out_features, sums = spec.sum_columns(), stride = sums + arrangement.gap;
  const std::vector<std::byte> dy_bytes = rows_of(data.dy, n), z_bytes = rows_of(data.z, sums);
  DeviceArray dy(*backend, dy_bytes.size()), z(*backend, z_bytes.size()), separate(*backend, z_bytes.size());
  dy.write(dy_bytes);
  z.write(z_bytes);
  const DeviceArray& dz = in_place ? z : separate;
  std::vector<std::int64_t> begins{0};
  begins.insert(begins.end(), arrangement.cuts.begin(), arrangement.cuts.end());
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const std::int64_t begin = begins[i];
    const std::int64_t rows = (i + 1 < begins.size() ? begins[i + 1] : data.rows) - begin;
    kernel->activation_gradient(
        {{dy.data() + bytes(begin * (n + arrangement.gap)), spec.dtype, rows, 1, n, n + arrangement.gap, n},
         {z.data() + bytes(begin * stride), spec.dtype, rows, 1, sums, stride, sums},
         {dz.data() + bytes(begin * stride), spec.dtype, rows, 1, sums, stride, sums}},
        backend->stream(), {});
  }
  const std::vector<std::byte> wide = dz.read();
  std::vector<std::byte> made;
  for (std::int64_t i = 0; i < data.rows; ++i) {
    const auto at = wide.begin() + static_cast<std::ptrdiff_t>(bytes(i * stride));
    made.insert(made.end(), at, at + static_cast<std::ptrdiff_t>(bytes(sums)));
  }
  return made;
}

// a(z) and a'(z) in fp64.
std::pair<double, double> activation_and_slope(LinearActivation activation, double z) {
  const auto sigmoid = [](double t) { return 1.0 / (1.0 + std::exp(-t)); };
  if (activation == LinearActivation::kSilu) {
    const double r = sigmoid(z);
    return {z * r, r * (1.0 + z * (1.0 - r))};
  }
  if (activation == LinearActivation::kGelu) {
    const double phi = 0.5 * std::erfc(-z / std::numbers::sqrt2);
    return {z * phi, phi + z * std::exp(-0.5 * z * z) / std::sqrt(2.0 * std::numbers::pi)};
  }
  const double root = std::sqrt(8.0 / std::numbers::pi);
  const double r = sigmoid(root * (z + 0.044715 * z * z * z));
  return {z * r, r + z * r * (1.0 - r) * root * (1.0 + 3.0 * 0.044715 * z * z)};
}

TEST_P(Linear, ActivationGradientsAreAccurateAndRowsCutAnywhereHaveTheSameBits) {
  for (const Dtype dtype : kDtypes) {
    for (const std::string_view name : activation_names()) {
      LinearSpec spec{dtype, WeightFormat::kFloat, 16, 48};
      parse_activation(name, spec.activation, spec.gated);
      if (!is_able(spec) || spec.activation == LinearActivation::kNone) continue;
      const GradientData data = gradient_data(spec, 37);
      const std::vector<std::byte> dz = activation_gradient(row(), data, {}, false);
      const double rounding = dtype == Dtype::kBf16 ? 0x1p-8 : dtype == Dtype::kF16 ? 0x1p-11 : 0x1p-24;
      for (std::int64_t i = 0; i < data.rows * spec.out_features; ++i) {
        const std::int64_t at = i / spec.out_features * spec.sum_columns() + i % spec.out_features;
        const auto [value, slope] = activation_and_slope(spec.activation, data.z[static_cast<std::size_t>(at)]);
        const double dy = data.dy[static_cast<std::size_t>(i)];
        const double u = spec.gated ? data.z[static_cast<std::size_t>(at + spec.out_features)] : 1.0;
        // Slopes are within 1e-5, most of it from 1 − r times z · dt/dz; fp16 has no smaller step than 2^-24.
        const auto expect = [&](std::int64_t where, double expected, double size) {
          const double found = load_element(dz.data() + static_cast<std::size_t>(where) * size_of(dtype), dtype);
          EXPECT_NEAR(found, expected, size * 1e-5 + std::abs(expected) * rounding + 0x1p-24)
              << describe(spec) << ", element " << where;
        };
        expect(at, dy * u * slope, std::abs(dy * u));
        if (spec.gated) expect(at + spec.out_features, dy * value, std::abs(dy));
      }
      count_check();
      for (const bool in_place : {false, true}) {
        for (const std::int64_t gap : {0, 3, 8}) {
          const LinearArrangement arrangement{.threads = 2, .cuts = {1, 2, 30}, .gap = gap};
          EXPECT_EQ(activation_gradient(row(), data, arrangement, in_place), dz) << describe(spec) << ", gap " << gap;
        }
      }
    }
  }
  if (!has(WeightFormat::kFloat)) count_check();  // the refusal below
  if (has(WeightFormat::kFloat)) return;
  const WeightFormat format = has(WeightFormat::kInt8) ? WeightFormat::kInt8 : WeightFormat::kInt4;
  const std::unique_ptr<Backend> backend = row().make_backend({1, 0});
  const std::unique_ptr<LinearKernel> kernel = row().make_kernel({Dtype::kBf16, format, kInt4Group, 8}, *backend);
  EXPECT_EQ(error_of([&] { kernel->add_nodes({}, backend->stream(), {}); }).code(), ErrorCode::kUnsupported);
  EXPECT_EQ(error_of([&] { kernel->activation_gradient({}, backend->stream(), {}); }).code(), ErrorCode::kUnsupported);
}

// Addends of which each other order gives other bits; and leaves that are left out.
TEST_P(Linear, NodesAreAddedByTheTree) {
  if (!has(WeightFormat::kFloat)) GTEST_SKIP() << "needs: floating-point weights";
  const std::unique_ptr<Backend> backend = row().make_backend({2, 0});
  const std::unique_ptr<LinearKernel> kernel =
      row().make_kernel({*dtype_of(WeightFormat::kFloat), WeightFormat::kFloat, 16, 8}, *backend);
  kernel->reserve(1);
  constexpr std::int64_t kCount = 5003;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<std::unique_ptr<DeviceArray>> leaves;
  std::vector<std::vector<float>> values(kLinearLeaves, std::vector<float>(kCount));
  for (std::vector<float>& leaf : values) {
    for (float& value : leaf) value = normal(random);
    leaves.push_back(std::make_unique<DeviceArray>(*backend, kCount * sizeof(float)));
    const auto* const bytes = reinterpret_cast<const std::byte*>(leaf.data());
    leaves.back()->write({bytes, bytes + kCount * sizeof(float)});
  }
  for (const unsigned given : {0xffU, 0xb6U, 0x01U, 0x80U, 0x00U}) {  // a bit for each leaf
    LinearSumTask task{.count = kCount};
    for (int leaf = 0; leaf < kLinearLeaves; ++leaf) {
      if ((given >> leaf & 1U) != 0)
        task.nodes[kLinearLeaves + leaf] = leaves[static_cast<std::size_t>(leaf)]->floats();
    }
    DeviceArray sum(*backend, kCount * sizeof(float));
    task.sum = sum.floats();
    kernel->add_nodes(task, backend->stream(), {});
    std::vector<float> expected(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      float level[kLinearLeaves];
      for (int leaf = 0; leaf < kLinearLeaves; ++leaf) {
        level[leaf] = (given >> leaf & 1U) != 0 ? values[static_cast<std::size_t>(leaf)][i] : -0.0F;
      }
      for (int width = kLinearLeaves / 2; width > 0; width /= 2) {
        for (int at = 0; at < width; ++at) level[at] = level[2 * at] + level[2 * at + 1];
      }
      expected[i] = level[0];
    }
    count_check();
    EXPECT_EQ(std::memcmp(sum.read_floats().data(), expected.data(), kCount * sizeof(float)), 0) << given;
  }
  // In place, as a sum is added to its sibling.
  LinearSumTask pair{.count = kCount, .sum = leaves[2]->floats()};
  pair.nodes[2] = pair.sum;
  pair.nodes[3] = leaves[3]->floats();
  kernel->add_nodes(pair, backend->stream(), {});
  for (std::size_t i = 0; i < kCount; ++i) values[2][i] += values[3][i];
  EXPECT_EQ(std::memcmp(leaves[2]->read_floats().data(), values[2].data(), kCount * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, Linear,
                         ::testing::ValuesIn(kernel_table<LinearSpec>().begin(), kernel_table<LinearSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

const KernelRow<LinearSpec>* row_of(std::string_view name) {
  const auto table = kernel_table<LinearSpec>();
  const auto found = std::ranges::find(table, name, &KernelRow<LinearSpec>::name);
  return found == table.end() ? nullptr : &*found;
}

// wgmma, in tiles for few and for many rows, and mma.sync.
TEST(GpuLinear, KernelsHaveOneAnothersBits) {
  const KernelRow<LinearSpec>* const hopper = row_of("sm90_linear");
  const KernelRow<LinearSpec>* const ampere = row_of("sm80_linear");
  if (hopper == nullptr) GTEST_SKIP() << "needs: a build with sm90 kernels";
  if (const std::string reason = hopper->unavailable(); !reason.empty()) GTEST_SKIP() << "needs: " << reason;
  // Whole tiles and splits; tails of M, N and K, with leaves that are no whole panels; and enough columns that a tile
  // for few rows has more than 64, and one for many rows 192.
  for (const auto& [k, n] : {std::pair{6144, 512}, {4104, 328}, {72, 10'000}}) {
    int activation = 0;
    for (const std::int64_t rows : {1, 12, 24, 64, 90, 300}) {
      for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
        LinearSpec spec{rows % 8 == 0 ? Dtype::kF16 : Dtype::kBf16, WeightFormat::kFloat, k, n};
        spec.parallel = parallel;
        const auto names = activation_names();
        parse_activation(names[static_cast<std::size_t>(activation++) % names.size()], spec.activation, spec.gated);
        spec.bias = rows % 3 == 0;
        LinearData data = linear_data(spec, rows, 11);
        data.set_x(rows / 2, 5, kNan);
        const std::vector<std::byte> expected = multiplied(*ampere, data);
        EXPECT_EQ(first_difference(data, multiplied(*hopper, data), expected), "") << rows << ", " << describe(spec);
        if (parallel == LinearParallel::kNone) continue;
        EXPECT_EQ(first_difference(data, multiplied_in_parts(*hopper, data, 3), expected), "") << describe(spec);
      }
    }
  }
  // Several of the widest tiles for each CTA of an H200, over a split and a tail.
  for (const auto& [n, activation, parallel] : {std::tuple{4096, "silu", LinearParallel::kNone},
                                                {4096, "swiglu", LinearParallel::kNone},
                                                {4096, "none", LinearParallel::kRow}}) {
    for (const std::int64_t rows : {2000, 2001}) {
      LinearSpec spec{rows % 8 == 0 ? Dtype::kF16 : Dtype::kBf16, WeightFormat::kFloat, 2056, n};
      spec.parallel = parallel;
      parse_activation(activation, spec.activation, spec.gated);
      const LinearData data = linear_data(spec, rows, 12);
      const std::vector<std::byte> expected = multiplied(*ampere, data);
      EXPECT_EQ(first_difference(data, multiplied(*hopper, data), expected), "") << rows << ", " << describe(spec);
      if (parallel == LinearParallel::kNone) continue;
      EXPECT_EQ(first_difference(data, multiplied_in_parts(*hopper, data, 3), expected), "") << describe(spec);
    }
  }
}

// Chains of fp32 multiply-adds: the form for few rows and every tile of the GPU, with several tiles for each CTA, and a
// CPU. Activations differ between the two, so they have none.
TEST(GpuLinear, SumsInFp32HaveTheBitsOfTheCpu) {
  const KernelRow<LinearSpec>* const simt = row_of("sm80_linear_simt");
  if (simt == nullptr) GTEST_SKIP() << "needs: a build with CUDA";
  if (const std::string reason = simt->unavailable(); !reason.empty()) GTEST_SKIP() << "needs: " << reason;
  if (targets_here().front() > HWY_AVX2) GTEST_SKIP() << "needs: a CPU with fused multiply-adds";
  const auto expect_same = [&](const LinearSpec& spec, std::int64_t rows, std::int64_t gap) {
    const LinearData data = linear_data(spec, rows, 13);
    const std::vector<std::byte> expected = multiplied(*row_of("cpu_linear"), data, {.threads = 8, .cuts = {}});
    EXPECT_EQ(first_difference(data, multiplied(*simt, data, {.threads = 1, .cuts = {}, .gap = gap}), expected), "")
        << rows << ", " << describe(spec);
    if (spec.parallel == LinearParallel::kNone) return;
    EXPECT_EQ(first_difference(data, multiplied_in_parts(*simt, data, 3), expected), "")
        << rows << ", " << describe(spec);
  };
  for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
    // Whole splits, tails of M, N and K, more splits than a CTA has warps, and fewer elements than a stage.
    for (const auto& [k, n] : {std::pair{4096, 256}, {4102, 331}, {9 * kLinearSplit + 5, 40}, {7, 65}}) {
      for (const std::int64_t rows : {1, 2, 3, 7, 16, 24, 33, 90, 300}) {
        const LinearSpec spec{Dtype::kF32, WeightFormat::kFloat, k, n, {}, false, rows % 3 == 0, parallel};
        expect_same(spec, rows, rows % 2);
      }
    }
    expect_same({Dtype::kF32, WeightFormat::kFloat, 2056, 4096, {}, false, false, parallel}, 1500, 0);
  }
  // The tiles of a gated layer, against rows alone.
  for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
    LinearSpec spec{Dtype::kF32, WeightFormat::kFloat, 2056, 1500, LinearActivation::kSilu, true, true, parallel};
    for (const std::int64_t rows : {150, 1500}) {
      const LinearData data = linear_data(spec, rows, 14);
      const LinearArrangement alone{.cuts = {1, 2, 9, 25}};
      EXPECT_EQ(first_difference(data, multiplied(*simt, data), multiplied(*simt, data, alone)), "") << describe(spec);
    }
  }
}

// The CPU kernel with vectors of every width, and with tiles.
TEST(CpuLinear, IsAccurateOnEveryTarget) {
  const KernelRow<LinearSpec>& row = kernel_table<LinearSpec>().back();
  ASSERT_EQ(row.name, "cpu_linear");
  for (const SimdTarget& target : attention_targets_here()) {
    const ForcedTarget forced(target);
    for (const WeightFormat format : kFormats) {
      for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
        LinearSpec spec{dtype, format, 1152, 45, LinearActivation::kSilu, true, true, LinearParallel::kRow};
        const LinearData data = linear_data(spec, 15, 10);
        const std::vector<std::byte> y = multiplied(row, data);
        EXPECT_EQ(first_inaccuracy(data, y), "") << describe(spec) << ", " << ringattn::describe(target);
        EXPECT_EQ(first_difference(data, multiplied(row, data, {.threads = 2, .cuts = {1, 6}, .gap = 3}), y), "");
        for (const int devices : {2, 3, 5}) {
          EXPECT_EQ(first_difference(data, multiplied_in_parts(row, data, devices), y), "")
              << ringattn::describe(target);
        }
      }
    }
  }
}

// Tiles: whole and partial ones of rows, columns and K, several blocks of rows, panels of any width, and every number
// of threads.
TEST(CpuLinear, TilesHaveTheBitsOfRowsAlone) {
  if (!cpu::has_amx_bf16()) GTEST_SKIP() << "needs: a processor with AMX";
  const KernelRow<LinearSpec>& row = kernel_table<LinearSpec>().back();
  for (const WeightFormat format : kFormats) {
    for (const auto& [k, n, rows] : {std::tuple{2176, 330, 70}, {128, 32, 545}, {256, 520, 33}}) {
      LinearSpec spec{Dtype::kBf16, format, k, n};
      LinearData data = linear_data(spec, rows, 15);
      data.set_x(rows - 1, k - 1, kNan);
      const std::vector<std::byte> y = multiplied(row, data);
      EXPECT_EQ(first_inaccuracy(data, y), "") << describe(spec);
      for (const int threads : {2, 3, 8}) {
        for (const std::vector<std::int64_t>& cuts : {std::vector<std::int64_t>{}, {1, 2, 18, 32}}) {
          const LinearArrangement arrangement{.threads = threads, .cuts = cuts, .gap = threads % 2};
          EXPECT_EQ(first_difference(data, multiplied(row, data, arrangement), y), "") << describe(spec);
        }
      }
    }
  }
}

// Integers have one sum.
TEST(CpuLinear, Int8HasTheSameBitsOnEveryTarget) {
  const KernelRow<LinearSpec>& row = kernel_table<LinearSpec>().back();
  const LinearSpec spec{Dtype::kBf16, WeightFormat::kInt8, 1100, 70};
  const LinearData data = linear_data(spec, 40, 16);
  std::vector<std::byte> y;
  for (const SimdTarget& target : attention_targets_here()) {
    const ForcedTarget forced(target);
    const std::vector<std::byte> found = multiplied(row, data);
    if (y.empty()) y = found;
    EXPECT_EQ(first_difference(data, found, y), "") << ringattn::describe(target);
  }
}

TEST(LinearLeaves, DivideUnitsEvenly) {
  for (const std::int64_t unit : {16, 128}) {
    for (const std::int64_t features : {1, 16, 40, 2048, 4096, 11008, 14336, 14337}) {
      EXPECT_EQ(leaf_begin(features, unit, 0), 0);
      EXPECT_EQ(leaf_begin(features, unit, kLinearLeaves), features);
      for (int leaf = 0; leaf < kLinearLeaves; ++leaf) {
        const std::int64_t begin = leaf_begin(features, unit, leaf);
        const std::int64_t length = leaf_begin(features, unit, leaf + 1) - begin;
        EXPECT_TRUE(begin % unit == 0 || begin == features);
        EXPECT_LE(std::abs(length - features / kLinearLeaves), unit) << features << " in units of " << unit;
        if (features % (kLinearLeaves * unit) == 0) {
          EXPECT_EQ(length, features / kLinearLeaves);
        }
      }
    }
  }
}

TEST(LinearLeaves, AreCoveredByTheLargestAlignedNodes) {
  for (int begin = 0; begin <= kLinearLeaves; ++begin) {
    for (int end = begin; end <= kLinearLeaves; ++end) {
      int leaf = begin;
      const std::vector<int> nodes = aligned_nodes({begin, end});
      for (const int node : nodes) {
        int first = node;
        int leaves = 1;
        for (; first < kLinearLeaves; first *= 2) leaves *= 2;
        EXPECT_EQ(first - kLinearLeaves, leaf);
        leaf += leaves;
        // Its parent has leaves that are not in the range.
        const int sibling = node ^ 1;
        EXPECT_TRUE(node == 1 || std::ranges::find(nodes, sibling) == nodes.end());
      }
      EXPECT_EQ(leaf, end);
    }
  }
  EXPECT_EQ(aligned_nodes({2, 5}), (std::vector<int>{5, 12}));
}

// What other systems compute from int4 weights is a rounding of each weight away.
TEST(LinearOracle, TellsTheMeaningsOfInt4Apart) {
  const LinearSpec spec{Dtype::kBf16, WeightFormat::kInt4, 1024, 16};
  const LinearData data = linear_data(spec, 4, 9);
  double distance = 0.0;
  double size = 0.0;
  for (std::int64_t row = 0; row < data.rows; ++row) {
    const LinearOracleRow exact = linear_oracle(spec, data.weights(), data.x_view(), row);
    const LinearOracleRow rounded = linear_oracle(spec, data.weights(), data.x_view(), row, Int4Meaning::kDequantized);
    for (std::size_t n = 0; n < exact.y.size(); ++n) {
      distance += std::pow(exact.y[n] - rounded.y[n], 2.0);
      size += exact.y[n] * exact.y[n];
    }
  }
  const double relative = std::sqrt(distance / size);
  ::testing::Test::RecordProperty("relative_distance", fmt::format("{}", relative));
  EXPECT_GT(relative, 1e-4);
  EXPECT_LT(relative, 0x1p-8);
}

}  // namespace
}  // namespace ringattn::testing
