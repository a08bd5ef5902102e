// SPDX-License-Identifier: Apache-2.0
#include "base/file_descriptor.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "base/deadline.hpp"
#include "tests/support/counting_liveness.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::CountingLiveness;

TEST(AwaitDisk, ARankSendsHeartbeatsMeanwhile) {
  CountingLiveness liveness;
  const RankLivenessScope scope(liveness);
  const Deadline late = Deadline::after(60.0);  // reached where there are no signs
  const int result = await_disk([&] {
    while (liveness.heartbeats() < 2 && !late.expired()) std::this_thread::yield();
    return late.expired() ? 0 : 17;
  });
  EXPECT_EQ(result, 17);
}

TEST(AwaitDisk, WhoIsNoRankMakesTheCallItself) {
  const auto here = std::this_thread::get_id();
  EXPECT_EQ(await_disk([&] { return std::this_thread::get_id() == here ? 17 : 0; }), 17);
}

// The caller may have given up and closed the file when the call comes to it.
TEST(AwaitDisk, ACallOnAFileHasADescriptorOfItsOwn) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("file", "abc");
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(file.valid());
  int used = -1;
  const auto length = [&](int fd) {
    used = fd;
    return static_cast<int>(::lseek(fd, 0, SEEK_END));
  };
  EXPECT_EQ(await_disk(file, length), 3);
  EXPECT_EQ(used, file.get());
  CountingLiveness liveness;
  const RankLivenessScope scope(liveness);
  EXPECT_EQ(await_disk(file, length), 3);
  EXPECT_NE(used, file.get());
  EXPECT_EQ(::fcntl(used, F_GETFD), -1);  // it is closed when the call is over
}

}  // namespace
}  // namespace ringattn
