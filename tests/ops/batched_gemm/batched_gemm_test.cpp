// SPDX-License-Identifier: Apache-2.0
// BatchedGemm over every GEMM kernel: sums in fp64 that are rounded once, the same bits however rows and heads
// are cut and wherever they lie, one object for all of it, also captured and replayed; and what it refuses.
#include "ops/batched_gemm/batched_gemm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/device_array.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gemm_runner.hpp"

namespace ringattn {
inline void PrintTo(const BatchedGemmRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

constexpr std::int64_t kHeads = 5;

class BatchedGemms : public ::testing::TestWithParam<BatchedGemmRow> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
  }

  static BatchedGemm make(const BatchedGemmSpec& spec, int threads = 1, std::int64_t heads = kHeads) {
    const BatchedGemmRow& row = GetParam();
    return {{spec, heads}, {{std::string(row.backend), std::string(row.name)}, threads, 0}};
  }

  // Both GEMMs around a latent, and dims that no tile divides, for each dtype that the kernel supports.
  static std::vector<BatchedGemmSpec> specs() {
    std::vector<BatchedGemmSpec> able;
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      for (const auto& [dim_k, dim_n] : {std::pair{512, 128}, {128, 512}, {24, 136}}) {
        if (GetParam().missing({dtype, dim_k, dim_n}).empty()) able.push_back({dtype, dim_k, dim_n});
      }
    }
    return able;
  }

  static std::vector<std::byte> product_of(BatchedGemm& op, const GemmInputs& inputs, const GemmLayout& layout = {}) {
    const auto enqueue = [&](const BatchedGemmTask& task) { op.enqueue(task, op.backend().stream()); };
    return multiplied_by(enqueue, op.backend(), inputs, layout);
  }
};

TEST_P(BatchedGemms, AreAccurateAndThoseOfTheKernel) {
  ASSERT_FALSE(specs().empty());
  for (const BatchedGemmSpec& spec : specs()) {
    BatchedGemm op = make(spec);
    EXPECT_EQ(op.kernel().row->name, GetParam().name);
    for (const bool shared : {false, true}) {
      const GemmInputs inputs = normal_gemm_inputs(spec, 29, kHeads, shared, 1);
      const std::vector<std::byte> out = product_of(op, inputs);
      expect_accurate_gemm(inputs, out);
      EXPECT_EQ(first_difference(inputs, out, multiplied(GetParam(), inputs)), "") << describe(spec);
    }
  }
}

// One object multiplies any rows, and any of its heads.
TEST_P(BatchedGemms, OfSomeRowsAndHeadsHaveTheBitsOfAll) {
  for (const BatchedGemmSpec& spec : specs()) {
    BatchedGemm op = make(spec, 2);
    BatchedGemm other = std::move(op);
    for (const std::int64_t rows : {1, 7, 130}) {
      const GemmInputs inputs = normal_gemm_inputs(spec, rows, kHeads, rows == 7, 2);
      const std::vector<std::byte> all = product_of(other, inputs);
      std::vector<std::int64_t> one_by_one;
      for (std::int64_t row = 1; row < rows; ++row) one_by_one.push_back(row);
      for (const GemmLayout& layout :
           {GemmLayout{.cuts = one_by_one}, GemmLayout{.head_by_head = true},
            GemmLayout{.cuts = one_by_one, .head_by_head = true, .transposed = true}, GemmLayout{.transposed = true},
            GemmLayout{.transposed = true, .gap = 24, .weight_gap = 8},
            GemmLayout{.gap = 3, .shift = 1, .weight_gap = 5}}) {
        EXPECT_EQ(first_difference(inputs, product_of(other, inputs, layout), all), "")
            << describe(spec) << ", " << rows << " rows, " << describe(layout);
      }
    }
  }
}

TEST_P(BatchedGemms, KeepNanInItsRowAndColumn) {
  for (const BatchedGemmSpec& spec : specs()) {
    BatchedGemm op = make(spec);
    GemmInputs inputs = normal_gemm_inputs(spec, 6, kHeads, false, 3);
    const std::vector<std::byte> clean = product_of(op, inputs);
    inputs.set_left(2, 1, spec.dim_k - 1, std::numeric_limits<float>::quiet_NaN());
    inputs.set_right(3, 5, 0, std::numeric_limits<float>::quiet_NaN());
    const std::vector<std::byte> out = product_of(op, inputs, {.transposed = true});
    const std::size_t element = size_of(spec.dtype);
    for (std::size_t at = 0; at < out.size(); at += element) {
      const auto i = static_cast<std::int64_t>(at / element);
      const std::int64_t row = i / spec.dim_n / kHeads, head = i / spec.dim_n % kHeads, column = i % spec.dim_n;
      if ((row == 2 && head == 1) || (head == 3 && column == 5)) {
        EXPECT_TRUE(std::isnan(load_element(out.data() + at, spec.dtype))) << row << ", " << head << ", " << column;
      } else {
        ASSERT_EQ(std::memcmp(out.data() + at, clean.data() + at, element), 0)
            << describe(spec) << ": row " << row << ", head " << head << ", column " << column;
      }
    }
  }
}

// A device graph captures the GEMM, not its data: a replay reads the rows that are there by then.
TEST_P(BatchedGemms, AreReplayedOverNewRows) {
  for (const BatchedGemmSpec& spec : specs()) {
    for (const std::int64_t rows : {1, 64, 300}) {
      BatchedGemm op = make(spec);
      Backend& backend = op.backend();
      const GemmInputs inputs[] = {normal_gemm_inputs(spec, rows, kHeads, false, 4),
                                   normal_gemm_inputs(spec, rows, kHeads, false, 5)};
      DeviceArray left(backend, inputs[0].left.size()), right(backend, inputs[0].right.size());
      DeviceArray out(backend, static_cast<std::size_t>(rows * kHeads * spec.dim_n) * size_of(spec.dtype));
      const BatchedGemmTask task{
          dense_view(static_cast<const void*>(left.data()), spec.dtype, rows, kHeads, spec.dim_k),
          {right.data(), spec.dtype, kHeads, spec.dim_n, spec.dim_k, spec.dim_n * spec.dim_k, spec.dim_k, 1},
          dense_view(static_cast<void*>(out.data()), spec.dtype, rows, kHeads, spec.dim_n)};
      const Stream stream = backend.stream();
      const auto replay = backend.replay(stream, [&] { op.enqueue(task, stream); });
      for (const GemmInputs& now : inputs) {
        left.write(now.left);
        right.write(now.right);
        out.clear();
        replay->launch();
        EXPECT_EQ(first_difference(now, out.read(), multiplied(GetParam(), now)), "")
            << describe(spec) << ", " << rows << " rows";
      }
      out.clear();
      op.run(task, stream);
      EXPECT_EQ(first_difference(inputs[1], out.read(), multiplied(GetParam(), inputs[1])), "") << describe(spec);
      op.wait();
      if (!backend.enqueues()) continue;
      Error refused(ErrorCode::kInternal, "");
      const auto captured = backend.replay(stream, [&] {
        refused = error_of([&] { op.run(task, stream); });
        op.enqueue(task, stream);
      });
      EXPECT_EQ(refused.code(), ErrorCode::kUnsupported) << refused.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, BatchedGemms,
                         ::testing::ValuesIn(kernel_table<BatchedGemmSpec>().begin(),
                                             kernel_table<BatchedGemmSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

BatchedGemmOptions on_cpu() {
  BatchedGemmOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

TEST(BatchedGemmRefusals, OfJobs) {
  const auto refused = [](const BatchedGemmJob& job, ErrorCode code, const std::string& words,
                          const BatchedGemmOptions& options) {
    const Error error = error_of([&] { BatchedGemm(job, options); });
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  };
  const BatchedGemmSpec spec{Dtype::kBf16, 16, 40};
  refused({spec, 0}, ErrorCode::kUsage, "a batched GEMM of 0 heads", on_cpu());
  refused({spec, 65537}, ErrorCode::kUsage, "a batched GEMM of 65537 heads", on_cpu());
  refused({{Dtype::kBf16, 0, 40}, 2}, ErrorCode::kUsage, "k 0 and n 40", on_cpu());
  refused({{Dtype::kBf16, 16, (1 << 20) + 8}, 2}, ErrorCode::kUsage, "k 16 and n 1048584", on_cpu());
  refused({{Dtype::kBf16, 17, 40}, 2}, ErrorCode::kUnsupported, "k 17 (supported: multiples of 8)", on_cpu());
  refused({{Dtype::kBf16, 16, 4}, 2}, ErrorCode::kUnsupported, "n 4 (supported: multiples of 8)", on_cpu());
  BatchedGemmOptions options = on_cpu();
  options.kernel.kernel = "no_product";
  refused({spec, 2}, ErrorCode::kUsage, "no_product", options);
  options = on_cpu();
  options.threads = -1;
  refused({spec, 2}, ErrorCode::kUsage, "-1 threads are not possible", options);
}

TEST(BatchedGemmRefusals, OfTasks) {
  constexpr std::int64_t kRows = 6, kMatrices = 2;
  BatchedGemm op({{Dtype::kF32, 16, 40}, kMatrices}, on_cpu());
  const std::vector<float> left(kRows * kMatrices * 16, 1.0F);
  std::vector<float> right(kMatrices * 40 * 16, 1.0F), out(kRows * kMatrices * 40, -1.0F);
  const BatchedGemmTask fits{dense_view(static_cast<const void*>(left.data()), Dtype::kF32, kRows, kMatrices, 16),
                             {right.data(), Dtype::kF32, kMatrices, 40, 16, 640, 16, 1},
                             dense_view(static_cast<void*>(out.data()), Dtype::kF32, kRows, kMatrices, 40)};
  const auto refused = [&](const std::function<void(BatchedGemmTask&)>& spoil, const std::string& words) {
    BatchedGemmTask task = fits;
    spoil(task);
    const Error error = error_of([&] { op.enqueue(task); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what() << "\nlacks: " << words;
    EXPECT_EQ(std::ranges::count(out, -1.0F), static_cast<std::int64_t>(out.size())) << words;
  };
  refused([](auto& task) { task.weights = task.weights.transposed(); },
          "weights are fp32 [2, 16, 40] (the batched GEMM was made for fp32 [2, 40, 16], of fewer heads too)");
  refused([](auto& task) { task.weights.heads = 3; }, "weights are fp32 [3, 40, 16]");
  refused([](auto& task) { task.weights.heads = 0; }, "weights are fp32 [0, 40, 16]");
  refused([](auto& task) { task.weights.dtype = Dtype::kBf16; }, "weights are bf16 [2, 40, 16]");
  refused([](auto& task) { task.weights.data = nullptr; }, "weights are missing");
  refused([](auto& task) { task.weights.k_stride = 2; }, "weights have strides 640, 16 and 2");
  refused([](auto& task) { task.rows.heads = 3; }, "rows are fp32 [6, 3, 16] (they should be fp32 [rows, 2 or 1, 16])");
  refused([](auto& task) { task.rows.dim = 40; }, "rows are fp32 [6, 2, 40]");
  refused([](auto& task) { task.rows.dtype = Dtype::kF16; }, "rows are fp16 [6, 2, 16]");
  refused([](auto& task) { task.rows.tokens = task.out.tokens = -1; }, "rows are fp32 [-1, 2, 16]");
  refused([](auto& task) { task.rows.data = nullptr; }, "rows are missing");
  refused([](auto& task) { task.out.tokens = 5; }, "out is fp32 [5, 2, 40] (it should be fp32 [6, 2, 40])");
  refused([](auto& task) { task.out.heads = 1; }, "out is fp32 [6, 1, 40]");
  refused([](auto& task) { task.out.dtype = Dtype::kBf16; }, "out is bf16 [6, 2, 40]");
  refused([](auto& task) { task.out.data = nullptr; }, "out is missing");
  refused([](auto& task) { task.out.token_stride = 0; }, "out has strides 0 and 40");
  refused([](auto& task) { task.out.head_stride = 39; }, "out has strides 80 and 39");
  refused([](auto& task) { task.out.head_stride = 80; }, "out has strides 80 and 80");
  refused([&](auto& task) { task.rows.data = out.data() + 8; }, "out overlaps rows");
  refused([&](auto& task) { task.out.data = right.data() + right.size() - 1; }, "out overlaps weights");
  refused(
      [&](auto& task) {
        task.weights = {right.data(), Dtype::kF32, kMatrices, 40, 16, 640, 1, 40};
        task.out.data = right.data() + 17;
      },
      "out overlaps weights");

  BatchedGemmTask task = fits;
  task.rows.tokens = task.out.tokens = 0;
  task.rows.data = task.out.data = nullptr;
  op.run(task);  // no rows
  op.run(fits);
  EXPECT_EQ(std::ranges::count(out, 16.0F), static_cast<std::int64_t>(out.size()));
  std::ranges::fill(out, -1.0F);
  task = fits;
  task.rows.heads = task.weights.heads = task.out.heads = 1;
  task.out.token_stride = -40;  // backwards, from its last row
  task.out.data = out.data() + (kRows - 1) * 40;
  op.run(task);
  EXPECT_EQ(std::ranges::count(out, 16.0F), kRows * 40);
}

}  // namespace
}  // namespace ringattn::testing
