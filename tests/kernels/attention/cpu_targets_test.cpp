// SPDX-License-Identifier: Apache-2.0
// The CPU kernel on every SIMD target that this machine has: each is accurate, and each keeps the promise.
#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <time.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/kernels/common/forced_target.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/attention_runner.hpp"
#include "tests/support/gemm_runner.hpp"

namespace ringattn::testing {
namespace {

const AttentionRow& cpu_row() {
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (row.name == "cpu_attention") return row;
  }
  throw std::logic_error("no cpu_attention in the table");
}

// Dtypes whose arithmetic differs between the target and that without AMX.
std::vector<Dtype> dtypes_of(const SimdTarget& target) {
  return target.amx ? std::vector{Dtype::kBf16} : std::vector{Dtype::kF32, Dtype::kBf16, Dtype::kF16};
}

class CpuTargets : public ::testing::TestWithParam<SimdTarget> {};

TEST_P(CpuTargets, AreAccurateAndInvariant) {
  const ForcedTarget forced(GetParam());
  const std::string identity = cpu_row().make_backend({1, 0})->identity();
  if (identity != describe(GetParam())) GTEST_SKIP() << "needs: a build with " << describe(GetParam());
  for (const Dtype dtype : dtypes_of(GetParam())) {
    for (const auto& [head_dim, head_dim_v] : {std::pair{8, 8}, {64, 24}, {128, 136}}) {
      for (const Mask& mask : {Mask{-1, 0}, Mask{50, 7}}) {
        for (const float softcap : {0.0F, 15.0F}) {
          AttentionSpec spec = make_spec(dtype, 6, 2, head_dim, mask);
          spec.head_dim_v = head_dim_v;
          spec.softcap = softcap;
          AttentionInputs inputs = random_inputs(spec, {{32, 300, 260}, {5, 9, -2}}, 81);
          inputs.set_v(280, 0, 5, std::numeric_limits<float>::quiet_NaN());
          inputs.set_k(285, 1, 5, std::numeric_limits<float>::infinity());
          // Subnormal fp16 values must be widened exactly as well.
          for (std::int64_t key = 0; key < 200; ++key) inputs.set_v(key, 1, 0, 3e-6F);
          const AttentionResult result = attend_with(cpu_row(), inputs);
          ASSERT_EQ(check_accuracy(inputs, result.out, result.lse), "") << identity << ": " << describe(spec);
          const Arrangement other{.threads = 2, .tiles_per_task = 1, .run_rows = 11, .shuffle = 82, .strided = true};
          ASSERT_TRUE(attend_with(cpu_row(), inputs, other).same_bits(result)) << identity << ": " << describe(spec);
        }
      }
    }
  }
}

// Batched GEMM with tiles is a kernel of its own.
const BatchedGemmRow& product_row(const SimdTarget& target) {
  const std::string_view name = target.amx ? "cpu_gemm_amx" : "cpu_gemm";
  for (const BatchedGemmRow& row : kernel_table<BatchedGemmSpec>()) {
    if (row.name == name) return row;
  }
  throw std::logic_error("no batched GEMM in the table");
}

TEST_P(CpuTargets, MultiplyHeadsAccurately) {
  const ForcedTarget forced(GetParam());
  const std::string identity = cpu_row().make_backend({1, 0})->identity();
  if (identity != describe(GetParam())) GTEST_SKIP() << "needs: a build with " << describe(GetParam());
  for (const Dtype dtype : dtypes_of(GetParam())) {
    for (const auto& [dim_k, dim_n] : {std::pair{8, 8}, {64, 24}, {40, 136}}) {
      const GemmInputs inputs = normal_gemm_inputs({dtype, dim_k, dim_n}, 61, 2, false, 87);
      const std::vector<std::byte> out = multiplied(product_row(GetParam()), inputs);
      expect_accurate_gemm(inputs, out);
      const GemmLayout other{.threads = 2, .cuts = {1, 14, 40}, .head_by_head = true, .transposed = true, .gap = 8};
      EXPECT_TRUE(multiplied(product_row(GetParam()), inputs, other) == out)
          << identity << ": " << describe(inputs.spec);
    }
  }
}

// a · (1 + w) for every bit pattern a, where w moves the sum by nothing, by half a step of the dtype, or by a little
// more or less: rounded as store_element() rounds. For fp16 some columns are subnormal. Tiles take subnormals as zero.
TEST_P(CpuTargets, RoundGemmsToNearestEven) {
  const ForcedTarget forced(GetParam());
  const std::string identity = cpu_row().make_backend({1, 0})->identity();
  if (identity != describe(GetParam())) GTEST_SKIP() << "needs: a build with " << describe(GetParam());
  for (const Dtype dtype : dtypes_of(GetParam())) {
    if (dtype == Dtype::kF32) continue;
    const float half = dtype == Dtype::kBf16 ? 0x1p-8F : 0x1p-11F;
    const float small = dtype == Dtype::kBf16 ? 1.0F : 0x1p-10F;
    const std::pair<float, float> columns[] = {
        {1.0F, 0.0F},         {1.0F, half},  {1.0F, -half},         {1.0F, 1.25F * half},
        {1.0F, 0.75F * half}, {small, 0.0F}, {small, small * half}, {small, -0.5F * small * half}};
    GemmInputs inputs = gemm_inputs({dtype, 8, 8}, 65'536, 1, false, [] { return 0.0F; });
    for (std::int64_t o = 0; o < 8; ++o) {
      inputs.set_right(0, o, 0, columns[o].first);
      inputs.set_right(0, o, 1, columns[o].second);
    }
    for (std::uint32_t bits = 0; bits < 65'536; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      std::memcpy(inputs.left.data() + bits * 16, &pattern, 2);
      std::memcpy(inputs.left.data() + bits * 16 + 2, &pattern, 2);
    }
    const std::vector<std::byte> out = multiplied(product_row(GetParam()), inputs);
    for (std::int64_t i = 0; i < 65'536 * 8; ++i) {
      const auto a = static_cast<double>(inputs.left_at(i / 8, 0, 0));
      double sum = a * static_cast<double>(columns[i % 8].first) + a * static_cast<double>(columns[i % 8].second);
      if (GetParam().amx && std::abs(a) < 0x1p-126) sum = 0.0;
      if (GetParam().amx && std::abs(sum) < 0x1p-110 && sum != 0.0) continue;  // one of the products may be subnormal
      std::uint16_t expected = 0;
      store_element(&expected, dtype, static_cast<float>(sum));
      std::uint16_t value = 0;
      std::memcpy(&value, out.data() + 2 * i, 2);
      if (std::isnan(sum)) expected = dtype == Dtype::kBf16 ? 0x7fc0 : 0x7e00;  // always the same NaN
      // Sums begin at +0, so −0 is not left of any.
      if (sum == 0.0) expected = 0;
      ASSERT_EQ(value, expected) << identity << ": " << a << ", column " << i % 8;
    }
  }
}

// Groups of key tiles are merged by vectors, and what is left over of a row by part of one.
TEST_P(CpuTargets, MergeKvSplits) {
  const ForcedTarget forced(GetParam());
  const std::string identity = cpu_row().make_backend({1, 0})->identity();
  if (identity != describe(GetParam())) GTEST_SKIP() << "needs: a build with " << describe(GetParam());
  for (const int head_dim_v : {8, 24, 32}) {
    const AttentionSpec spec = make_spec(dtypes_of(GetParam()).front(), 2, 1, 8, {-1, 0}, head_dim_v);
    AttentionInputs inputs = random_inputs(spec, {{2, 17'000, 16'998}}, 83);
    for (std::int64_t key = 8192; key < 16'384; ++key) inputs.set_k(key, 0, 0, 40.0F);  // the reference moves
    const AttentionResult whole = attend_with(cpu_row(), inputs, {.export_state = true});
    EXPECT_EQ(check_accuracy(inputs, whole.out, whole.lse), "") << identity << ", head_dim_v " << head_dim_v;
    EXPECT_TRUE(attend_with(cpu_row(), inputs, {.export_state = true, .apart = 84}).same_bits(whole)) << identity;
    EXPECT_TRUE(attend_with(cpu_row(), inputs, {.export_state = true, .apart = 85}).same_bits(whole)) << identity;
  }
}

// In time of the processor, which others' work on this machine doesn't change.
double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Time estimates rest on it where no machine model was measured.
TEST_P(CpuTargets, AreAboutAsFastAsTheTableSays) {
#if defined(RINGATTN_SANITIZED) || !defined(__OPTIMIZE__)
  GTEST_SKIP() << "needs: an optimised build without sanitizers";
#endif
  constexpr double kFactor = 4.0;  // processors differ, and so does what neighbours leave of their caches
  const ForcedTarget forced(GetParam());
  const auto backend = cpu_row().make_backend({1, 0});
  if (backend->identity() != describe(GetParam())) GTEST_SKIP() << "needs: a build with this target";
  const std::int64_t tokens = GetParam().amx ? 4096 : 1024;  // what surrounds the kernel should take little of the time
  const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0});
  const AttentionInputs inputs = random_inputs(spec, {{tokens, tokens, 0}}, 86);
  const double flops = 2.0 * static_cast<double>(tokens * (tokens + 1)) * 128 * 8;
  double seconds = 1e9;
  for (int round = 0; round < 3; ++round) {
    const double begin = processor_seconds();
    attend_with(cpu_row(), inputs);
    seconds = std::min(seconds, processor_seconds() - begin);
  }
  const double predicted = cpu_row().flops_per_second(*backend);
  EXPECT_LT(flops / seconds, kFactor * predicted) << backend->identity() << ": " << flops / seconds / 1e9 << " GFLOP/s";
  EXPECT_GT(flops / seconds, predicted / kFactor) << backend->identity() << ": " << flops / seconds / 1e9 << " GFLOP/s";
  RecordProperty("gflops", static_cast<int>(flops / seconds / 1e9));
}

INSTANTIATE_TEST_SUITE_P(Highway, CpuTargets, ::testing::ValuesIn(attention_targets_here()), [](const auto& test) {
  std::string name = describe(test.param);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
});

}  // namespace
}  // namespace ringattn::testing
