// SPDX-License-Identifier: Apache-2.0
// A test fixture that runs once for every SSM kernel, as kernel_row_test.hpp's does for every attention kernel.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/ssm_data.hpp"

namespace ringattn {
inline void PrintTo(const testing::SsmRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {

inline SsmSpec ssm_spec(Dtype dtype, int heads, int head_dim, int state_dim, int groups = 1) {
  SsmSpec spec;
  spec.dtype = dtype;
  spec.heads = heads;
  spec.head_dim = head_dim;
  spec.state_dim = state_dim;
  spec.groups = groups;
  return spec;
}

inline SsmSpec selective_spec(Dtype dtype, int channels, int state_dim, int groups = 1) {
  SsmSpec spec = ssm_spec(dtype, channels, 1, state_dim, groups);
  spec.state_decays = true;
  return spec;
}

inline SsmSpec linear_spec(Dtype dtype, int heads, int dim_v, int dim, SsmDecay decay, float scale = 0.25F) {
  SsmSpec spec = ssm_spec(dtype, heads, dim_v, dim, heads);
  spec.decay = decay;
  spec.scale = scale;
  return spec;
}

class SsmRowTest : public ::testing::TestWithParam<SsmRow> {
 protected:
  void SetUp() override {
    const std::string reason = row().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const SsmRow& row() const { return GetParam(); }
  // As KernelRowTest's.
  CaseChoice choose_cases(std::int64_t every) const { return CaseChoice(row().backend == "cpu" ? every : 1); }
  bool can(const SsmSpec& spec) const { return row().missing(spec).empty(); }

  // The specs of all dims, dtypes and flags that the row supports.
  std::vector<SsmSpec> specs() const {
    std::vector<SsmSpec> able;
    const auto add = [&](SsmSpec spec, int flags) {
      spec.skip = (flags & 1) != 0;
      spec.gate = (flags & 2) != 0;
      spec.dt_bias = (flags & 4) != 0;
      spec.dt_softplus = (flags & 8) != 0;
      if (spec.dt_bias && !spec.dt_softplus) spec.dt_min = 0.0F;
      if (can(spec)) able.push_back(spec);
    };
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      add(ssm_spec(dtype, 2, 64, 128), 0);
      add(ssm_spec(dtype, 6, 32, 16, 2), 15);
      add(ssm_spec(dtype, 1, 128, 256), 9);
      add(ssm_spec(dtype, 5, 40, 24), 6);   // widths that are no whole vectors
      add(ssm_spec(dtype, 7, 64, 128), 3);  // heads that some kernels compute side by side, and a rest
      add(ssm_spec(dtype, 9, 16, 64), 13);
      add(ssm_spec(dtype, 4, 128, 64, 2), 7);
      add(ssm_spec(dtype, 8, 64, 64, 2), 12);
      if (dtype == Dtype::kBf16) add(ssm_spec(dtype, 3, 96, 32), 14);
      add(selective_spec(dtype, 16, 16), 0);
      add(selective_spec(dtype, 48, 16, 2), 15);
      add(selective_spec(dtype, 8, 256), 9);
      add(selective_spec(dtype, 24, 8), 6);
      add(linear_spec(dtype, 2, 128, 128, SsmDecay::kHead), 0);
      add(linear_spec(dtype, 3, 64, 64, SsmDecay::kToken), 0);
      add(linear_spec(dtype, 3, 40, 24, SsmDecay::kDim), 0);
      if (dtype == Dtype::kBf16) add(linear_spec(dtype, 3, 128, 64, SsmDecay::kDim), 0);
    }
    return able;
  }
  // The smallest that the row can do, for long sequences; in fp32 where it can.
  SsmSpec small() const {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
      if (const auto spec = small_of(dtype)) return *spec;
    }
    ADD_FAILURE() << "no small spec for " << row().name;
    return {};
  }
  SsmSpec small(Dtype dtype) const {
    const auto spec = small_of(dtype);
    if (!spec) ADD_FAILURE() << "no small spec of " << dtype_name(dtype) << " for " << row().name;
    return spec.value_or(SsmSpec());
  }

 private:
  std::optional<SsmSpec> small_of(Dtype dtype) const {
    for (const SsmSpec& spec :
         {ssm_spec(dtype, 1, 8, 8), ssm_spec(dtype, 1, 64, 16), ssm_spec(dtype, 1, 32, 32), selective_spec(dtype, 8, 8),
          selective_spec(dtype, 32, 16), ssm_spec(dtype, 1, 64, 64), linear_spec(dtype, 1, 8, 8, SsmDecay::kDim, 1.0F),
          linear_spec(dtype, 1, 32, 32, SsmDecay::kDim, 1.0F), linear_spec(dtype, 1, 64, 64, SsmDecay::kDim, 1.0F)}) {
      if (can(spec)) return spec;
    }
    return std::nullopt;
  }

  std::int64_t checks_before_ = 0;
};

}  // namespace ringattn::testing

#define RINGATTN_FOR_EVERY_SSM(fixture)                                                                 \
  INSTANTIATE_TEST_SUITE_P(Kernels, fixture,                                                            \
                           ::testing::ValuesIn(::ringattn::kernel_table<::ringattn::SsmSpec>().begin(), \
                                               ::ringattn::kernel_table<::ringattn::SsmSpec>().end()),  \
                           [](const auto& test) { return std::string(test.param.name); })
