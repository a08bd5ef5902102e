// SPDX-License-Identifier: Apache-2.0
// The tests of kernels can fail: one that compares nothing does, what compares counts itself, and every row of the
// table has shapes, also a row that can do little.
#include <gtest/gtest-spi.h>

#include <algorithm>
#include <limits>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"

namespace ringattn::testing {
namespace {

// A row that can do what sm80_attention and sm90_attention can, in every build.
std::vector<std::string> missing_of_tensor_cores(const AttentionSpec& spec) {
  const std::pair<int, int> dims{spec.head_dim, spec.head_dim_v};
  constexpr std::pair<int, int> kAble[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
  if (spec.dtype == Dtype::kF32 || std::ranges::find(kAble, dims) == std::end(kAble)) return {"something"};
  return {};
}
std::vector<std::string> missing_everything(const AttentionSpec&) { return {"everything"}; }

// It runs everywhere, and no row uses a key that it doesn't see.
const AttentionRow& cpu_row() {
  return *std::ranges::find(kernel_table<AttentionSpec>(), "cpu_attention", &AttentionRow::name);
}

AttentionRow row_with(std::vector<std::string> (*missing)(const AttentionSpec&)) {
  AttentionRow row = cpu_row();
  row.missing = missing;
  return row;
}

AttentionInputs small_inputs() {
  return random_inputs(make_spec(usual_dims(cpu_row()).front(), 2, 1, {-1, 0}), {{3, 5, 2}}, 1);
}

TEST(Checks, ATestThatComparesNothingFails) {
  EXPECT_NONFATAL_FAILURE(expect_checks("a row", 0), "compared nothing on a row");
}

TEST(Checks, ComparisonsCountThemselves) {
  const AttentionInputs inputs = small_inputs();
  const AttentionResult result = attend_with(cpu_row(), inputs);
  const std::int64_t before = checks_made();
  EXPECT_EQ(check_accuracy(inputs, result.out, result.lse), "");
  EXPECT_EQ(checks_made(), before + 1);
  EXPECT_TRUE(result.same_bits(result));
  EXPECT_EQ(checks_made(), before + 2);
}

TEST(Checks, ComparisonsOfNothingDoNotCount) {
  AttentionInputs inputs = small_inputs();
  inputs.sequences.clear();
  const std::int64_t before = checks_made();
  EXPECT_EQ(check_accuracy(inputs, {}, {}), "");
  EXPECT_TRUE(AttentionResult().same_bits({}));
  EXPECT_EQ(checks_made(), before);
}

// A result that is wrong in one element, or where the oracle has NaN, is found.
TEST(Checks, WrongResultsAreFound) {
  const AttentionInputs inputs = small_inputs();
  const AttentionResult right = attend_with(cpu_row(), inputs);
  const Dtype dtype = inputs.spec.dtype;
  for (const float value : {100.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    AttentionResult wrong = right;
    store_element(wrong.out.data() + 7 * size_of(dtype), dtype, value);
    EXPECT_FALSE(wrong.same_bits(right));
    EXPECT_NE(check_accuracy(inputs, wrong.out, wrong.lse), "") << value;
    wrong = right;
    wrong.lse[2] = value;
    EXPECT_FALSE(wrong.same_bits(right));
    EXPECT_NE(check_accuracy(inputs, wrong.out, wrong.lse), "") << value;
  }
}

// Where rows share tiles of keys, a value that is not finite makes every row that uses its tile not finite, and no
// other.
TEST(Checks, ValuesThatAreNotFiniteTaintTheirTile) {
  AttentionInputs inputs = small_inputs();  // rows at 2, 3 and 4 of 5 keys
  inputs.set_v(4, 0, 1, std::numeric_limits<float>::infinity());
  const AttentionResult exact = attend_with(cpu_row(), inputs);
  EXPECT_EQ(check_accuracy(inputs, exact.out, exact.lse), "");
  // Two key tiles of 4 keys; rows 2 and 3 are of one query tile, row 4 of another.
  EXPECT_EQ(check_accuracy(inputs, exact.out, exact.lse, {2, 4}), "");
  EXPECT_NE(check_accuracy(inputs, exact.out, exact.lse, {4, 8}), "");  // one tile: rows 2 and 3 use it too
  AttentionResult tainted = exact;
  const auto row = static_cast<std::size_t>(inputs.spec.head_dim_v) * size_of(inputs.spec.dtype);
  for (std::size_t i = 0; i < 4; ++i) {  // rows 2 and 3, two heads
    store_element(tainted.out.data() + i * row + size_of(inputs.spec.dtype), inputs.spec.dtype,
                  std::numeric_limits<float>::quiet_NaN());
  }
  EXPECT_EQ(check_accuracy(inputs, tainted.out, tainted.lse, {4, 8}), "");
  EXPECT_NE(check_accuracy(inputs, tainted.out, tainted.lse, {2, 4}), "");
  EXPECT_NE(check_accuracy(inputs, tainted.out, tainted.lse), "");
}

TEST(Checks, EveryRowHasShapes) {
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    SCOPED_TRACE(row.name);
    EXPECT_FALSE(usual_dims(row).empty());
    EXPECT_FALSE(unequal_dims(row).empty());
    EXPECT_GE(varied_dims(row).size(), usual_dims(row).size() + unequal_dims(row).size());
  }
}

TEST(Checks, ShapesAreTheRowsOwn) {
  AttentionRow row = row_with(missing_of_tensor_cores);
  row.backend = "cuda";  // CPUs have fewer
  using List = std::vector<Dims>;
  EXPECT_EQ(usual_dims(row), (List{{Dtype::kBf16, 64, 64}, {Dtype::kF16, 64, 64}}));
  EXPECT_EQ(unequal_dims(row), (List{{Dtype::kBf16, 192, 128}, {Dtype::kF16, 192, 128}}));
  EXPECT_EQ(all_dims(row).size(), 10U);
  EXPECT_EQ(varied_dims(row).size(), 4U + 3U);  // and 96, 128 and 256 in bf16
  EXPECT_FALSE(usual_dims(row, Dtype::kF32));
  EXPECT_THROW(usual_dims(row_with(missing_everything)), std::logic_error);
}

}  // namespace
}  // namespace ringattn::testing
