// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/common/kernel_row_test.hpp"

#include <fmt/format.h>

#include <map>
#include <string>

namespace ringattn::testing {

namespace {

struct Total {
  int tests = 0;
  std::int64_t checks = 0;
};
std::map<std::string, Total, std::less<>> totals;

// Says at the end what was compared on each row.
class PrintTotals final : public ::testing::Environment {
 public:
  void TearDown() override {
    for (const auto& [row, total] : totals) {
      fmt::print("[ CHECKS   ] {}: {} comparisons in {} tests\n", row, total.checks, total.tests);
    }
  }
};
[[maybe_unused]] const ::testing::Environment* const kPrintTotals =
    ::testing::AddGlobalTestEnvironment(new PrintTotals);

}  // namespace

void expect_checks(std::string_view row, std::int64_t checks) {
  EXPECT_GT(checks, 0) << "the test compared nothing on " << row
                       << ": give it dims that the kernel can do, or skip it and say why";
  if (checks == 0) return;
  Total& total = totals[std::string(row)];
  ++total.tests;
  total.checks += checks;
  ::testing::Test::RecordProperty("checks", fmt::format("{}", checks));
}

}  // namespace ringattn::testing
