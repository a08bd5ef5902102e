// SPDX-License-Identifier: Apache-2.0
#include "base/unfinished_file.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/temporary_file.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::TemporaryFolder;

// Ends this process as end_process() does.
[[noreturn]] void leave() {
  remove_unfinished_files();
  std::_Exit(0);
}

TEST(UnfinishedFile, NamesNoFileThatWasThere) {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "x");
  FileDescriptor none;
  const UnfinishedFile file(path, none);
  EXPECT_FALSE(none.valid());
  EXPECT_EQ(errno, EEXIST);
}

TEST(UnfinishedFileDeathTest, GoesWithTheProcessUnlessItIsFinished) {
  const TemporaryFolder folder;
  const std::string finished = folder.file("finished");
  const std::string unfinished = folder.file("unfinished");
  const std::string gone = folder.file("gone");
  const auto live = [&] {
    FileDescriptor files[3];
    std::optional<UnfinishedFile> first(std::in_place, finished, files[0]);
    const UnfinishedFile second(unfinished, files[1]);
    const UnfinishedFile third(gone, files[2]);
    std::filesystem::remove(gone);
    first.reset();
    leave();
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(0), "");
  EXPECT_TRUE(std::filesystem::exists(finished));
  EXPECT_FALSE(std::filesystem::exists(unfinished));
}

TEST(UnfinishedFileDeathTest, TooManyAndOverlongOnesStay) {
  const TemporaryFolder folder;
  const auto live = [&] {
    std::vector<std::unique_ptr<UnfinishedFile>> many;
    FileDescriptor file;
    for (std::size_t i = 0; i <= kMaxUnfinishedFiles; ++i) {
      many.push_back(std::make_unique<UnfinishedFile>(folder.file("file" + std::to_string(i)), file));
    }
    many.erase(many.begin());  // its file stays, and its slot is free again
    const UnfinishedFile next(folder.file("next"), file);
    const UnfinishedFile overlong(std::string(100'000, 'x'), file);
    if (file.valid() || errno != ENAMETOOLONG) std::_Exit(1);
    leave();
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(0), "");
  auto left = folder.entries();
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, (std::vector<std::string>{"file0", "file" + std::to_string(kMaxUnfinishedFiles)}));
}

TEST(UnfinishedFileDeathTest, TheFirstProcessThatEndsTakesAFileAlong) {
  const TemporaryFolder folder;
  FileDescriptor open;
  const UnfinishedFile created(folder.file("created"), open);
  ASSERT_TRUE(open.valid());
  const std::string published = folder.write("published", "x");
  const auto live = [&] {
    std::optional<UnfinishedFile> first(std::in_place, published);
    first.reset();
    std::vector<std::unique_ptr<UnfinishedFile>> many;
    for (std::size_t i = 0; i < 2 * kMaxSharedFiles; ++i) {
      many.push_back(std::make_unique<UnfinishedFile>(folder.file("created")));
    }
    leave();
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(folder.entries(), (std::vector<std::string>{"published"}));
}

TEST(UnfinishedFileDeathTest, SignalsStillEndTheProcess) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TemporaryFolder folder;
    const std::string path = folder.file("file");
    EXPECT_EXIT(
        {
          ::signal(signal, SIG_DFL);  // the test's parent process may have it ignored
          remove_unfinished_files_on_signals();
          FileDescriptor open;
          const UnfinishedFile file(path, open);
          ::raise(signal);
        },
        ::testing::KilledBySignal(signal), "");
    EXPECT_FALSE(std::filesystem::exists(path)) << signal;
  }
  const TemporaryFolder folder;
  const std::string path = folder.file("file");
  EXPECT_EXIT(  // nohup's stays without effect
      {
        ::signal(SIGHUP, SIG_IGN);
        remove_unfinished_files_on_signals();
        FileDescriptor open;
        const UnfinishedFile file(path, open);
        ::raise(SIGHUP);
        std::exit(7);
      },
      ::testing::ExitedWithCode(7), "");
  EXPECT_TRUE(std::filesystem::exists(path));
}

// A thread creates and removes files all the time, so that the signal finds it at every point of that.
TEST(UnfinishedFileDeathTest, NoMomentLeavesAFile) {
  const TemporaryFolder folder;
  for (int i = 0; i < 200; ++i) {
    const auto live = [&] {
      ::signal(SIGTERM, SIG_DFL);
      remove_unfinished_files_on_signals();
      std::thread([&] {
        while (true) TemporaryFile(folder.file("out"), "out").write("x");
      }).detach();
      std::this_thread::sleep_for(std::chrono::microseconds(300 + 7 * i));
      ::kill(::getpid(), SIGTERM);
      std::this_thread::sleep_for(std::chrono::seconds(10));
    };
    EXPECT_EXIT(live(), ::testing::KilledBySignal(SIGTERM), "");
    ASSERT_TRUE(folder.entries().empty()) << i;
  }
}

}  // namespace
}  // namespace ringattn
