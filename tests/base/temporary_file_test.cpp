// SPDX-License-Identifier: Apache-2.0
#include "base/temporary_file.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/text_file.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::read_whole;
using testing::TemporaryFolder;

TEST(TemporaryFile, AppearsWholeOrNotAtAll) {
  const TemporaryFolder folder;
  const std::string path = folder.file("report");
  { TemporaryFile(path, "the report").write("half"); }
  EXPECT_TRUE(folder.entries().empty());
  TemporaryFile file(path, "the report");
  file.write("all ");
  file.write("of it");
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_EQ(file.path().size(), path.size() + 13) << file.path();
  EXPECT_TRUE(file.path().starts_with(path + ".") && file.path().ends_with(".tmp")) << file.path();
  file.publish_synced(false);
  EXPECT_EQ(read_whole(path), "all of it");
  EXPECT_THROW(file.publish(true), Error);
}

TEST(TemporaryFile, ReplacesOnlyWhereItMay) {
  const TemporaryFolder folder;
  const std::string path = folder.write("report", "precious");
  TemporaryFile file(path, "the report");
  EXPECT_FILE_ERROR(file.publish(false), "can't write the report (it exists)");
  EXPECT_EQ(read_whole(path), "precious");
  file.publish(true);
  EXPECT_EQ(read_whole(path), "");
}

// What a killed process has left may have any name: also that of a process with this one's number, in a container.
TEST(TemporaryFile, PassesLeftoversBy) {
  const TemporaryFolder folder;
  const std::string path = folder.file("report");
  const std::string leftover = "report." + std::to_string(::getpid()) + ".tmp";
  folder.write(leftover, "left");
  const TemporaryFile first(path, path);
  const TemporaryFile second(path, path);
  EXPECT_NE(first.path(), second.path());
  write_text_file(path, "new", false, "json");
  EXPECT_EQ(read_whole(path), "new");
  EXPECT_EQ(read_whole(folder.file(leftover)), "left");
}

TEST(TemporaryFile, KeepsAsMuchOfTheNameAsFits) {
  const TemporaryFolder folder;
  std::string name;
  while (name.size() < 254) name += "\xc3\xa4";  // two bytes a letter, so 242 is no end of one
  const TemporaryFile even(folder.file(name), name);
  EXPECT_EQ(std::filesystem::path(even.path()).filename().string().substr(0, 242), name.substr(0, 242));
  const TemporaryFile odd(folder.file("x" + name), name);
  EXPECT_EQ(std::filesystem::path(odd.path()).filename().string().size(), 241U + 13U);
  write_text_file(folder.file("x" + name), "y", false, "json");
  EXPECT_EQ(read_whole(folder.file("x" + name)), "y");
  EXPECT_FILE_ERROR(check_new_file(folder.file("xx" + name), false, "json"),
                    "256 bytes, and its file system takes 255");
}

TEST(TemporaryFile, NamesTheFileInItsFailures) {
  EXPECT_FILE_ERROR(TemporaryFile("/proc/none/x", setting("json", "x")), "beside json = x (No such file");
  EXPECT_FILE_ERROR(write_text_file("/dev/full/x", "", false, "json"), "/dev/full is not a directory");
}

}  // namespace
}  // namespace ringattn
