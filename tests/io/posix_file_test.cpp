// SPDX-License-Identifier: Apache-2.0
#include "io/posix_file.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/counting_liveness.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

// A network's file system may move a few MB a second, and a rank may be silent for a second or two.
constexpr std::size_t kPiece = std::size_t{4} << 20;
constexpr int kPieces = 5;

TEST(PosixFile, ARankSendsAHeartbeatBetweenSmallReads) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("large");
  const FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_TRUE(file.valid());
  std::vector<std::byte> bytes(kPieces * kPiece, std::byte{7});
  testing::CountingLiveness written, read;
  {
    const RankLivenessScope scope(written);
    write_exactly(file, path, 0, bytes);
  }
  EXPECT_GE(written.heartbeats(), kPieces);
  const std::vector<std::byte> before = bytes;
  bytes.assign(bytes.size(), std::byte{0});
  {
    const RankLivenessScope scope(read);
    read_exactly(file, path, 0, bytes);
  }
  EXPECT_GE(read.heartbeats(), kPieces);
  EXPECT_EQ(bytes, before);
}

}  // namespace
}  // namespace ringattn
