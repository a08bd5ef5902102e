// SPDX-License-Identifier: Apache-2.0
// Which kernels' steps are compared with a prefill.
#include "attention/job/replay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/fold_spec.hpp"
#include "kernels/latent.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

LatentSpec deepseek() {
  LatentSpec spec;
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
  const FoldSpec fold = make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0});
  const KernelRequest cpu{"cpu", "auto"};
  check_replay_kernel(*choose_kernel(fold, cpu).row, {fold}, cpu);
  const FoldSpec absorbed = absorbed_spec(deepseek());
  check_replay_kernel(*choose_kernel(absorbed, cpu).row, {absorbed, true}, cpu);
}

// A kernel that decodes alone folds no prefill's rows; the refusal says so, and names one that does both.
TEST(ReplayKernels, ThatDecodeAloneAreRefused) {
  const DecodeSpec spec{absorbed_spec(deepseek()), true};
  const KernelRequest any;
  const auto& table = kernel_table<DecodeSpec>();
  if (std::ranges::none_of(table, [](const auto& row) { return row.name == "sm90_latent"; })) {
    GTEST_SKIP() << "this build has no kernel that decodes alone";
  }
  const FoldRow& prefill = *choose_kernel(spec.fold, any, KernelPlace::kAnywhere).row;
  const Error error = testing::error_of([&] { check_replay_kernel(prefill, spec, any, KernelPlace::kAnywhere); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_EQ(
      std::string(error.what()),
      "steps of kernel sm90_latent are to have the bits of a prefill by sm80_fold (sm90_latent decodes alone, with "
      "bits of its own: no kernel folds a prefill's rows like it). Use kernel = sm80_fold, which does both.");
  const KernelRequest both{"auto", "sm80_fold"};
  check_replay_kernel(prefill, spec, both, KernelPlace::kAnywhere);
}

}  // namespace
}  // namespace ringattn
