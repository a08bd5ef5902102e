// SPDX-License-Identifier: Apache-2.0
// The CPU SSM kernels on every SIMD target that this machine has: each is accurate, and keeps its bits with any
// threads.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <string>

#include "tests/kernels/common/forced_target.hpp"
#include "tests/kernels/ssm/ssm_row_test.hpp"
#include "tests/support/ssd_backward_data.hpp"

namespace ringattn::testing {
namespace {

class CpuSsmTargets : public ::testing::TestWithParam<SimdTarget> {
 protected:
  bool is_built() const {
    return kernel_table<SsmSpec>().back().make_backend({1, 0})->identity() == describe(GetParam());
  }

 private:
  ForcedTarget forced_{GetParam()};
};

TEST_P(CpuSsmTargets, AreAccurateAndInvariant) {
  const std::string identity = describe(GetParam());
  if (!is_built()) GTEST_SKIP() << "needs: a build with " << identity;
  for (const SsmRow& row : kernel_table<SsmSpec>()) {
    if (row.amx_bf16) {
      EXPECT_EQ(row.unavailable().empty(), GetParam().amx);
    }
    if (row.backend != "cpu" || GetParam().amx != row.amx_bf16) continue;
    const double term = rounds_factors(row) ? kRoundedSsmTerm : kSsmTerm;
    for (SsmSpec spec : {ssm_spec(Dtype::kF32, 3, 40, 24), ssm_spec(Dtype::kBf16, 2, 8, 16),
                         ssm_spec(Dtype::kBf16, 5, 32, 96), selective_spec(Dtype::kF16, 24, 8)}) {
      spec.skip = spec.gate = spec.dt_bias = spec.dt_softplus = true;
      if (!row.missing(spec).empty()) continue;
      const SsmData inputs = random_ssm(spec, {150, 2100, 3}, 7);
      const SsmResult result = run_ssm(row, inputs);
      EXPECT_EQ(check_ssm_accuracy(inputs, result, {term, kSsmTerm}), "") << identity << ": " << describe(spec);
      for (const int threads : {2, 3, 8}) {
        EXPECT_TRUE(run_ssm(row, inputs, {.threads = threads, .strided = true}).same_bits(result)) << identity;
      }
    }
  }
}

TEST_P(CpuSsmTargets, GradientsAreAccurateAndInvariant) {
  if (!is_built() || GetParam().amx) GTEST_SKIP() << "needs: another build, or a target of the gradients";
  for (const SsdBackwardRow& row : kernel_table<SsdBackwardSpec>()) {
    if (row.backend != "cpu") continue;
    SsdBackwardSpec spec{ssm_spec(Dtype::kF32, 3, 40, 24), Dtype::kF32};
    spec.forward.skip = spec.forward.gate = spec.forward.dt_bias = spec.forward.dt_softplus = true;
    const SsdBackwardData inputs = random_ssd_backward(spec, {150, 3}, true, 8);
    const SsdBackwardResult result = run_ssd_backward(row, inputs);
    EXPECT_EQ(check_ssd_gradients(inputs, result, false), "");
    EXPECT_TRUE(run_ssd_backward(row, inputs, {.threads = 3, .strided = true}).same_bits(result));
  }
}

INSTANTIATE_TEST_SUITE_P(Highway, CpuSsmTargets, ::testing::ValuesIn(attention_targets_here()), [](const auto& test) {
  std::string name = describe(test.param);
  std::erase_if(name, [](char c) { return c == '+' || c == '-'; });
  return name;
});

}  // namespace
}  // namespace ringattn::testing
