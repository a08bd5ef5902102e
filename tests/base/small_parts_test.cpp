// SPDX-License-Identifier: Apache-2.0
// The JSON writer, text files, the environment, and other small parts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "base/aligned.hpp"
#include "base/deadline.hpp"
#include "base/device_timeouts.hpp"
#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "base/memory.hpp"
#include "base/shared_value.hpp"
#include "base/text_file.hpp"
#include "base/threads.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::error_of;
using testing::TemporaryFolder;

static_assert(aligned(0) == 0 && aligned(1) == 256 && aligned(256) == 256 && aligned(257) == 512);

TEST(SharedValue, IsComparedByWhatItIs) {
  const SharedValue<std::string> nothing, one(std::make_shared<const std::string>("one"));
  EXPECT_TRUE(nothing == nullptr);
  EXPECT_EQ(nothing, SharedValue<std::string>());
  EXPECT_TRUE(one != nullptr);
  EXPECT_NE(one, nothing);
  EXPECT_EQ(one, SharedValue<std::string>(std::make_shared<const std::string>("one")));
  EXPECT_NE(one, SharedValue<std::string>(std::make_shared<const std::string>("two")));
  EXPECT_EQ(one->size(), 3U);
}

TEST(JsonWriter, WritesObjectsAndLists) {
  JsonWriter json(false);
  json.begin_object().member("a", 1).member("b", "x").key("c").begin_array().value(0.5).value(true).null().end_array();
  json.key("d").begin_object().end_object().end_object();
  EXPECT_EQ(json.text(), R"({"a":1,"b":"x","c":[0.5,true,null],"d":{}})");
}

TEST(JsonWriter, IsReadableWherePretty) {
  JsonWriter json;
  json.begin_object().member("a", 1).key("b").begin_array(true).value(1).value(2).end_array();
  json.key("c").begin_array().begin_object().member("d", 2).end_object().end_array().end_object();
  EXPECT_EQ(json.text(), "{\n  \"a\": 1,\n  \"b\": [1, 2],\n  \"c\": [\n    {\n      \"d\": 2\n    }\n  ]\n}\n");
}

TEST(JsonWriter, EscapesWhatJsonCanNotHold) {
  JsonWriter json(false);
  json.begin_array()
      .value("\"\\\n\x01")
      .value(
          "\xff"
          "a\xc3\xa4\xc3")
      .value("\xed\xa0\x80")
      .value(std::nan(""))
      .value(INFINITY);
  json.end_array();
  EXPECT_EQ(json.text(),
            "[\"\\\"\\\\\\u000a\\u0001\",\"\\ufffda\xc3\xa4\\ufffd\",\"\\ufffd\\ufffd\\ufffd\",null,null]");
}

TEST(JsonWriter, KeepsNumbersExactly) {
  JsonWriter json(false);
  json.begin_array().value(std::int64_t{-9223372036854775807}).value(std::uint64_t{18446744073709551615U}).value(0.1);
  json.end_array();
  EXPECT_EQ(json.text(), "[-9223372036854775807,18446744073709551615,0.1]");
}

TEST(Deadlines, OfAnyLengthAreInTheFuture) {
  for (const double seconds : {1.0, 1e9, 1e10, 1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(Deadline::after(seconds).expired()) << seconds;
  }
  EXPECT_TRUE(Deadline::after(0.0).expired());
  EXPECT_TRUE(Deadline::after(-1.0).expired());
}

// A device may work for hours, and one that is stuck is not waited for without an end.
TEST(DeviceTimeouts, IsOfWhatIsWaitedFor) {
  EXPECT_GT(DeviceTimeouts::for_queue().seconds(), 2 * 3600.0);
  EXPECT_LT(DeviceTimeouts::for_queue().seconds(), 7 * 24 * 3600.0);
  EXPECT_EQ(DeviceTimeouts::for_short_work().seconds(), 60.0);
  EXPECT_EQ(DeviceTimeouts::for_probe(60.0).seconds(), DeviceTimeouts::kProbeSeconds);
  EXPECT_EQ(DeviceTimeouts::for_probe(2.0).seconds(), 2.0);
}

TEST(DeviceTimeouts, EndsWithTheReason) {
  DeviceTimeouts::check(Deadline::after(60.0), "nobody else has a part in it");
  const Error error = error_of([] { DeviceTimeouts::check(Deadline::after(0.0), "3 tasks are enqueued"); });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_STREQ(error.what(),
               "the device's work did not end within 0 s (3 tasks are enqueued). See whether the GPU still answers "
               "(nvidia-smi).");
}

TEST(TextFiles, AppearWholeAndAreKept) {
  const TemporaryFolder folder;
  const std::string path = folder.file("a");
  write_text_file(path, "first", false, "json");
  EXPECT_EQ(read_text_file(path), "first");
  EXPECT_EQ(error_of([&] { write_text_file(path, "second", false, "json"); }).code(), ErrorCode::kFile);
  EXPECT_EQ(read_text_file(path), "first");
  write_text_file(path, "second", true, "json");
  EXPECT_EQ(read_text_file(path), "second");
  EXPECT_EQ(folder.entries().size(), 1U);  // no temporary file
  EXPECT_EQ(error_of([&] { check_new_file(folder.path(), true, "json"); }).code(), ErrorCode::kFile);
  EXPECT_EQ(error_of([&] { check_new_file(folder.file("none/b"), true, "json"); }).code(), ErrorCode::kFile);
  EXPECT_EQ(error_of([&] { check_new_file(path + "/b", true, "json"); }).code(), ErrorCode::kFile);
  EXPECT_EQ(error_of([&] { write_text_file("/dev/null", "to a device", true, "json"); }).code(), ErrorCode::kFile);
}

TEST(TextFiles, AppearBehindLinksToDirectoriesAndNeverThroughLinksToFiles) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("real"));
  std::filesystem::create_directory_symlink(folder.file("real"), folder.file("linked"));
  write_text_file(folder.file("linked/a"), "text", false, "json");
  EXPECT_EQ(read_text_file(folder.file("real/a")), "text");
  std::filesystem::create_symlink(folder.file("real/a"), folder.file("link"));
  EXPECT_EQ(error_of([&] { write_text_file(folder.file("link"), "other", true, "json"); }).code(), ErrorCode::kFile);
  EXPECT_EQ(read_text_file(folder.file("real/a")), "text");
}

TEST(TextFiles, AreBounded) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a", "12345");
  EXPECT_EQ(read_text_file(path, 5), "12345");
  EXPECT_EQ(error_of([&] { read_text_file(path, 4); }).code(), ErrorCode::kFile);
  EXPECT_EQ(error_of([&] { read_text_file(folder.file("none")); }).code(), ErrorCode::kFile);
  EXPECT_EQ(error_of([&] { read_text_file(folder.path()); }).code(), ErrorCode::kFile);
}

TEST(Threads, AreAsManyAsAnybodyMayAskFor) {
  for (const std::int64_t threads : {0, 1, kMaxThreads}) check_threads(threads);
  for (const std::int64_t threads : {std::int64_t{-1}, std::int64_t{kMaxThreads} + 1, std::int64_t{1} << 40}) {
    EXPECT_EQ(error_of([&] { check_threads(threads); }).code(), ErrorCode::kUsage) << threads;
  }
}

TEST(EnvironmentTable, TakesGoodValuesAndRefusesBadOnes) {
  struct Case {
    std::string_view name;
    std::string_view good;
    std::string_view bad;
  };
  const std::string too_long(128, 'x');
  const std::string secret(64, 'a');
  const Case cases[] = {{"RINGATTN_PACE", "100m", "0"},
                        {"RINGATTN_STORE", "node1:29555", "node1"},
                        {"RINGATTN_JOB", "nightly", too_long},
                        {"RINGATTN_STORE_SECRET", secret, "too-short"},
                        {"RINGATTN_STORE_SECRET_FILE", "/run/secret", ""},
                        {"RINGATTN_OUTCOMES", "/tmp/outcomes", ""},
                        {"RINGATTN_LIBRARY", "/lib/libringattn_c.so.1", ""},
                        {"RINGATTN_PROGRAM", "/bin/ringattn", ""},
                        {"RINGATTN_RANGES", "1", "on"},
                        {"RINGATTN_TEST_LONG", "1", "yes"},
                        {"RINGATTN_TEST_SEED", "7", "x"}};
  ASSERT_EQ(std::size(cases), environment_table().size());
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    const EnvironmentVariable& row = environment_table()[i];
    EXPECT_EQ(row.name, cases[i].name);
    Environment values;
    EXPECT_TRUE(row.set(values, cases[i].good)) << row.name;
    EXPECT_FALSE(row.set(values, cases[i].bad)) << row.name;
    EXPECT_FALSE(row.set(values, "")) << row.name;
  }
  Environment values;
  environment_table()[0].set(values, "100m");
  EXPECT_EQ(values.pace, 100.0 * 1024 * 1024);
}

TEST(EnvironmentTable, ShowsNoSecret) {
  const std::string secret(64, 'a');
  ::setenv("RINGATTN_STORE_SECRET", secret.c_str(), 1);
  constexpr std::string_view kPrefix[] = {"RINGATTN_STORE_SECRET"};
  const auto entries = environment_entries(kPrefix);
  ::unsetenv("RINGATTN_STORE_SECRET");
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].value, "(not shown)");
  EXPECT_EQ(shown_value("RINGATTN_STORE", "node1:29555"), "node1:29555");
  EXPECT_FALSE(is_secret(std::string(31, 'a')));
  EXPECT_TRUE(is_secret(std::string(32, 'a')));
  EXPECT_FALSE(is_secret(std::string(1025, 'a')));
  EXPECT_FALSE(is_secret(std::string(32, 'a') + " b"));
}

TEST(EnvironmentTable, ListsEntriesByPrefix) {
  ::setenv("RINGATTN_TEST_SEED", "7", 1);
  constexpr std::string_view kPrefix[] = {"RINGATTN_TEST_SE"};
  const auto entries = environment_entries(kPrefix);
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].name + "=" + entries[0].value, "RINGATTN_TEST_SEED=7");
  ::unsetenv("RINGATTN_TEST_SEED");
  EXPECT_EQ(environment_value("RINGATTN_TEST_SEED"), std::nullopt);
}

TEST(PeakMemory, KeepsWhatIsFreed) {
  const std::size_t before = peak_resident_bytes();
  constexpr std::size_t kSlack = std::size_t{8} << 20;  // the kernel counts resident pages in batches
  constexpr std::size_t kBytes = std::size_t{96} << 20;
  {
    std::vector<char> touched(kBytes, 1);
    EXPECT_EQ(touched[kBytes / 3], 1);
  }
  EXPECT_GE(peak_resident_bytes(), std::max(before, kBytes) - kSlack);
}

TEST(HostMemoryDeathTest, IsKeptForTransfersThatNobodyCanStop) {
  const auto read_what_is_gone = [] {
    keep_host_memory();
    constexpr std::size_t kBytes = std::size_t{64} << 20;
    const volatile std::byte* data = nullptr;
    {
      const Buffer buffer = allocate_host(kBytes);
      std::memset(buffer.data(), 1, kBytes);
      data = buffer.data();
    }
    std::exit(std::to_integer<int>(data[kBytes / 2]));
  };
  EXPECT_EXIT(read_what_is_gone(), ::testing::ExitedWithCode(1), "");
}

}  // namespace
}  // namespace ringattn
