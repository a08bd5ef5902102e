// SPDX-License-Identifier: Apache-2.0
// Every malformed file of the table gives one message and code 3, early and in little memory; every odd but good one is
// read.
#include "io/safetensors_header.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <new>

#include "base/error.hpp"
#include "io/safetensors_file.hpp"
#include "tests/io/safetensors_cases.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

std::atomic<std::size_t> largest_allocation{0};

}  // namespace

// clang's thread sanitizer brings these operators itself; there, only the refusals are tested.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RINGATTN_NEW_IS_TAKEN
#endif
#endif
#ifndef RINGATTN_NEW_IS_TAKEN

static void* counted(std::size_t bytes) {
  std::size_t largest = largest_allocation.load();
  while (bytes > largest && !largest_allocation.compare_exchange_weak(largest, bytes)) {
  }
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace ringattn::testing {
namespace {

// The largest header that any bad file gets us to hold before it is refused, doubled by growth.
constexpr std::size_t kMostAllocated = std::size_t{64} << 20;
constexpr double kMostCpuSeconds = 2.0;  // a guard against quadratic parsing, far above what it takes

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Runs `open`, which must be refused with a message that names `path` and says `why`.
template <typename Open>
void expect_refused(const Open& open, const std::string& path, const std::string& why) {
  largest_allocation = 0;
  const double start = cpu_seconds();
  try {
    open();
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_LT(cpu_seconds() - start, kMostCpuSeconds);
    EXPECT_LE(largest_allocation.load(), kMostAllocated);
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kFile) << message;
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_NE(message.find(why), std::string::npos) << message;
    // One line: problem (why). Suggestion.
    EXPECT_EQ(message.find_first_of("\n\r"), std::string::npos) << message;
    EXPECT_LT(message.find(" ("), message.find(").")) << message;
    EXPECT_TRUE(message.ends_with('.')) << message;
    EXPECT_LT(message.size(), 1000U);
  }
}

TEST(SafetensorsHeader, RefusesMalformedFiles) {
  const TemporaryFolder folder;
  for (const FileCase& file : malformed_safetensors()) {
    SCOPED_TRACE(file.name);
    const std::string path = folder.write("bad.safetensors", file.bytes);
    expect_refused([&] { SafetensorsFile opened(path); }, path, file.why);
    expect_refused([&] { parse_safetensors(std::as_bytes(std::span(file.bytes)), path); }, path, file.why);
  }
}

TEST(SafetensorsHeader, AcceptsOddButGoodFiles) {
  const TemporaryFolder folder;
  for (const FileCase& file : accepted_safetensors()) {
    SCOPED_TRACE(file.name);
    const std::string path = folder.write("good.safetensors", file.bytes);
    try {
      const SafetensorsFile opened(path);
      for (const std::string_view name : opened.names()) {
        const TensorSource tensor = opened.tensor(name);
        std::vector<std::byte> data(static_cast<std::size_t>(tensor.info->bytes()));
        tensor.shard->read(*tensor.info, 0, data);
        for (const std::byte byte : data) EXPECT_EQ(byte, std::byte{'x'});
      }
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

TEST(SafetensorsHeader, RefusesMalformedIndexes) {
  const TemporaryFolder folder;
  for (const FileCase& file : malformed_indexes()) {
    SCOPED_TRACE(file.name);
    const std::string path = folder.write("bad.index.json", file.bytes);
    expect_refused([&] { SafetensorsFile opened(path); }, path, file.why);
    expect_refused([&] { parse_safetensors_index(file.bytes, path); }, path, file.why);
  }
}

TEST(SafetensorsHeader, AcceptsOddButGoodIndexes) {
  for (const FileCase& file : accepted_indexes()) {
    SCOPED_TRACE(file.name);
    EXPECT_NO_THROW(parse_safetensors_index(file.bytes, "good.index.json"));
  }
  const auto index = parse_safetensors_index(accepted_indexes()[3].bytes, "x.index.json");
  ASSERT_EQ(index.weight_map.size(), 1U);
  EXPECT_EQ(index.weight_map.at("q"), "sub/a.safetensors");
}

TEST(SafetensorsHeader, RefusesWhatIsNoReadableFile) {
  const TemporaryFolder folder;
  const auto expect_bad_path = [](const std::string& path, const std::string& why) {
    SCOPED_TRACE(path);
    expect_refused([&] { SafetensorsFile opened(path); }, path, why);
  };
  expect_bad_path(folder.file("missing.safetensors"), "No such file");
  expect_bad_path(folder.file("missing.index.json"), "No such file");
  expect_bad_path(folder.path(), "it is a directory");
  ASSERT_EQ(::mkfifo(folder.file("fifo").c_str(), 0600), 0);
  expect_bad_path(folder.file("fifo"), "not a regular file");
  std::filesystem::create_symlink("loop", folder.file("loop"));
  expect_bad_path(folder.file("loop"), "symbolic links");
  expect_bad_path("/dev/null", "not a regular file");
  expect_bad_path(folder.write("plain", "x") + "/below", "Not a directory");
  if (::geteuid() != 0) {  // permissions don't bind root
    const std::string path = folder.write("unreadable", "x");
    ASSERT_EQ(::chmod(path.c_str(), 0), 0);
    expect_bad_path(path, "Permission denied");
  }
  expect_bad_path(folder.file(std::string(300, 'a')), "File name too long");
}

TEST(SafetensorsHeader, KeepsWhatTheHeaderSays) {
  const std::string bytes =
      safetensors_bytes(R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"who":"me"},)"
                        R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})",
                        "0123456789abcdef");
  const SafetensorsHeader header = parse_safetensors(std::as_bytes(std::span(bytes)), "x");
  EXPECT_EQ(header.data_offset, static_cast<std::int64_t>(bytes.size()) - 16);
  EXPECT_EQ(header.data_bytes, 16);
  EXPECT_EQ(header.metadata.at("who"), "me");
  ASSERT_EQ(header.tensors.size(), 2U);
  EXPECT_EQ(header.tensors[0].name, "a");
  const TensorInfo* b = header.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, FileDtype::kBf16);
  EXPECT_EQ(b->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(b->begin, 4);
  EXPECT_EQ(b->end, 16);
  EXPECT_EQ(header.find("c"), nullptr);
}

}  // namespace
}  // namespace ringattn::testing
