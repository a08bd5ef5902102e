// SPDX-License-Identifier: Apache-2.0
// Files appear whole or not at all, replace nothing unasked, and fail early.
#include "io/safetensors_writer.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::read_whole;
using testing::TemporaryFolder;

SafetensorsPlan small_plan() { return plan_safetensors({{"out", FileDtype::kU8, {16}}}, {{"digest", "????"}}); }

TEST(SafetensorsWriter, LeavesNothingUnlessCommitted) {
  const TemporaryFolder folder;
  const std::string path = folder.file("out");
  { const auto writer = SafetensorsWriter::create(small_plan(), path, false); }
  EXPECT_TRUE(folder.entries().empty());
  try {
    const auto writer = SafetensorsWriter::create(small_plan(), path, false);
    EXPECT_EQ(folder.entries().size(), 1U);
    EXPECT_TRUE(writer->temporary_path().starts_with(path + "."));
    EXPECT_TRUE(writer->temporary_path().ends_with(".tmp"));
    fail(ErrorCode::kPeer, "a rank is lost");
  } catch (const Error&) {
  }
  EXPECT_TRUE(folder.entries().empty());
  const auto writer = SafetensorsWriter::create(small_plan(), path, false);
  writer->discard();
  writer->discard();
  EXPECT_TRUE(folder.entries().empty());
  EXPECT_THROW(writer->commit(), Error);
}

TEST(SafetensorsWriter, OtherRanksRemoveTheFileUnlessItIsCommitted) {
  const TemporaryFolder folder;
  const auto lost = SafetensorsWriter::create(small_plan(), folder.file("out"), false);
  { const auto other = SafetensorsWriter::open_existing(small_plan(), lost->temporary_path()); }
  EXPECT_TRUE(folder.entries().empty());
  EXPECT_FILE_ERROR(lost->commit(), "No such file");

  const auto writer = SafetensorsWriter::create(small_plan(), folder.file("out"), false);
  {
    const auto other = SafetensorsWriter::open_existing(small_plan(), writer->temporary_path());
    other->release();
  }
  writer->commit();
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"out"});
}

TEST(SafetensorsWriter, ReplacesOnlyByForce) {
  const TemporaryFolder folder;
  const std::string path = folder.write("out", "precious");
  EXPECT_FILE_ERROR(check_output_path(path, false), "it exists");
  EXPECT_FILE_ERROR(SafetensorsWriter::create(small_plan(), path, false), "replace it with force");
  check_output_path(path, true);
  EXPECT_EQ(read_whole(path), "precious");
  const auto writer = SafetensorsWriter::create(small_plan(), path, true);
  EXPECT_EQ(read_whole(path), "precious");
  writer->commit();
  EXPECT_TRUE(SafetensorsFile(path).contains("out"));
  EXPECT_EQ(folder.entries().size(), 1U);

  // A file that appears while the job runs isn't replaced either.
  const std::string other = folder.file("other");
  const auto late = SafetensorsWriter::create(small_plan(), other, false);
  folder.write("other", "precious");
  EXPECT_FILE_ERROR(late->commit(), "it exists");
  EXPECT_EQ(read_whole(other), "precious");
  late->discard();
  EXPECT_EQ(folder.entries().size(), 2U);
}

TEST(SafetensorsWriter, RefusesPathsThatCannotBeWritten) {
  const TemporaryFolder folder;
  folder.write("plain", "x");
  ASSERT_EQ(::mkfifo(folder.file("fifo").c_str(), 0600), 0);
  const std::pair<std::string, std::string> cases[] = {
      {"", "not a path"},
      {folder.path(), "is a directory"},
      {folder.file("none/out"), "No such file"},
      {folder.file("plain/out"), "is not a folder"},
      {folder.file("fifo"), "not a regular file"},
      {"/dev/null", "not a regular file"},
      {folder.file(std::string(300, 'a')), "File name too long"},
  };
  for (const auto& test : cases) {
    const std::string& path = test.first;  // no binding: clang 14 can't capture those
    const std::string& why = test.second;
    SCOPED_TRACE(path);
    for (const bool force : {false, true}) EXPECT_FILE_ERROR(SafetensorsWriter::create(small_plan(), path, force), why);
  }
  if (std::filesystem::exists("/proc/self")) {
    EXPECT_FILE_ERROR(SafetensorsWriter::create(small_plan(), "/proc/out", false), "/proc");
  }
  if (::geteuid() != 0) {  // permissions don't bind root
    std::filesystem::create_directory(folder.file("closed"));
    ASSERT_EQ(::chmod(folder.file("closed").c_str(), 0500), 0);
    EXPECT_FILE_ERROR(SafetensorsWriter::create(small_plan(), folder.file("closed/out"), false), "Permission denied");
  }
  const std::string deep = folder.path() + std::string(4085 - folder.path().size(), '/');
  EXPECT_FILE_ERROR(check_output_path(deep + "a", false), "paths have at most 4095 bytes");  // the temporary one's
  EXPECT_EQ(folder.entries().size(), ::geteuid() != 0 ? 3U : 2U);
}

TEST(SafetensorsWriter, TakesEveryNameThatTheFileSystemTakes) {
  for (const std::size_t length : {239U, 240U, 242U, 243U, 250U, 255U}) {
    const TemporaryFolder folder;
    const std::string path = folder.file(std::string(length, 'a'));
    check_output_path(path, false);
    const auto writer = SafetensorsWriter::create(small_plan(), path, false);
    EXPECT_EQ(folder.entries().front().substr(0, 200), std::string(200, 'a')) << "it says whose it is";
    writer->commit();
    EXPECT_EQ(folder.entries(), std::vector{std::string(length, 'a')});
  }
  const TemporaryFolder folder;
  EXPECT_FILE_ERROR(check_output_path(folder.file(std::string(256, 'a')), false), "256 bytes, and its file system");
}

TEST(SafetensorsWriter, SurvivesAFolderThatVanishes) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("sub"));
  const auto writer = SafetensorsWriter::create(small_plan(), folder.file("sub/out"), false);
  std::filesystem::remove_all(folder.file("sub"));
  EXPECT_FILE_ERROR(writer->commit(), "No such file");
  EXPECT_FILE_ERROR(SafetensorsWriter::open_existing(small_plan(), writer->temporary_path()), "shared by all hosts");
}

TEST(SafetensorsWriter, AsksForSpaceBeforeTheJob) {
  const TemporaryFolder folder;
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4096, before.rlim_max};
  const auto plan = plan_safetensors({{"out", FileDtype::kU8, {10'000}}}, {});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_FILE_ERROR(SafetensorsWriter::create(plan, folder.file("out"), false), "File too large");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(folder.entries().empty());
  // More than any file system gives.
  const auto huge = plan_safetensors({{"out", FileDtype::kU8, {std::int64_t{1} << 59}}}, {});
  EXPECT_FILE_ERROR(SafetensorsWriter::create(huge, folder.file("out"), false), "can't reserve 576460752303423");
  EXPECT_TRUE(folder.entries().empty());
}

TEST(SafetensorsWriter, RefusesAForeignTemporaryFile) {
  const TemporaryFolder folder;
  EXPECT_FILE_ERROR(SafetensorsWriter::open_existing(small_plan(), folder.write("x.tmp", "short")),
                    "isn't the file that another rank created");
  std::filesystem::create_symlink(folder.file("x.tmp"), folder.file("y.tmp"));
  EXPECT_FILE_ERROR(SafetensorsWriter::open_existing(small_plan(), folder.file("y.tmp")), "y.tmp");
}

TEST(SafetensorsWriter, PlansWhatItsReaderAccepts) {
  const SafetensorsPlan plan =
      plan_safetensors({{"b", FileDtype::kU8, {3}}, {"a", FileDtype::kF32, {2, 2}}, {"c", FileDtype::kBf16, {1}}},
                       {{"text", "quote \" slash \\ newline \n \xc3\xa4"}});
  EXPECT_EQ(plan.head.size() % 8, 0U);
  EXPECT_EQ(plan.header.find("a")->begin, 0);
  EXPECT_EQ(plan.header.find("c")->begin, 16);
  EXPECT_EQ(plan.header.find("b")->begin, 18);
  // Elements of half a byte.
  const SafetensorsPlan halves = plan_safetensors({{"a", FileDtype::kF4, {3, 2}}, {"b", FileDtype::kU8, {1}}}, {});
  EXPECT_EQ(halves.header.find("a")->begin, 1);
  EXPECT_EQ(halves.header.find("a")->bytes(), 3);
  EXPECT_EQ(plan.header.metadata.at("text"), "quote \" slash \\ newline \n \xc3\xa4");
  const auto expect_usage = [](const std::vector<OutputTensor>& tensors, const FileMetadata& metadata) {
    try {
      plan_safetensors(tensors, metadata);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    }
  };
  expect_usage({{"a", FileDtype::kU8, {1}}, {"a", FileDtype::kU8, {1}}}, {});
  expect_usage({{"a", FileDtype::kF32, {std::int64_t{1} << 62}}}, {});
  expect_usage({{"a", FileDtype::kF32, {-1}}}, {});
  expect_usage({{"a\n", FileDtype::kF32, {1}}}, {});
  expect_usage({}, {{"k", "\xff"}});
  expect_usage({}, {{"k", "1"}, {"k", "2"}});
}

TEST(SafetensorsWriter, PatchesOnlyPlannedMetadata) {
  const TemporaryFolder folder;
  const auto writer = SafetensorsWriter::create(small_plan(), folder.file("out"), false);
  EXPECT_THROW(writer->set_metadata("digest", "12345"), Error);
  EXPECT_THROW(writer->set_metadata("digest", "12\"4"), Error);
  EXPECT_THROW(writer->set_metadata("other", "1234"), Error);
  writer->set_metadata("digest", "1234");
  writer->commit();
  EXPECT_EQ(*SafetensorsFile(folder.file("out")).metadata("digest"), "1234");
}

}  // namespace
}  // namespace ringattn
