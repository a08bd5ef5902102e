// SPDX-License-Identifier: Apache-2.0
// main() of a program that holds the tests of several (ringattn_joined_tests() of tests/CMakeLists.txt). Its arguments
// are gtest's and the sources whose tests it runs; without a source it runs all.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>

namespace {

// The full names of a program's tests, by the path of their source.
std::multimap<std::string, std::string> tests_by_source() {
  std::multimap<std::string, std::string> tests;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(j);
      tests.emplace(test.file(), fmt::format("{}.{}", suite.name(), test.name()));
    }
  }
  return tests;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const auto tests = tests_by_source();
  std::string names;
  for (int i = 1; i < argc; ++i) {
    const auto [begin, end] = tests.equal_range(argv[i]);
    if (begin == end) {
      fmt::print(stderr, "error: no test of {} is here (the compiler read it by another path). Build again.\n",
                 argv[i]);
      return 1;
    }
    for (auto test = begin; test != end; ++test) names += (names.empty() ? "" : ":") + test->second;
  }
  if (!names.empty()) GTEST_FLAG_SET(filter, names);
  const int status = RUN_ALL_TESTS();
  if (::testing::UnitTest::GetInstance()->test_to_run_count() > 0) return status;
  fmt::print(stderr, "error: no test ran (none matches the filter, or all are disabled). Check --gtest_filter.\n");
  return 1;
}
