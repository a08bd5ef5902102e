// SPDX-License-Identifier: Apache-2.0
#include "base/outcome.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <optional>
#include <string>

#include "base/file_descriptor.hpp"
#include "base/unfinished_file.hpp"
#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::ScopedEnvironment;

// A launcher.
class Listener {
 public:
  Listener() : socket_(bind_outcome_socket(folder_.path().c_str())) { EXPECT_TRUE(socket_.valid()); }

  const std::string& folder() const { return folder_.path(); }

  // What the only process that has connected said, after it has ended.
  std::string heard() const {
    const FileDescriptor peer(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer.valid()) return "no connection";
    std::string text;
    Outcome outcome;
    while (::recv(peer.get(), &outcome, sizeof(outcome), 0) == ssize_t{sizeof(outcome)}) {
      constexpr const char* kStates[] = {"begun", "starting", "leaving", "code", "signal"};
      EXPECT_EQ(outcome.format, Outcome::kFormat);
      text += std::to_string(outcome.rank) + " of " + std::to_string(outcome.ranks_on_host) + " " +
              kStates[static_cast<int>(outcome.state)] + " " + std::to_string(outcome.number) + "\n";
    }
    return text;
  }

 private:
  const testing::TemporaryFolder folder_;
  const FileDescriptor socket_;
};

TEST(Outcome, IsToldAtTheStartAndAtTheEnd) {
  const Listener launcher;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", launcher.folder().c_str());
  const auto live = [] {
    begin_outcome(3, 4);
    if (std::getenv("RINGATTN_OUTCOMES") != nullptr) std::_Exit(99);
    std::_Exit(end_outcome(6));
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(6), "");
  EXPECT_EQ(launcher.heard(), "3 of 4 begun 0\n3 of 4 code 6\n");
}

TEST(Outcome, IsToldWhereAProcessCannotUnwind) {
  const Listener launcher;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", launcher.folder().c_str());
  const auto live = [] {
    begin_outcome(std::nullopt, 0);
    static_cast<void>(end_outcome(6));
    end_process(3);
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(3), "");
  EXPECT_EQ(launcher.heard(), "-1 of 0 begun 0\n-1 of 0 code 6\n-1 of 0 code 3\n");
}

TEST(Outcome, NamesTheSignal) {
  const Listener launcher;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", launcher.folder().c_str());
  const auto live = [] {
    begin_outcome(std::nullopt, 2);
    remove_unfinished_files_on_signals();
    std::raise(SIGTERM);
  };
  EXPECT_EXIT(live(), ::testing::KilledBySignal(SIGTERM), "");
  EXPECT_EQ(launcher.heard(), "-1 of 2 begun 0\n-1 of 2 signal 15\n");
}

TEST(Outcome, IsToldHowLongAProcessMayTakeToLeave) {
  const Listener launcher;
  const ScopedEnvironment launched("RINGATTN_OUTCOMES", launcher.folder().c_str());
  const auto live = [] {
    begin_outcome(1, 2);
    leave_outcome(2.5);
    end_process(0);
  };
  EXPECT_EXIT(live(), ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(launcher.heard(), "1 of 2 begun 0\n1 of 2 leaving 3\n1 of 2 code 0\n");
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

constexpr const char* kClaimFolder = "PMIX_SERVER_TMPDIR";
constexpr const char* kClaimJob = "PMIX_NAMESPACE";

TEST(MessageClaim, IsTheFirstRanksOfAJob) {
  const testing::TemporaryFolder folder;
  const testing::ScopedEnvironment where(kClaimFolder, folder.path());
  const auto claim_of = [](const char* job) {
    const testing::ScopedEnvironment name(kClaimJob, job);
    return MessageClaim();
  };
  const MessageClaim first = claim_of("one");
  const MessageClaim second = claim_of("one");
  EXPECT_TRUE(second.try_claim());
  EXPECT_FALSE(first.try_claim());
  EXPECT_FALSE(second.try_claim());
  EXPECT_TRUE(claim_of("other").try_claim());
}

// Two messages are better than none.
TEST(MessageClaim, IsEveryRanksWhereTheyShareNoFolder) {
  const MessageClaim nowhere;
  EXPECT_TRUE(nowhere.try_claim());
  EXPECT_TRUE(nowhere.try_claim());
  const testing::ScopedEnvironment where(kClaimFolder, "/nowhere/at/all");
  const testing::ScopedEnvironment job(kClaimJob, "one");
  const MessageClaim gone;
  EXPECT_TRUE(gone.try_claim());
  EXPECT_TRUE(gone.try_claim());
}

}  // namespace
}  // namespace ringattn
