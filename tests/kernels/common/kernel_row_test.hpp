// SPDX-License-Identifier: Apache-2.0
// A test fixture that runs once for every row of the kernel table, so that a new kernel is tested without touching a
// test. A row that can't run here is skipped, and says why; a test that ends without having compared anything fails.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

#include "kernels/common/registry.hpp"
#include "tests/support/attention_runner.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/environment.hpp"
#include "tests/support/kernel_dims.hpp"

namespace ringattn::testing {

// Fails the test where `checks`, the comparisons that it made on `row`, are none. Adds them to the row's total, which
// is printed at the end of the program.
void expect_checks(std::string_view row, std::int64_t checks);

class KernelRowTest : public ::testing::TestWithParam<AttentionRow> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const AttentionRow& row() const { return GetParam(); }
  // GPU kernels run every case. The CPU's is slower and takes the same path in most of them.
  CaseChoice choose_cases(std::int64_t every) const { return CaseChoice(row().name == "cpu_attention" ? every : 1); }

 private:
  std::int64_t checks_before_ = 0;
};

}  // namespace ringattn::testing

namespace ringattn {
inline void PrintTo(const AttentionRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

// For every row of the table.
#define RINGATTN_FOR_EVERY_KERNEL(fixture)                                                        \
  INSTANTIATE_TEST_SUITE_P(Kernels, fixture,                                                      \
                           ::testing::ValuesIn(::ringattn::kernel_table<AttentionSpec>().begin(), \
                                               ::ringattn::kernel_table<AttentionSpec>().end()),  \
                           [](const auto& test) { return std::string(test.param.name); })
