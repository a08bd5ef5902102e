// SPDX-License-Identifier: Apache-2.0
// The fixture of tests that run every kernel row of the causal conv1d, for all specs that the row can do.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "kernels/common/registry.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"

namespace ringattn::testing {

class Conv1dRowTest : public ::testing::TestWithParam<KernelRow<CausalConv1dSpec>> {
 protected:
  void SetUp() override {
    const std::string reason = row().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }
  const KernelRow<CausalConv1dSpec>& row() const { return GetParam(); }

  void for_every_spec(const std::function<void(const CausalConv1dSpec&)>& body) const {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (int width = 2; width <= 4; ++width) {
        for (const bool flag : {false, true}) {
          const CausalConv1dSpec spec{dtype, 24 + 8 * width, width, flag, flag};
          if (row().missing(spec).empty()) body(spec);
        }
      }
    }
  }

 private:
  std::int64_t checks_before_ = 0;
};

}  // namespace ringattn::testing
