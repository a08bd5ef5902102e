// SPDX-License-Identifier: Apache-2.0
// main() of gtest programs whose processes are ranks that meet at RINGATTN_STORE: rank 0 reports as usual, the others
// only what fails. A rank whose test has failed leaves, and the others fail for that.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "comm/store_rank.hpp"

namespace {

class FailuresOfRank : public testing::EmptyTestEventListener {
 public:
  explicit FailuresOfRank(int rank) : rank_(rank) {}

  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", rank_, result.file_name() == nullptr ? "?" : result.file_name(),
                 result.line_number(), result.message());
  }

  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Failed()) return;
    std::fprintf(stderr, "rank %d: %s.%s failed\n", rank_, test.test_suite_name(), test.name());
    std::fflush(nullptr);
    std::_Exit(1);
  }

 private:
  int rank_;
};

}  // namespace

int main(int argc, char** argv) {
  const int rank = ringattn::store_rank().rank;
  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailuresOfRank(rank));
  return RUN_ALL_TESTS();
}
