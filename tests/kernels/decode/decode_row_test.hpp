// SPDX-License-Identifier: Apache-2.0
// A test fixture that runs once for every decode kernel, as kernel_row_test.hpp's does for every attention kernel.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/decode_runner.hpp"

namespace ringattn {
inline void PrintTo(const testing::DecodeRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {

// The attention kernel whose bits a decode kernel has.
inline const AttentionRow& fold_of(const DecodeRow& row) {
  for (const AttentionRow& fold : kernel_table<AttentionSpec>()) {
    if (fold.name == row.name) return fold;
  }
  throw std::logic_error("no fold kernel has the name of the decode kernel");
}

// The kernels that decode with the bits of an attention kernel.
inline std::vector<DecodeRow> rows_like_folds() {
  std::vector<DecodeRow> rows;
  for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
    for (const AttentionRow& fold : kernel_table<AttentionSpec>()) {
      if (fold.name == row.name) rows.push_back(row);
    }
  }
  return rows;
}

// Where results begin to differ, of how many elements; empty: nowhere.
inline std::string first_difference(const AttentionResult& got, const AttentionResult& expected,
                                    const AttentionSpec& spec) {
  if (got.out.size() != expected.out.size() || got.lse.size() != expected.lse.size()) return "other sizes";
  const std::size_t element = size_of(spec.dtype);
  const auto heads = static_cast<std::size_t>(spec.heads);
  const auto dims = static_cast<std::size_t>(spec.head_dim_v);
  std::string first;
  std::size_t outs = 0, lses = 0;
  for (std::size_t i = 0; i < got.out.size() / element; ++i) {
    const std::byte* const a = got.out.data() + i * element;
    const std::byte* const b = expected.out.data() + i * element;
    if (std::memcmp(a, b, element) == 0) continue;
    if (++outs > 1) continue;
    first = fmt::format("row {}, head {}, column {}: got {}, expected {}; ", i / dims / heads, i / dims % heads,
                        i % dims, load_element(a, spec.dtype), load_element(b, spec.dtype));
  }
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    if (std::memcmp(&got.lse[i], &expected.lse[i], sizeof(float)) == 0) continue;
    if (++lses > 1) continue;
    first +=
        fmt::format("LSE of row {}, head {}: got {}, expected {}; ", i / heads, i % heads, got.lse[i], expected.lse[i]);
  }
  if (first.empty()) return {};
  return first + fmt::format("{} of {} elements and {} of {} LSEs differ", outs, got.out.size() / element, lses,
                             got.lse.size());
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
  // As KernelRowTest's.
  CaseChoice choose_cases(std::int64_t every) const { return CaseChoice(row().backend == "cpu" ? every : 1); }
  const AttentionRow& attention_row() const { return fold_of(row()); }
  std::vector<Dims> dims() const { return varied_dims(attention_row()); }
  Dims first_dims() const { return usual_dims(attention_row()).front(); }

  AttentionResult folded(const AttentionInputs& inputs) const { return attend_with(attention_row(), inputs); }

  void expect_same(const AttentionInputs& inputs, const CacheLayout& layout, int threads = 1) const {
    SCOPED_TRACE(fmt::format("{}, {} rows, page {}{}", describe(inputs.spec), inputs.sequences[0].q_len,
                             layout.page_size, layout.head_major ? ", by heads" : ""));
    const AttentionResult got = DecodeRunner(row(), inputs, layout, threads).run();
    const AttentionResult expected = folded(inputs);
    EXPECT_TRUE(got.same_bits(expected)) << first_difference(got, expected, inputs.spec);
  }

 private:
  std::int64_t checks_before_ = 0;
};

}  // namespace ringattn::testing

#define RINGATTN_FOR_EVERY_DECODER(fixture)                                                               \
  INSTANTIATE_TEST_SUITE_P(Kernels, fixture, ::testing::ValuesIn(::ringattn::testing::rows_like_folds()), \
                           [](const auto& test) { return std::string(test.param.name); })
