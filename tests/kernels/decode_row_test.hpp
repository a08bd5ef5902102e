// SPDX-License-Identifier: Apache-2.0
// A test fixture that runs once for every kernel that decodes, as kernel_row_test.hpp's does for every one that folds.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/kernels/kernel_row_test.hpp"
#include "tests/support/decode_runner.hpp"

namespace ringattn {
inline void PrintTo(const testing::DecodeRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {

// The fold's kernel whose bits a decode kernel has.
inline const FoldRow& fold_of(const DecodeRow& row) {
  for (const FoldRow& fold : kernel_table<FoldSpec>()) {
    if (fold.name == row.name) return fold;
  }
  throw std::logic_error("no fold kernel has the name of the decode kernel");
}

// The kernels that decode with the bits of a fold.
inline std::vector<DecodeRow> rows_like_folds() {
  std::vector<DecodeRow> rows;
  for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
    for (const FoldRow& fold : kernel_table<FoldSpec>()) {
      if (fold.name == row.name) rows.push_back(row);
    }
  }
  return rows;
}

class DecodeRowTest : public ::testing::TestWithParam<DecodeRow> {
 protected:
  void SetUp() override {
    const std::string reason = row().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const DecodeRow& row() const { return GetParam(); }
  const FoldRow& fold() const { return fold_of(row()); }
  std::vector<Dims> dims() const { return varied_dims(fold()); }
  Dims first_dims() const { return usual_dims(fold()).front(); }

  FoldResult folded(const FoldInputs& inputs) const { return fold_with(fold(), inputs); }

  void expect_same(const FoldInputs& inputs, const CacheLayout& layout, int threads = 1) const {
    SCOPED_TRACE(fmt::format("{}, {} rows, page {}{}", describe(inputs.spec), inputs.sequences[0].q_len,
                             layout.page_size, layout.head_major ? ", by heads" : ""));
    EXPECT_TRUE(DecodeRunner(row(), inputs, layout, threads).run().same_bits(folded(inputs)));
  }

 private:
  std::int64_t checks_before_ = 0;
};

}  // namespace ringattn::testing

#define RINGATTN_FOR_EVERY_DECODER(fixture)                                                               \
  INSTANTIATE_TEST_SUITE_P(Kernels, fixture, ::testing::ValuesIn(::ringattn::testing::rows_like_folds()), \
                           [](const auto& test) { return std::string(test.param.name); })
