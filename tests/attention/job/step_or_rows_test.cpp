// SPDX-License-Identifier: Apache-2.0
// Which caches are decoded, and which are read into rows: one rank and several give a row the bits of the same kernel.
#include "attention/job/step_or_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "attention/job/rank_cache.hpp"

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
  const KernelPlace place = KernelPlace::kAnywhere;
  const JobInput chosen = step_or_rows(input, request, place);
  return chosen.decodes() ? choose_kernel(decode_spec(chosen), request, place).row->name
                          : choose_kernel(chosen.job().spec, request, place).row->name;
}

// One rank takes any kernel; several take those whose memory their transport moves.
TEST(StepOrRows, TakesTheKernelThatFoldsTheRows) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const int head_dim : {8, 64, 80, 128, 256}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + ", head_dim " + std::to_string(head_dim));
      const JobInput step = step_of(dtype, head_dim);
      for (const FoldRow& front : kernel_table<FoldSpec>()) {
        const KernelRequest request{std::string(front.backend), "auto"};
        EXPECT_EQ(kernel_of(step, request), choose_kernel(step.job().spec, request, KernelPlace::kAnywhere).row->name)
            << front.backend;
      }
      EXPECT_EQ(kernel_of(step, {}), choose_kernel(step.job().spec, {}, KernelPlace::kAnywhere).row->name);
    }
  }
}

TEST(StepOrRows, SaysThatNoKernelDecodesLikeTheFold) {
  const auto is_plain = [](const FoldRow& row) { return row.name == "sm80_plain"; };
  if (std::ranges::none_of(kernel_table<FoldSpec>(), is_plain)) GTEST_SKIP() << "this build has no cuda kernels";
  const auto why = [](const JobInput& input, const KernelRequest& request) {
    return why_not_decoded(input, request, KernelPlace::kAnywhere);
  };
  for (const JobInput& step : {step_of(Dtype::kF32, 64), step_of(Dtype::kBf16, 80)}) {
    EXPECT_EQ(why(step, {}), "no kernel decodes it with the bits of sm80_plain");
    EXPECT_EQ(why(step, {"cuda", "auto"}), "no kernel decodes it with the bits of sm80_plain");
    EXPECT_EQ(why(step, {"cpu", "auto"}), "");
    EXPECT_EQ(why(step, {"auto", "cpu_fold"}), "");
  }
  EXPECT_EQ(why(step_of(Dtype::kBf16, 64), {}), "");
}

}  // namespace
}  // namespace ringattn
