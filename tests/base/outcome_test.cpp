// SPDX-License-Identifier: Apache-2.0
#include "base/outcome.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <optional>
#include <string>

#include "base/end_process.hpp"
#include "base/unfinished_file.hpp"
#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::ScopedEnvironment;

// What the only file of the folder holds.
std::string said(const testing::TemporaryFolder& folder) {
  const auto names = folder.entries();
  return names.size() == 1 ? testing::read_whole(folder.file(names[0])) : std::to_string(names.size()) + " files";
}

TEST(Outcome, IsWrittenAtTheStartAndAtTheEnd) {
  const testing::TemporaryFolder folder;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", folder.path().c_str());
  const auto live = [] {
    begin_outcome(3, 4);
    if (std::getenv("RINGATTN_OUTCOMES") != nullptr) std::_Exit(99);
    std::_Exit(end_outcome(6));
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(6), "");
  EXPECT_EQ(said(folder), "rank 3\nstarted 4\ncode 6\n");
}

TEST(Outcome, IsWrittenWhereAProcessCannotUnwind) {
  const testing::TemporaryFolder folder;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", folder.path().c_str());
  const auto live = [] {
    begin_outcome(std::nullopt, 0);
    static_cast<void>(end_outcome(6));
    end_process(3);
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(3), "");
  EXPECT_EQ(said(folder), "started 0\ncode 6\ncode 3\n");
}

TEST(Outcome, NamesTheSignal) {
  const testing::TemporaryFolder folder;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", folder.path().c_str());
  const auto live = [] {
    begin_outcome(std::nullopt, 2);
    remove_unfinished_files_on_signals();
    std::raise(SIGTERM);
  };
  EXPECT_EXIT(live(), ::testing::KilledBySignal(SIGTERM), "");
  EXPECT_EQ(said(folder), "started 2\nsignal 15\n");
}

TEST(Outcome, IsTheExitStatusWhereTheFolderIsNot) {
  const testing::TemporaryFolder folder;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", folder.file("none").c_str());
  const auto live = [](int code) {
    begin_outcome(std::nullopt, 2);
    std::_Exit(end_outcome(code));
  };
  EXPECT_EXIT(live(3), ::testing::ExitedWithCode(kElsewhere + 3), "");
  EXPECT_EXIT(live(0), ::testing::ExitedWithCode(0), "");
}

TEST(Outcome, IsTheCodeWithoutALauncher) {
  begin_outcome(std::nullopt, 2);
  EXPECT_EQ(end_outcome(3), 3);
}

}  // namespace
}  // namespace ringattn
