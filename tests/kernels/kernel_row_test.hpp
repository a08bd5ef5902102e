// SPDX-License-Identifier: Apache-2.0
// A test fixture that runs once for every row of the kernel table, so that a new kernel is tested without touching a
// test. A row that can't run here is skipped, and says why.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "kernels/registry.hpp"
#include "tests/support/fold_runner.hpp"

namespace ringattn::testing {

class KernelRowTest : public ::testing::TestWithParam<FoldRow> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
  }

  const FoldRow& row() const { return GetParam(); }
};

}  // namespace ringattn::testing

namespace ringattn {
inline void PrintTo(const FoldRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

// For every row of the table.
#define RINGATTN_FOR_EVERY_KERNEL(fixture)                                                                           \
  INSTANTIATE_TEST_SUITE_P(                                                                                          \
      Kernels, fixture,                                                                                              \
      ::testing::ValuesIn(::ringattn::kernel_table<FoldSpec>().begin(), ::ringattn::kernel_table<FoldSpec>().end()), \
      [](const auto& test) { return std::string(test.param.name); })
