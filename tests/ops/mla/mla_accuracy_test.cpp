// SPDX-License-Identifier: Apache-2.0
// Mla attention on the CPU against fp64 of the whole formula: every form, dtype and mask.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/mla_rank.hpp"
#include "tests/support/mla_reference.hpp"

namespace ringattn::testing {
namespace {

constexpr Mask kCausal{-1, 0};

MlaSpec small_spec(Dtype dtype, const Mask& mask = kCausal) {
  MlaSpec spec;
  spec.dtype = dtype;
  spec.heads = 4;
  spec.head_dim = 32;
  spec.rope_dim = 16;
  spec.head_dim_v = 24;
  spec.latent_dim = 64;
  spec.mask = mask;
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}

MlaSpec with_everything(MlaSpec spec) {
  spec.softcap = 5.0F;
  spec.sinks = true;
  return spec;
}

struct Case {
  const char* name;
  MlaJob job;

  friend std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name; }
};

std::vector<Case> cases() {
  const Batch ragged = {{1, 1, 0}, {127, 127, 0}, {128, 128, 0}, {129, 129, 0}, {0, 0, 0}, {3, 300, 297}, {64, 0, 0}};
  MlaSpec deepseek;
  deepseek.heads = 2;
  deepseek.softmax_scale = default_softmax_scale(deepseek);
  return {
      {"bf16_causal", {small_spec(Dtype::kBf16), ragged, {}}},
      {"fp16_full", {small_spec(Dtype::kF16, {-1, -1}), ragged, {}}},
      {"fp32_window", {small_spec(Dtype::kF32, {100, 20}), ragged, {}}},
      {"bf16_sinks_softcap", {with_everything(small_spec(Dtype::kBf16)), ragged, {}}},
      {"fp32_long", {small_spec(Dtype::kF32), uniform_batch(1, 60, 1000), {}}},
      {"deepseek_dims", {deepseek, uniform_batch(1, 40, 200), {}}},
      {"one_token", {small_spec(Dtype::kBf16), uniform_batch(1, 1, 1), {}}},
  };
}

class MlaAccuracy : public ::testing::TestWithParam<Case> {};

TEST_P(MlaAccuracy, BothFormsAgainstTheOracle) {
  MlaJob job = GetParam().job;
  const MlaTensors tensors = random_mla_tensors(job, 3);
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    SCOPED_TRACE(std::string(form_name(form)));
    job.form = form;
    expect_as_right(job, tensors, run_mla_job(job, on_the_cpu(2), tensors, 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, MlaAccuracy, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& job) { return std::string(job.param.name); });

// A latent that is not finite makes all heads' O not finite in the rows that see it, and no other row.
TEST(MlaNan, ReachesTheRowsThatSeeItAlone) {
  const MlaSpec spec = small_spec(Dtype::kBf16);
  constexpr std::int64_t kPlanted = 200;  // of the second sequence
  MlaJob job{spec, {{50, 50, 0}, {300, 300, 0}, {30, 30, 0}}, {}};
  MlaTensors tensors = random_mla_tensors(job, 5);
  store_element(tensors.latent.data() + static_cast<std::size_t>((50 + kPlanted) * spec.latent_dim + 7) * 2, spec.dtype,
                std::numeric_limits<float>::quiet_NaN());
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    job.form = form;
    const JobResult alone = run_mla_job(job, on_the_cpu(2), tensors, 1);
    const Numbers numbers = numbers_of(alone, spec.dtype);
    for (std::int64_t token = 0; token < job.batch.q_tokens(); ++token) {
      const bool sees = token >= 50 + kPlanted && token < 350;
      for (int i = 0; i < spec.heads * spec.head_dim_v; ++i) {
        const double value = numbers.out[static_cast<std::size_t>(token * spec.heads * spec.head_dim_v + i)];
        ASSERT_EQ(std::isfinite(value), !sees) << form_name(form) << ", token " << token << ", " << i;
      }
    }
    EXPECT_TRUE(run_mla_job(job, on_the_cpu(2), tensors, 3).same_bits(alone));
  }
}

}  // namespace
}  // namespace ringattn::testing
