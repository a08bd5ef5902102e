// SPDX-License-Identifier: Apache-2.0
// Ranks that open their input by name compute with one input, or not at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "comm/threads.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/common/input_agreement.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/file_job.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

constexpr std::int64_t kTokens = 4096;  // 512 KiB each of q, k and v: four times what is sampled of them
constexpr std::int64_t kDim = 64;
constexpr std::int64_t kBytes = kTokens * kDim * 2;

// q, k and v of one head, of zeros but for one byte of q.
void write_input(const std::string& path, std::int64_t changed_byte, const FileMetadata& metadata = {}) {
  const SafetensorsPlan plan = plan_safetensors({{"q", FileDtype::kBf16, {kTokens, 1, kDim}},
                                                 {"k", FileDtype::kBf16, {kTokens, 1, kDim}},
                                                 {"v", FileDtype::kBf16, {kTokens, 1, kDim}}},
                                                metadata);
  const auto writer = SafetensorsWriter::create(plan, path, true);
  std::vector<std::byte> bytes(kBytes);
  writer->write_bytes("k", bytes);
  writer->write_bytes("v", bytes);
  bytes[static_cast<std::size_t>(changed_byte)] = std::byte{1};
  writer->write_bytes("q", bytes);
  writer->commit();
}

// What two ranks say to a job whose input has a path of its own on each.
std::optional<Error> run_on_two(const std::string& zeros, const std::string& ones) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  try {
    run_ranks(make_threads_world(2), [&](Transport& world) {
      testing::FileJob job;
      job.input = FileInput{world.rank() == 0 ? zeros : ones};
      job.numerics.mask = {63, 0};
      testing::run_file_job(job, world, options);
    });
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

bool names(const Error& error, std::string_view part) {
  return std::string_view(error.what()).find(part) != std::string_view::npos;
}

TEST(OneInput, RefusesAnotherFileOnAnotherRank) {
  const testing::TemporaryFolder folder;
  const std::string zeros = folder.file("zeros");
  const std::string ones = folder.file("ones");
  write_input(zeros, 0);
  for (const std::int64_t byte : {std::int64_t{1}, kBytes - 1}) {
    write_input(ones, byte);
    const auto error = run_on_two(zeros, ones);
    ASSERT_TRUE(error) << "byte " << byte;
    EXPECT_EQ(error->code(), ErrorCode::kFile);
    EXPECT_TRUE(names(*error, "rank 1 on ") && names(*error, " and rank 0 on ") &&
                names(*error, ones + " against " + zeros + ": the XXH3-128 of samples of its data is "))
        << error->what();
  }
}

// What samples don't show is found in files that aren't one; of large tensors in pieces.
TEST(OneInput, ComparesMoreThanSamplesOfFilesThatArentOne) {
  const testing::TemporaryFolder folder;
  const std::string zeros = folder.file("zeros");
  const std::string ones = folder.file("ones");
  const std::int64_t unsampled = 5000;  // between the first piece and the second
  write_input(zeros, unsampled);
  write_input(ones, unsampled + 1);
  std::filesystem::last_write_time(ones, std::filesystem::last_write_time(zeros));
  const auto error = run_on_two(zeros, ones);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kFile);
  EXPECT_TRUE(names(*error, ones + " against " + zeros + ": the XXH3-128 of its data, of 64 MB at the most, is "))
      << error->what();
  // A second name of one file is no other file.
  const std::string link = folder.file("link");
  std::filesystem::create_hard_link(zeros, link);
  EXPECT_FALSE(run_on_two(zeros, link));
}

TEST(OneInput, TellsOneFileFromCopies) {
  const testing::TemporaryFolder folder;
  write_input(folder.file("file"), 7);
  const auto print_of = [](const SafetensorsFile& file) {
    const TensorSource q = file.tensor("q");
    return fingerprints(std::span(&q, 1)).at(0);
  };
  const SafetensorsFile file(folder.file("file"));
  const FileFingerprint own = print_of(file);
  const FileFingerprint again = print_of(SafetensorsFile(folder.file("file")));
  EXPECT_TRUE(is_one_file(own, again));
  FileFingerprint other = own;
  other.device += "1";
  EXPECT_FALSE(is_one_file(own, other)) << "another device of one host";
  other.kernel += "1";
  EXPECT_TRUE(is_one_file(own, other)) << "hosts number devices for themselves";
  other.stamp += "1";
  EXPECT_FALSE(is_one_file(own, other)) << "another inode or time";
  const std::string data = own.more_data();
  EXPECT_EQ(data.size(), 32U);
  EXPECT_EQ(data, own.more_data());
}

// Beyond 64 MB pieces are compared: 24 MB of each of q, k and v leave gaps of less than 8 KiB.
TEST(OneInput, ComparesPiecesOfLargeFiles) {
  const testing::TemporaryFolder folder;
  constexpr std::int64_t kLarge = 24'000'000;
  const SafetensorsPlan plan = plan_safetensors({{"q", FileDtype::kU8, {kLarge}},
                                                 {"k", FileDtype::kU8, {kLarge}},
                                                 {"v", FileDtype::kU8, {kLarge}},
                                                 {"short", FileDtype::kU8, {5000}}},
                                                {});
  // With `changed` bytes from `from` on that aren't 0, in q or in the short tensor.
  const auto hash_of = [&](const std::string& name, std::int64_t from, std::int64_t changed) {
    const std::string path = folder.file("large");
    const auto writer = SafetensorsWriter::create(plan, path, true);
    for (const TensorInfo& tensor : plan.header.tensors) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.bytes()));
      if (tensor.name == name) std::fill_n(bytes.begin() + from, changed, std::byte{1});
      writer->write_bytes(tensor.name, bytes);
    }
    writer->commit();
    const SafetensorsFile file(path);
    std::vector<TensorSource> all;
    for (const std::string_view tensor : file.names()) all.push_back(file.tensor(tensor));
    return fingerprints(all).at(0).more_data();
  };
  const std::string zeros = hash_of("", 0, 0);
  EXPECT_NE(hash_of("short", 4100, 1), zeros) << "small tensors are read whole";
  for (const std::int64_t from : {std::int64_t{0}, kLarge - 1}) EXPECT_NE(hash_of("q", from, 1), zeros) << from;
  for (const std::int64_t from : {123'456, 9'999'999, 20'000'001}) EXPECT_NE(hash_of("q", from, 8192), zeros) << from;
}

TEST(OneInput, NamesSizesAndHeaders) {
  const testing::TemporaryFolder folder;
  const std::string zeros = folder.file("zeros");
  const std::string ones = folder.file("ones");
  write_input(zeros, 0, {{"note", "one"}});
  write_input(ones, 0, {{"note", "two"}});
  const auto header = run_on_two(zeros, ones);
  ASSERT_TRUE(header);
  EXPECT_EQ(header->code(), ErrorCode::kFile);
  EXPECT_TRUE(names(*header, "the XXH3-128 of its header is ")) << header->what();
  write_input(ones, 0, {{"note", std::string(100, 'x')}});
  const auto size = run_on_two(zeros, ones);
  ASSERT_TRUE(size);
  EXPECT_EQ(size->code(), ErrorCode::kFile);
  EXPECT_TRUE(names(*size, " bytes against ")) << size->what();
}

// A decode step is given its block mask, so ranks compare it.
TEST(OneInput, RefusesOtherBlockMasksOfAStep) {
  const auto error = [](const std::string& zeros, const std::string& ones) -> std::optional<Error> {
    Options options;
    options.kernel.backend = "cpu";
    options.threads = 1;
    SyntheticInput steps;
    steps.op = Op::kDecode;
    steps.seed = 7;
    steps.tokens = 2000;
    steps.batch = 2;
    try {
      run_ranks(make_threads_world(2), [&](Transport& world) {
        testing::FileJob job;
        job.input = steps;
        job.numerics.block_mask = world.rank() == 0 ? zeros : ones;
        testing::run_file_job(job, world, options);
      });
    } catch (const Error& thrown) {
      return thrown;
    }
    return std::nullopt;
  };
  EXPECT_FALSE(error("window:300", "window:300"));
  const auto other = error("window:300", "window:600");
  ASSERT_TRUE(other);
  EXPECT_EQ(other->code(), ErrorCode::kUnsupported);
  EXPECT_TRUE(names(*other, "rank 1 and rank 0 differ in block mask (")) << other->what();
  EXPECT_TRUE(error("window:300", ""));
}

TEST(OneInput, CopiesAreOneInput) {
  const testing::TemporaryFolder folder;
  const std::string file = folder.file("file");
  const std::string copy = folder.file("copy");
  write_input(file, 7);
  write_input(copy, 7);  // at another time
  const auto error = run_on_two(file, copy);
  EXPECT_FALSE(error) << error->what();
}

// Samples would not tell these two files from each other; on one host the same path must have led to the same file.
TEST(OneInput, RefusesAFileThatIsReplacedBetweenTwoOpenings) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("input");
  const std::string other = folder.file("other");
  const std::int64_t unsampled = 5000;  // between the first piece and the second
  write_input(path, unsampled);
  write_input(other, unsampled + 1);
  const Error error = testing::error_of([&] {
    run_ranks(make_threads_world(2), [&](Transport& world) {
      const Collective collective(world, Timeouts(30.0));
      std::optional<JobInput> input;
      for (int rank = 0; rank < 2; ++rank) {
        if (rank == 1 && world.rank() == 1) std::filesystem::rename(other, path);
        if (rank == world.rank()) input.emplace(FileInput{path}, Numerics{});
        collective.barrier();
      }
      agree_on_files(collective, [&] { return input->fingerprints(); });
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::kFile);
  EXPECT_TRUE(names(error, path + ": it was replaced or written to between their openings, device ")) << error.what();
  EXPECT_TRUE(names(error, "leave it alone while the job runs.")) << error.what();
}

TEST(OneInput, RefusesAFileThatIsWrittenToWhileItIsRead) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("input");
  write_input(path, 0);
  const Error error = testing::error_of([&] {
    run_ranks(make_threads_world(2), [&](Transport& world) {
      Options options;
      options.kernel.backend = "cpu";
      options.threads = 1;
      PreparedJob prepared(JobInput(FileInput{path}, {}), world, options);
      if (world.rank() == 0) {
        std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
      }
      prepared.compute();
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::kFile);
  EXPECT_TRUE(names(error, "has changed")) << error.what();
}

// Ranks with one share have one copy in memory. A rank that opens the file after it was replaced sees the new one.
TEST(OneInput, IsOpenOnceInAShare) {
  const testing::TemporaryFolder folder;
  const FileInput input{folder.file("input")};
  write_input(input.path, 0);
  JobShare share;
  const auto first = open_input_file(input, share);
  EXPECT_EQ(open_input_file(input, share), first);
  JobShare another;
  EXPECT_NE(open_input_file(input, another), first);
  FileInput other = input;
  other.order = AxisOrder::kHtd;
  EXPECT_NE(open_input_file(other, share), first);
  write_input(input.path, 1);
  const auto second = open_input_file(input, share);
  EXPECT_NE(second, first);
  EXPECT_NE(fingerprints(second->tensors.used).at(0).data, fingerprints(first->tensors.used).at(0).data);
}

}  // namespace
}  // namespace ringattn
