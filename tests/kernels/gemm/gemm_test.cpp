// SPDX-License-Identifier: Apache-2.0
// Batched GEMM, each head with its own matrix: every kernel of the table against sums in fp64, and with the same bits
// however rows and heads are cut, wherever they lie, whichever way round the matrices are, and with any threads.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gemm_runner.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn {
inline void PrintTo(const BatchedGemmRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

class BatchedGemm : public ::testing::TestWithParam<BatchedGemmRow> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const BatchedGemmRow& row() const { return GetParam(); }

  // The specs of a fixed list that the kernel supports. For both dim_k and dim_n, those of a latent come first.
  std::vector<BatchedGemmSpec> specs() const {
    constexpr std::pair<int, int> kDims[] = {{512, 128}, {128, 512}, {64, 64}, {192, 40}, {8, 8}, {576, 24}, {24, 136}};
    std::vector<BatchedGemmSpec> able;
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      for (const auto& [dim_k, dim_n] : kDims) {
        if (row().missing({dtype, dim_k, dim_n}).empty()) able.push_back({dtype, dim_k, dim_n});
      }
    }
    return able;
  }

  void expect_same(const GemmInputs& inputs, const GemmLayout& layout, const std::vector<std::byte>& expected) const {
    count_check();
    EXPECT_EQ(first_difference(inputs, multiplied(row(), inputs, layout), expected), "")
        << describe(inputs.spec) << ", " << inputs.rows << " rows; " << describe(layout);
  }

 private:
  std::int64_t checks_before_ = 0;
};

TEST_P(BatchedGemm, IsAccurate) {
  for (const BatchedGemmSpec& spec : specs()) {
    for (const bool shared : {false, true}) {
      const GemmInputs inputs = normal_gemm_inputs(spec, 29, 3, shared, 1);
      expect_accurate_gemm(inputs, multiplied(row(), inputs));
    }
  }
}

// Sums of small integers are exact in fp32 in any order: what is left is one rounding to nearest even.
TEST_P(BatchedGemm, RoundsOnceToNearestEven) {
  for (const BatchedGemmSpec& spec : specs()) {
    // With the second scale fp16's results are subnormal.
    for (const float scale : {1.0F, 0x1p-13F}) {
      if (scale < 1.0F && spec.dim_k > 64) continue;
      std::mt19937_64 generator(2);
      const auto next = [&] { return scale * static_cast<float>(static_cast<int>(generator() % 15) - 7); };
      const GemmInputs inputs = gemm_inputs(spec, 70, 2, false, next);
      std::vector<std::byte> expected(static_cast<std::size_t>(70 * 2 * spec.dim_n) * size_of(spec.dtype));
      bool rounds = false;
      for (std::int64_t i = 0; i < 70 * 2 * spec.dim_n; ++i) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < spec.dim_k; ++k) {
          sum += static_cast<double>(inputs.left_at(i / spec.dim_n / 2, i / spec.dim_n % 2, k)) *
                 inputs.right_at(i / spec.dim_n % 2, i % spec.dim_n, k);
        }
        std::byte* const at = expected.data() + static_cast<std::size_t>(i) * size_of(spec.dtype);
        store_element(at, spec.dtype, static_cast<float>(sum));
        rounds |= load_element(at, spec.dtype) != static_cast<float>(sum);
      }
      EXPECT_TRUE(rounds || spec.dtype != Dtype::kBf16 || spec.dim_k < 64) << "nothing was rounded";
      count_check();
      EXPECT_EQ(first_difference(inputs, multiplied(row(), inputs), expected), "")
          << describe(spec) << ", scale " << scale;
    }
  }
}

TEST_P(BatchedGemm, RowsCutAnywhereHaveTheSameBits) {
  for (const BatchedGemmSpec& spec : specs()) {
    const bool latent = spec.dim_k * spec.dim_n == 512 * 128;
    for (const std::int64_t rows : {1, 3, 127, 128, 129, 1000}) {
      if (rows == 1000 && !(latent && spec.dtype == Dtype::kBf16)) continue;
      const GemmInputs inputs = normal_gemm_inputs(spec, rows, 2, rows % 2 == 0, 3);
      const std::vector<std::byte> whole = multiplied(row(), inputs);
      if (rows == 3) expect_same(inputs, {.cuts = {1, 2}}, whole);
      if (rows > 3) expect_same(inputs, {.cuts = {1, 13, 64, 77, rows - 1}}, whole);
      expect_same(inputs, {.threads = 2}, whole);
      expect_same(inputs, {.threads = 5, .cuts = {rows / 2}, .gap = 24}, whole);
    }
  }
}

// GPUs take tiles of several sizes, by the number of rows.
TEST_P(BatchedGemm, AnyNumberOfRowsHasTheSameBits) {
  for (const BatchedGemmSpec& spec : specs()) {
    if (spec.dim_k * spec.dim_n != 512 * 128) continue;
    for (const bool shared : {false, true}) {
      const GemmInputs inputs = normal_gemm_inputs(spec, 1100, 2, shared, 8);
      const std::vector<std::byte> whole = multiplied(row(), inputs);
      for (const std::int64_t rows : {1, 2, 63, 64, 65, 127, 128, 129, 1000}) {
        expect_same(inputs, {.cuts = {rows}, .transposed = rows % 2 == 0}, whole);
      }
    }
  }
}

// Work enough for the largest tiles, and several of them per SM.
TEST_P(BatchedGemm, ManyTilesHaveTheSameBits) {
  for (const BatchedGemmSpec& spec : specs()) {
    if (spec.dim_k != 128) continue;
    for (const bool shared : {false, true}) {
      const GemmInputs inputs = normal_gemm_inputs(spec, 1283, 20, shared, 9);
      const std::vector<std::byte> whole = multiplied(row(), inputs, {.threads = 2});
      expect_same(inputs, {.threads = 2, .cuts = {64, 128, 1000}}, whole);
      expect_same(inputs, {.threads = 2, .transposed = true}, whole);
    }
  }
}

// Nothing needs to lie at multiples of more than an element.
TEST_P(BatchedGemm, UnalignedViewsHaveTheSameBits) {
  for (const BatchedGemmSpec& spec : specs()) {
    for (const std::int64_t rows : {3, 129}) {
      const GemmInputs inputs = normal_gemm_inputs(spec, rows, 3, rows == 3, 10);
      const std::vector<std::byte> whole = multiplied(row(), inputs);
      for (const bool transposed : {false, true}) {
        expect_same(inputs, {.transposed = transposed, .shift = 1}, whole);
        expect_same(inputs, {.transposed = transposed, .gap = 3}, whole);
        expect_same(inputs, {.transposed = transposed, .gap = 4, .shift = 2, .weight_gap = 1}, whole);
        expect_same(inputs, {.transposed = transposed, .weight_gap = 8}, whole);
      }
    }
  }
}

TEST_P(BatchedGemm, HeadsAndLayoutsHaveTheSameBits) {
  for (const BatchedGemmSpec& spec : specs()) {
    for (const bool shared : {false, true}) {
      const GemmInputs inputs = normal_gemm_inputs(spec, 61, 5, shared, 4);
      const std::vector<std::byte> all = multiplied(row(), inputs);
      expect_same(inputs, {.head_by_head = true}, all);
      expect_same(inputs, {.transposed = true}, all);
      expect_same(inputs, {.threads = 2, .head_by_head = true, .transposed = true, .gap = 64}, all);
    }
  }
}

// A head's outputs may be the first columns of wider rows: the columns after them stay unchanged.
TEST_P(BatchedGemm, WritesIntoTheFirstColumnsOfWiderRows) {
  for (const BatchedGemmSpec& spec : specs()) {
    const GemmInputs inputs = normal_gemm_inputs(spec, 17, 3, false, 5);
    expect_same(inputs, {.threads = 3, .gap = 64}, multiplied(row(), inputs));
  }
}

TEST_P(BatchedGemm, NanAndInfinityStayInTheirRowsAndColumns) {
  for (const BatchedGemmSpec& spec : specs()) {
    const GemmInputs clean = normal_gemm_inputs(spec, 19, 2, false, 6);
    for (const float value : {kNan, kInfinity, -kInfinity}) {
      GemmInputs inputs = clean;
      inputs.set_left(7, 1, spec.dim_k - 1, value);
      inputs.set_left(12, 0, 0, value);
      inputs.set_right(0, 5, 3, value);
      inputs.set_right(0, 5, 4, -value);  // against the other
      inputs.set_right(1, 2, spec.dim_k - 1, 0.0F);
      const std::vector<std::byte> out = multiplied(row(), inputs);
      expect_accurate_gemm(inputs, out);
      for (const GemmLayout& layout :
           {GemmLayout{.cuts = {1, 8, 13}}, {.threads = 2, .head_by_head = true, .transposed = true}}) {
        expect_same(inputs, layout, out);
      }
    }
  }
}

// Whatever made it: NaN of any payload, ∞ − ∞, 0 · ∞.
TEST_P(BatchedGemm, OneNanLeaves) {
  for (const BatchedGemmSpec& spec : specs()) {
    GemmInputs inputs = normal_gemm_inputs(spec, 5, 1, false, 11);
    inputs.set_left(0, 0, 0, kNan);
    const std::uint16_t payload = spec.dtype == Dtype::kBf16 ? 0xff91 : 0xfd23;
    if (spec.dtype != Dtype::kF32) {
      std::memcpy(inputs.left.data() + size_of(spec.dtype) * static_cast<std::size_t>(spec.dim_k), &payload, 2);
    }
    inputs.set_left(2, 0, 1, kInfinity);
    inputs.set_left(2, 0, 2, -kInfinity);
    for (std::int64_t o = 0; o < spec.dim_n; ++o) {
      inputs.set_right(0, o, 1, 1.0F);
      inputs.set_right(0, o, 2, 1.0F);
      inputs.set_right(0, o, 3, 0.0F);
    }
    inputs.set_left(3, 0, 3, -kInfinity);
    const std::vector<std::byte> out = multiplied(row(), inputs);
    const std::size_t element = size_of(spec.dtype);
    count_check();
    for (std::int64_t i = 0; i < 5 * spec.dim_n; ++i) {
      const std::byte* const at = out.data() + static_cast<std::size_t>(i) * element;
      const bool is_nan = std::isnan(load_element(at, spec.dtype));
      const std::int64_t r = i / spec.dim_n;
      ASSERT_EQ(is_nan, r != 4 && (r != 1 || spec.dtype != Dtype::kF32)) << describe(spec) << ", row " << r;
      if (is_nan) {
        ASSERT_EQ(std::memcmp(at, out.data(), element), 0) << describe(spec) << ", row " << r;
      }
    }
  }
}

// fp32 sums that fp16 has no number for.
TEST_P(BatchedGemm, OverflowGivesInfinity) {
  if (!row().missing({Dtype::kF16, 8, 8}).empty()) GTEST_SKIP() << "needs: a kernel that has fp16";
  for (const BatchedGemmSpec& spec : specs()) {
    if (spec.dtype != Dtype::kF16) continue;
    const GemmInputs inputs = gemm_inputs(spec, 5, 1, false, [] { return 200.0F; });
    const std::vector<std::byte> out = multiplied(row(), inputs);
    count_check();
    for (std::size_t at = 0; at < out.size(); at += 2) ASSERT_EQ(load_element(out.data() + at, spec.dtype), kInfinity);
  }
}

TEST_P(BatchedGemm, NoRowsAtAll) {
  const GemmInputs inputs = normal_gemm_inputs(specs().front(), 0, 2, false, 7);
  EXPECT_TRUE(multiplied(row(), inputs).empty());
  count_check();
}

TEST_P(BatchedGemm, RefusesWhatDoesNotFit) {
  const BatchedGemmSpec spec = specs().front();
  const std::unique_ptr<Backend> backend = row().make_backend({1, 0});
  const std::unique_ptr<BatchedGemmKernel> kernel = row().make_kernel(spec, *backend);
  kernel->reserve(2);
  const BatchedGemmTask fits{dense_view(static_cast<const void*>(nullptr), spec.dtype, 0, 2, spec.dim_k),
                             {nullptr, spec.dtype, 2, spec.dim_n, spec.dim_k, 0, spec.dim_k, 1},
                             dense_view(static_cast<void*>(nullptr), spec.dtype, 0, 2, spec.dim_n)};
  const auto refused = [&](auto change) {
    BatchedGemmTask task = fits;
    change(task);
    count_check();
    EXPECT_EQ(error_of([&] { kernel->multiply(task, backend->stream(), {}); }).code(), ErrorCode::kInternal);
  };
  refused([](BatchedGemmTask& task) { task.rows.heads = 3; });
  refused([](BatchedGemmTask& task) { task.rows.dim += 8; });
  refused([](BatchedGemmTask& task) { task.weights.k_stride = 2; });
  refused([](BatchedGemmTask& task) { task.weights.dim_n += 8; });
  refused([](BatchedGemmTask& task) { task.out.tokens = 1; });
  refused([](BatchedGemmTask& task) { task.out.dtype = Dtype::kF32 == task.out.dtype ? Dtype::kF16 : Dtype::kF32; });
}

INSTANTIATE_TEST_SUITE_P(Kernels, BatchedGemm,
                         ::testing::ValuesIn(kernel_table<BatchedGemmSpec>().begin(),
                                             kernel_table<BatchedGemmSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ringattn::testing
