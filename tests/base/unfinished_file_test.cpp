// SPDX-License-Identifier: Apache-2.0
#include "base/unfinished_file.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::TemporaryFolder;

TEST(UnfinishedFile, GoesWithASignalUnlessItIsFinished) {
  const TemporaryFolder folder;
  const std::string finished = folder.write("finished", "a");
  const std::string unfinished = folder.write("unfinished", "b");
  std::optional<UnfinishedFile> first(finished);
  const UnfinishedFile second(unfinished);
  first.reset();
  remove_unfinished_files();
  EXPECT_TRUE(std::filesystem::exists(finished));
  EXPECT_FALSE(std::filesystem::exists(unfinished));
  remove_unfinished_files();  // one that is gone already
}

TEST(UnfinishedFile, SaysNothingOfTooManyOrOverlongOnes) {
  const TemporaryFolder folder;
  std::vector<std::unique_ptr<UnfinishedFile>> many;
  std::vector<std::string> paths;
  for (std::size_t i = 0; i <= kMostUnfinishedFiles; ++i) {
    paths.push_back(folder.write("file" + std::to_string(i), "x"));
    many.push_back(std::make_unique<UnfinishedFile>(paths.back()));
  }
  remove_unfinished_files();
  for (std::size_t i = 0; i <= kMostUnfinishedFiles; ++i) {
    EXPECT_EQ(std::filesystem::exists(paths[i]), i == kMostUnfinishedFiles) << i;
  }
  many.clear();
  const UnfinishedFile overlong(std::string(100'000, 'x'));
  const std::string again = folder.write("again", "x");
  const UnfinishedFile next(again);  // slots are free again
  remove_unfinished_files();
  EXPECT_FALSE(std::filesystem::exists(again));
}

TEST(UnfinishedFileDeathTest, SignalsStillEndTheProcess) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TemporaryFolder folder;
    const std::string path = folder.write("file", "x");
    EXPECT_EXIT(
        {
          ::signal(signal, SIG_DFL);  // whoever started the test may have it ignored
          remove_unfinished_files_on_signals();
          const UnfinishedFile file(path);
          ::raise(signal);
        },
        ::testing::KilledBySignal(signal), "");
    EXPECT_FALSE(std::filesystem::exists(path)) << signal;
  }
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "x");
  EXPECT_EXIT(  // nohup's stays without effect
      {
        ::signal(SIGHUP, SIG_IGN);
        remove_unfinished_files_on_signals();
        const UnfinishedFile file(path);
        ::raise(SIGHUP);
        std::exit(7);
      },
      ::testing::ExitedWithCode(7), "");
  EXPECT_TRUE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace ringattn
