// SPDX-License-Identifier: Apache-2.0
#include "comm/message_claim.hpp"

#include <gtest/gtest.h>

#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

constexpr const char* kFolder = "PMIX_SERVER_TMPDIR";
constexpr const char* kJob = "PMIX_NAMESPACE";

TEST(MessageClaim, IsTheFirstRanksOfAJob) {
  const testing::TemporaryFolder folder;
  const testing::ScopedEnvironment where(kFolder, folder.path());
  const auto claim_of = [](const char* job) {
    const testing::ScopedEnvironment name(kJob, job);
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
  const testing::ScopedEnvironment where(kFolder, "/nowhere/at/all");
  const testing::ScopedEnvironment job(kJob, "one");
  const MessageClaim gone;
  EXPECT_TRUE(gone.try_claim());
  EXPECT_TRUE(gone.try_claim());
}

}  // namespace
}  // namespace ringattn
