// SPDX-License-Identifier: Apache-2.0
// Which kernels' steps are compared with a prefill.
#include "ops/decode/replay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/mla/mla.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

MlaSpec deepseek() {
  MlaSpec spec;
  spec.dtype = Dtype::kBf16;
  spec.heads = 16;
  spec.head_dim = 128;
  spec.rope_dim = 64;
  spec.head_dim_v = 128;
  spec.latent_dim = 512;
  spec.mask = {-1, 0};
  spec.softmax_scale = 0.07F;
  return spec;
}

TEST(ReplayKernels, OfOneNameAreCompared) {
  const AttentionSpec attention = make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0});
  const KernelRequest cpu{"cpu", "auto"};
  check_replay_kernel(*choose_kernel(attention, cpu).row, {attention}, cpu);
  const AttentionSpec absorbed = absorbed_spec(deepseek());
  check_replay_kernel(*choose_kernel(absorbed, cpu).row, {absorbed, true}, cpu);
}

// A kernel that only decodes can't compute a prefill's rows. The refusal says so, and names one that does both.
TEST(ReplayKernels, ThatDecodeAloneAreRefused) {
  const DecodeSpec spec{absorbed_spec(deepseek()), true};
  const KernelRequest any;
  const auto& table = kernel_table<DecodeSpec>();
  if (std::ranges::none_of(table, [](const auto& row) { return row.name == "sm90_mla"; })) {
    GTEST_SKIP() << "this build has no kernel that decodes alone";
  }
  const AttentionRow& prefill = *choose_kernel(spec.attention, any, KernelScope::kAnyMachine).row;
  const Error error = testing::error_of([&] { check_replay_kernel(prefill, spec, any, KernelScope::kAnyMachine); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_EQ(std::string(error.what()),
            "steps of kernel sm90_mla are to have the bits of a prefill by sm80_attention (sm90_mla only decodes: no "
            "kernel computes the rows of a prefill with its bits). Use kernel = sm80_attention, which does both.");
  const KernelRequest both{"auto", "sm80_attention"};
  check_replay_kernel(prefill, spec, both, KernelScope::kAnyMachine);
}

}  // namespace
}  // namespace ringattn
