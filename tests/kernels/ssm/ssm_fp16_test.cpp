// SPDX-License-Identifier: Apache-2.0
// Every row of the SSM table that takes fp16: what it loses is what the format costs (bench/notes/ssm.md).
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/ssm/ssm.hpp"
#include "tests/kernels/ssm/ssm_row_test.hpp"

namespace ringattn::testing {
namespace {

class Fp16Ssm : public SsmRowTest {};

// Random jobs of fp16: y is the exact one rounded once, also where it is subnormal, but for what fp32 loses of the
// terms. Kernels of GPUs have factors of 16 bits in two parts, and keep the tolerance of all SSM kernels.
TEST_P(Fp16Ssm, RoundOnce) {
  const double term = row().backend == "cpu" ? kFp32SsmTerm : kSsmTerm;
  std::mt19937_64 random(111);
  std::uniform_real_distribution<float> exponent(-22.0F, 3.0F);
  int jobs = 0;
  for (int round = 0; round < 4; ++round) {
    for (const SsmSpec& spec : specs()) {
      if (spec.dtype != Dtype::kF16) continue;
      SsmData inputs = random_ssm(spec, {1 + static_cast<std::int64_t>(random() % 130)}, random());
      const float scale = std::exp2(exponent(random));
      for (std::size_t at = 0; at < inputs.x.size(); at += size_of(spec.dtype)) {
        std::byte* const x = inputs.x.data() + at;
        store_element(x, spec.dtype, scale * load_element(x, spec.dtype));
      }
      EXPECT_EQ(check_ssm_accuracy(inputs, run_ssm(row(), inputs), {term, kSsmTerm}), "")
          << describe(spec) << ", x times " << scale;
      ++jobs;
    }
  }
  if (jobs == 0) GTEST_SKIP() << "no fp16";
}

RINGATTN_FOR_EVERY_SSM(Fp16Ssm);

}  // namespace
}  // namespace ringattn::testing
