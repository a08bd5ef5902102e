// SPDX-License-Identifier: Apache-2.0
// Linear layers through the C interface: the bits of C++ for each format of weights, stacked or in two tensors, and
// refusals.
#include "ops/linear/linear.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kLayerTokens = 7, kFeatures = 256, kColumns = 24, kGroups = kFeatures / kInt4Group;
const DLDataType kLayerDtype = c_dtype(Dtype::kF32);

// Weights of a gated layer with a bias, in every format: the gate matrix, then the up matrix.
struct Stacked {
  explicit Stacked(WeightFormat of) : format(of) {
    std::mt19937 random(3);
    values.resize(static_cast<std::size_t>(2 * kColumns * row_bytes()));
    if (format == WeightFormat::kFloat) {
      const Numbers numbers = normal(2 * kColumns * kFeatures, 2);
      std::memcpy(values.data(), numbers.data(), values.size());
    } else {
      for (auto& value : values) value = static_cast<std::uint8_t>(random());
    }
    for (auto& zero : zeros) zero = static_cast<std::uint8_t>(random() % 16);
  }

  std::int64_t row_bytes() const {
    return format == WeightFormat::kFloat ? 4 * kFeatures : format == WeightFormat::kInt8 ? kFeatures : kFeatures / 2;
  }
  std::int64_t row_scales() const { return format == WeightFormat::kInt8 ? 1 : kGroups; }
  LinearMatrix matrix(std::int64_t first) const {
    LinearMatrix matrix;
    matrix.data = values.data() + first * row_bytes();
    matrix.row_stride = row_bytes();
    if (format != WeightFormat::kFloat) matrix.scales = scales.data() + first * row_scales();
    if (format == WeightFormat::kInt4) {
      matrix.zeros = zeros.data() + first * kGroups;
      matrix.group_stride = kGroups;
    }
    matrix.bias = bias.data() + first;
    return matrix;
  }

  WeightFormat format;
  std::vector<std::uint8_t> values;
  Numbers scales = normal(2 * kColumns * kGroups, 4), bias = normal(2 * kColumns, 5);
  std::vector<std::uint8_t> zeros = std::vector<std::uint8_t>(2 * kColumns * kGroups);
};

ringattn_linear_spec layer_spec(WeightFormat format) {
  auto spec = sized<ringattn_linear_spec>();
  spec.dtype = kLayerDtype;
  spec.weights = static_cast<std::int32_t>(format);
  spec.in_features = kFeatures;
  spec.out_features = kColumns;
  spec.activation = "swiglu";
  spec.bias = 1;
  spec.parallel = RINGATTN_PARALLEL_ROW;
  spec.max_tokens = kLayerTokens;
  return spec;
}

// The tensors of rows [first, first + rows) of stacked weights.
struct Tensors {
  Tensors(const Stacked& of, std::int64_t first, std::int64_t rows)
      : weight(of.values.data() + first * of.row_bytes(),
               of.format == WeightFormat::kFloat  ? kLayerDtype
               : of.format == WeightFormat::kInt8 ? DLDataType{kDLInt, 8, 1}
                                                  : DLDataType{kDLUInt, 8, 1},
               {rows, of.format == WeightFormat::kInt4 ? kFeatures / 2 : kFeatures}),
        scales(of.scales.data() + first * of.row_scales(), kLayerDtype,
               of.format == WeightFormat::kInt8 ? std::vector<std::int64_t>{rows}
                                                : std::vector<std::int64_t>{rows, kGroups}),
        zeros(of.zeros.data() + first * kGroups, {kDLUInt, 8, 1}, {rows, kGroups}),
        bias(of.bias.data() + first, kLayerDtype, {rows}) {}

  CTensor weight, scales, zeros, bias;
};

TEST(CLinear, HasTheBitsOfCpp) {
  const Numbers x = normal(kLayerTokens * kFeatures, 1);
  CTensor tx(x.data(), kLayerDtype, {kLayerTokens, 1, kFeatures});
  for (const WeightFormat format : {WeightFormat::kFloat, WeightFormat::kInt8, WeightFormat::kInt4}) {
    const Stacked stacked(format);
    Numbers out(kLayerTokens * kColumns);
    const auto transport = make_self_transport();
    LinearJob job;
    job.spec = {Dtype::kF32, format, kFeatures, kColumns, LinearActivation::kSilu, true, true, LinearParallel::kRow};
    job.max_tokens = kLayerTokens;
    Linear cpp(job, *transport, {});
    cpp.load({stacked.matrix(0), stacked.matrix(kColumns)});
    cpp.run(view(x, kLayerTokens, 1, kFeatures), view(out, kLayerTokens, 1, kColumns));

    SelfWorld world;
    const ringattn_linear_spec spec = layer_spec(format);
    ringattn_linear* linear = nullptr;
    ASSERT_EQ(ringattn_linear_create(world.get(), &spec, nullptr, &linear), RINGATTN_OK) << ringattn_error_text();
    auto facts = sized<ringattn_linear_facts>();
    EXPECT_OK(ringattn_linear_get_facts(linear, &facts));
    EXPECT_STREQ(facts.kernel, cpp.kernel().row->name.data());
    EXPECT_EQ(facts.features_end - facts.features_begin, kFeatures);
    EXPECT_EQ(facts.columns_end - facts.columns_begin, kColumns);
    EXPECT_EQ(facts.memory_bytes, cpp.memory_bytes());
    std::int64_t first = -1, count = -1;
    EXPECT_OK(ringattn_linear_tokens(linear, kLayerTokens, &first, &count));
    EXPECT_EQ(first, 0);
    EXPECT_EQ(count, kLayerTokens);
    for (const bool two : {false, true}) {
      Tensors gate(stacked, 0, two ? kColumns : 2 * kColumns), up(stacked, kColumns, kColumns);
      auto weights = sized<ringattn_linear_weights>();
      weights.weight = gate.weight.get();
      weights.bias = gate.bias.get();
      if (format != WeightFormat::kFloat) weights.scales = gate.scales.get();
      if (format == WeightFormat::kInt4) weights.zeros = gate.zeros.get();
      if (two) {
        weights.up_weight = up.weight.get();
        weights.up_bias = up.bias.get();
        if (format != WeightFormat::kFloat) weights.up_scales = up.scales.get();
        if (format == WeightFormat::kInt4) weights.up_zeros = up.zeros.get();
      }
      EXPECT_OK(ringattn_linear_load(linear, &weights));
      Numbers y(out.size(), -1.0F);
      CTensor ty(y.data(), kLayerDtype, {kLayerTokens, 1, kColumns});
      const ringattn_linear_tensors tensors = {sizeof tensors, tx.get(), ty.get(), nullptr};
      EXPECT_OK(two ? ringattn_linear_enqueue(linear, &tensors) : ringattn_linear_run(linear, &tensors));
      EXPECT_OK(ringattn_linear_wait(linear));
      EXPECT_TRUE(same(y, out)) << format_name(format) << (two ? ", two matrices" : ", stacked");
    }
    ringattn_linear_destroy(linear);
  }
}

TEST(CLinear, RefusesWhatDoesNotFit) {
  SelfWorld world;
  ringattn_linear* linear = nullptr;
  const auto not_made = [&](const auto& change, ringattn_status status, const std::string& words) {
    ringattn_linear_spec spec = layer_spec(WeightFormat::kInt4);
    change(spec);
    EXPECT_EQ(ringattn_linear_create(world.get(), &spec, nullptr, &linear), status) << words;
    EXPECT_NE(std::string(ringattn_error_text()).find(words), std::string::npos) << ringattn_error_text();
    EXPECT_EQ(linear, nullptr);
  };
  not_made([](auto& spec) { spec.dtype = kInt32; }, RINGATTN_USAGE, "dtype is int32");
  not_made([](auto& spec) { spec.weights = 3; }, RINGATTN_USAGE, "weights 3 is not known");
  not_made([](auto& spec) { spec.parallel = -1; }, RINGATTN_USAGE, "parallel -1 is not known");
  not_made([](auto& spec) { spec.output = 3; }, RINGATTN_USAGE, "output 3 is not known");
  not_made([](auto& spec) { spec.activation = "relu"; }, RINGATTN_USAGE, "activation relu is not known");
  not_made([](auto& spec) { spec.in_features = 0; }, RINGATTN_USAGE, "a linear layer of 0 to 24 features");
  not_made([](auto& spec) { spec.max_tokens = 0; }, RINGATTN_USAGE, "a linear layer of no tokens");
  not_made([](auto& spec) { spec.in_features = 200; }, RINGATTN_UNSUPPORTED, "128");

  const ringattn_linear_spec spec = layer_spec(WeightFormat::kInt4);
  ASSERT_EQ(ringattn_linear_create(world.get(), &spec, nullptr, &linear), RINGATTN_OK) << ringattn_error_text();
  Numbers x = normal(kLayerTokens * kFeatures, 1), y(kLayerTokens * kColumns, -1.0F);
  CTensor tx(x.data(), kLayerDtype, {kLayerTokens, 1, kFeatures}),
      ty(y.data(), kLayerDtype, {kLayerTokens, 1, kColumns});
  ringattn_linear_tensors tensors = {sizeof tensors, tx.get(), ty.get(), nullptr};
  const auto not_run = [&](const std::string& words) {
    EXPECT_EQ(ringattn_linear_run(linear, &tensors), RINGATTN_USAGE) << words;
    EXPECT_NE(std::string(ringattn_error_text()).find(words), std::string::npos) << ringattn_error_text();
  };
  not_run("a linear layer without weights");

  const Stacked stacked(WeightFormat::kInt4);
  Tensors whole(stacked, 0, 2 * kColumns), half(stacked, 0, kColumns);
  CTensor bytes(stacked.values.data(), {kDLInt, 8, 1}, {2 * kColumns, kFeatures / 2});
  CTensor apart(stacked.scales.data(), kLayerDtype, {2 * kColumns, kGroups}, {1, 2 * kColumns});
  const auto not_loaded = [&](const auto& change, const std::string& words) {
    auto weights = sized<ringattn_linear_weights>();
    weights.weight = whole.weight.get();
    weights.scales = whole.scales.get();
    weights.zeros = whole.zeros.get();
    weights.bias = whole.bias.get();
    change(weights);
    EXPECT_EQ(ringattn_linear_load(linear, &weights), RINGATTN_USAGE) << words;
    EXPECT_NE(std::string(ringattn_error_text()).find(words), std::string::npos) << ringattn_error_text();
  };
  not_loaded([](auto& weights) { weights.weight = nullptr; }, "weight is NULL");
  not_loaded([](auto& weights) { weights.scales = nullptr; }, "scales is NULL");
  not_loaded([](auto& weights) { weights.bias = nullptr; }, "bias is NULL");
  not_loaded([&](auto& weights) { weights.weight = half.weight.get(); },
             "weight is [24, 128] (it should be [48, 128])");
  not_loaded([&](auto& weights) { weights.weight = bytes.get(); }, "weight holds int8 (it should hold uint8)");
  not_loaded([&](auto& weights) { weights.scales = apart.get(); }, "scales is not dense");
  not_loaded([&](auto& weights) { weights.zeros = half.zeros.get(); }, "zeros is [24, 2]");
  not_loaded([&](auto& weights) { weights.up_scales = half.scales.get(); }, "up_scales is given (up_weight is NULL)");
  not_run("a linear layer without weights");

  auto weights = sized<ringattn_linear_weights>();
  weights.weight = whole.weight.get();
  weights.scales = whole.scales.get();
  weights.bias = whole.bias.get();
  EXPECT_OK(ringattn_linear_load(linear, &weights));
  EXPECT_OK(ringattn_linear_run(linear, &tensors));
  CTensor narrow(x.data(), kLayerDtype, {kLayerTokens, 1, kFeatures - 1});
  tensors.x = narrow.get();
  not_run("x has 255 features");
  CTensor long_x(x.data(), kLayerDtype, {kLayerTokens + 1, 1, kFeatures}, {0, kFeatures, 1});
  tensors.x = long_x.get();
  not_run("x has 8 tokens");
  CTensor inside(x.data(), kLayerDtype, {kLayerTokens, 1, kColumns});
  tensors.x = tx.get();
  tensors.y = inside.get();
  not_run("y overlaps x");
  std::int64_t first = 0, count = 0;
  EXPECT_EQ(ringattn_linear_tokens(linear, -1, &first, &count), RINGATTN_USAGE);
  ringattn_linear_destroy(linear);
}

}  // namespace
}  // namespace ringattn::testing
