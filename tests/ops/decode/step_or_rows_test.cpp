// SPDX-License-Identifier: Apache-2.0
// Which caches are decoded, and which are read into rows: one rank and several give a row the bits of the same kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "ops/decode/decode_or_attend.hpp"
#include "ops/decode/rank_cache.hpp"

namespace ringattn {
namespace {

JobInput step_of(Dtype dtype, int head_dim) {
  SyntheticInput input;
  input.op = Op::kDecode;
  input.tokens = 200;
  input.heads = 4;
  input.kv_heads = 2;
  input.head_dim = head_dim;
  input.dtype = dtype;
  return JobInput(input, {});
}

// The kernel that computes the input, wherever it runs.
std::string_view kernel_of(const JobInput& input, const KernelRequest& request) {
  const KernelScope place = KernelScope::kAnyMachine;
  const JobInput chosen = decode_or_attend(input, request, place);
  return chosen.decodes() ? choose_kernel(decode_spec(chosen), request, place).row->name
                          : choose_kernel(chosen.job().spec, request, place).row->name;
}

// A kernel that is named computes the input as it does where it is the one that is chosen.
TEST(StepOrRows, TakesANamedKernelAsTheChosenOne) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
    for (const int head_dim : {64, 80}) {
      const JobInput step = step_of(dtype, head_dim);
      for (const AttentionRow& front : kernel_table<AttentionSpec>()) {
        const KernelRequest any{std::string(front.backend), "auto"};
        const KernelRequest named{"auto",
                                  std::string(choose_kernel(step.job().spec, any, KernelScope::kAnyMachine).row->name)};
        const std::string why = why_not_decoded(step, any, KernelScope::kAnyMachine);
        EXPECT_EQ(why_not_decoded(step, named, KernelScope::kAnyMachine), why) << named.kernel;
        // Also where it can't run: what computes the input refuses it.
        EXPECT_EQ(why_not_decoded(step, named, KernelScope::kThisMachine), why) << named.kernel;
        EXPECT_EQ(kernel_of(step, named), named.kernel);
      }
    }
  }
}

// One rank takes any kernel; several take those whose memory their transport moves.
TEST(StepOrRows, TakesTheKernelThatComputesTheRows) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const int head_dim : {8, 64, 80, 128, 256}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", head_dim " + std::to_string(head_dim));
      const JobInput step = step_of(dtype, head_dim);
      for (const AttentionRow& front : kernel_table<AttentionSpec>()) {
        const KernelRequest request{std::string(front.backend), "auto"};
        EXPECT_EQ(kernel_of(step, request), choose_kernel(step.job().spec, request, KernelScope::kAnyMachine).row->name)
            << front.backend;
      }
      EXPECT_EQ(kernel_of(step, {}), choose_kernel(step.job().spec, {}, KernelScope::kAnyMachine).row->name);
    }
  }
}

TEST(StepOrRows, SaysThatNoKernelDecodesLikeAttention) {
  const auto is_plain = [](const AttentionRow& row) { return row.name == "sm80_simt"; };
  if (std::ranges::none_of(kernel_table<AttentionSpec>(), is_plain)) GTEST_SKIP() << "this build has no cuda kernels";
  const auto why = [](const JobInput& input, const KernelRequest& request) {
    return why_not_decoded(input, request, KernelScope::kAnyMachine);
  };
  for (const JobInput& step : {step_of(Dtype::kF32, 64), step_of(Dtype::kBf16, 80)}) {
    EXPECT_EQ(why(step, {}), "no kernel decodes it with the bits of sm80_simt");
    EXPECT_EQ(why(step, {"cuda", "auto"}), "no kernel decodes it with the bits of sm80_simt");
    EXPECT_EQ(why(step, {"cpu", "auto"}), "");
    EXPECT_EQ(why(step, {"auto", "cpu_attention"}), "");
    EXPECT_EQ(why(step, {"auto", "sm80_simt"}), "no kernel decodes it with the bits of sm80_simt");
    EXPECT_EQ(why(step, {"auto", "sm90_attention"}), "") << "it folds no such rows, which decoding says";
  }
  EXPECT_EQ(why(step_of(Dtype::kBf16, 64), {}), "");
  EXPECT_EQ(why(step_of(Dtype::kBf16, 64), {"auto", "sm90_mla"}), "") << "it decodes alone";
}

}  // namespace
}  // namespace ringattn
