// SPDX-License-Identifier: Apache-2.0
// The promise on GPUs: dQ, dK, dV and the sinks' gradient of any number of ranks, layout, stripe and block size equal
// those of one rank, byte for byte. Ranks are threads of this process and share the GPUs that there are.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "tests/support/backward_job.hpp"

namespace ringattn {
inline void PrintTo(const KernelRow<AttentionBackwardSpec>& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

using BackwardRow = KernelRow<AttentionBackwardSpec>;

std::vector<BackwardRow> cuda_rows() {
  std::vector<BackwardRow> rows;
  for (const BackwardRow& row : kernel_table<AttentionBackwardSpec>()) {
    if (row.backend == "cuda") rows.push_back(row);
  }
  return rows;
}

class GpuBackward : public ::testing::TestWithParam<BackwardRow> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs a GPU: " << reason;
  }

  void expect_equal_worlds(const BackwardJob& job, const std::vector<int>& worlds) {
    if (!GetParam().missing({job.forward.spec, job.gradients}).empty()) return;
    const BackwardTensors tensors = random_backward_tensors(job.forward, 21);
    Options options;
    options.kernel = {std::string(GetParam().backend), std::string(GetParam().name)};
    const BackwardResult reference = run_gpu_backward(job, options, tensors, 1);
    for (const int world : worlds) {
      for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
        for (const auto& [stripe, block] : std::vector<std::pair<int, int>>{{0, 0}, {128, 256}, {37, 640}}) {
          options.layout = {kind, stripe};
          options.block_tokens = block;
          EXPECT_EQ(run_gpu_backward(job, options, tensors, world).difference(reference), "")
              << describe(job) << ": " << world << " ranks, " << layout_name(kind) << ", stripe " << stripe
              << ", block " << block;
        }
      }
    }
  }
};

TEST_P(GpuBackward, Causal) {
  expect_equal_worlds({{make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0}), uniform_batch(1, 2001, 2001)}}, {1, 2, 3, 5});
}

TEST_P(GpuBackward, FullFp16WithGradientsInFp32) {
  expect_equal_worlds({{make_spec(Dtype::kF16, 3, 1, 64, {-1, -1}), uniform_batch(2, 700, 900)}, Dtype::kF32}, {2, 3});
}

TEST_P(GpuBackward, Fp32OfUnequalHeadDims) {
  expect_equal_worlds({{make_spec(Dtype::kF32, 6, 2, 72, {300, 0}, 40), uniform_batch(2, 700, 900)}, Dtype::kF32},
                      {2, 3});
}

TEST_P(GpuBackward, RaggedBatchWithSinksAndSoftcap) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 128, {200, 0});
  spec.sinks = true;
  spec.softcap = 30.0F;
  expect_equal_worlds({{spec, {{300, 300, 0}, {1, 1, 0}, {0, 0, 0}, {77, 500, 423}, {129, 64, -9}, {800, 800, 0}}}},
                      {2, 4});
}

// The sinks' gradient is summed on the devices, so that the host waits for nothing.
TEST_P(GpuBackward, EnqueuedRunsWithSinks) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0});
  spec.sinks = true;
  const BackwardJob job{{spec, {{700, 700, 0}, {0, 9, 0}, {129, 64, -9}, {77, 500, 423}}}};
  if (!GetParam().missing({spec, job.gradients}).empty()) GTEST_SKIP() << "no such kernel";
  const BackwardTensors tensors = random_backward_tensors(job.forward, 23);
  Options options;
  options.kernel = {std::string(GetParam().backend), std::string(GetParam().name)};
  const BackwardResult reference = run_gpu_backward(job, options, tensors, 1);
  for (const int world : {1, 2, 3}) {
    for (const int stripe : {0, 37}) {
      options.layout = {LayoutKind::kStriped, stripe};
      EXPECT_EQ(run_gpu_backward(job, options, tensors, world, true).difference(reference), "") << world << stripe;
    }
  }
}

// Longer than a KV split, so that blocks end inside splits and at their ends.
TEST_P(GpuBackward, SeveralSplits) {
  expect_equal_worlds({{make_spec(Dtype::kBf16, 2, 1, 64, {-1, 0}), uniform_batch(1, 17000, 17000)}}, {2});
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GpuBackward);
INSTANTIATE_TEST_SUITE_P(Kernels, GpuBackward, ::testing::ValuesIn(cuda_rows()),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace ringattn::testing
