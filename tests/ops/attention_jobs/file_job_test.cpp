// SPDX-License-Identifier: Apache-2.0
// Whole jobs through the library without the program: from a file to a file, on one rank and on several.
#include "tests/support/file_job.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.hpp"
#include "io/safetensors_file.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn {
namespace {

using testing::FileJob;

constexpr std::int64_t kTokens = 300;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 64;

Options cpu_options() {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  options.timeout_seconds = 30.0;
  return options;
}

// What a job on `ranks` threads gave; its error where it failed.
struct Outcome {
  std::vector<OpJobResult> results;  // of each rank
  std::optional<Error> error;
};

Outcome run_on(int ranks, const FileJob& job, const Options& options = cpu_options()) {
  Outcome outcome;
  outcome.results.resize(static_cast<std::size_t>(ranks));
  try {
    run_ranks(make_threads_world(ranks), [&](Transport& world) {
      outcome.results[static_cast<std::size_t>(world.rank())] = testing::run_file_job(job, world, options);
    });
  } catch (const Error& error) {
    outcome.error = error;
  }
  return outcome;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// q, k and v of 300 tokens, as seed 3 makes them: one sequence, or two packed.
void write_input(const std::string& path, bool packed) {
  const auto tensor = [](const char* name, std::int64_t heads) {
    return OutputTensor{name, FileDtype::kBf16, {kTokens, heads, kDim}};
  };
  std::vector<OutputTensor> tensors{tensor("q", kHeads), tensor("k", kKvHeads), tensor("v", kKvHeads)};
  if (packed) tensors.push_back({"cu_seqlens_q", FileDtype::kI64, {3}});
  const SafetensorsPlan plan = plan_safetensors(tensors, {});
  const auto writer = SafetensorsWriter::create(plan, path, false);
  const std::vector<PackedRun> all{{0, kTokens}};
  const auto write = [&](const char* name, SyntheticTensor which, int heads) {
    std::vector<std::byte> rows(static_cast<std::size_t>(kTokens * heads * kDim * 2));
    const MutableTensorView view = dense_view(static_cast<void*>(rows.data()), Dtype::kBf16, kTokens, heads, kDim);
    fill_synthetic(3, which, all, view, 1);
    writer->write_rows(name, {AxisOrder::kThd, 1, kTokens, heads, kDim}, all, view);
  };
  write("q", SyntheticTensor::kQ, kHeads);
  write("k", SyntheticTensor::kK, kKvHeads);
  write("v", SyntheticTensor::kV, kKvHeads);
  const std::int64_t ends[] = {0, 100, kTokens};
  if (packed) writer->write_bytes("cu_seqlens_q", std::as_bytes(std::span(ends)));
  writer->commit();
}

FileJob job_of(const std::string& input, const std::string& output) {
  FileJob job;
  job.input = FileInput{input};
  job.output.path = output;
  return job;
}

SyntheticInput synthetic_of(std::optional<std::uint64_t> seed) {
  SyntheticInput input;
  input.seed = seed;
  input.tokens = kTokens;
  input.heads = kHeads;
  input.kv_heads = kKvHeads;
  input.head_dim = kDim;
  return input;
}

TEST(FileJob, GivesTheSameFileOnOneRankAndOnThree) {
  const testing::TemporaryFolder folder;
  const std::string input = folder.file("in.safetensors");
  write_input(input, true);
  const std::string one = folder.file("one.safetensors");
  const std::string three = folder.file("three.safetensors");
  FileJob job = job_of(input, one);
  job.output.metadata = {{"note", "from the caller"}};
  const Outcome alone = run_on(1, job);
  ASSERT_FALSE(alone.error) << alone.error->what();
  job.output.path = three;
  Options options = cpu_options();
  options.block_tokens = 64;
  const Outcome together = run_on(3, job, options);
  ASSERT_FALSE(together.error) << together.error->what();

  EXPECT_FALSE(bytes_of(one).empty());
  EXPECT_TRUE(bytes_of(one) == bytes_of(three)) << "the files differ";
  std::int64_t rows = 0;
  for (const OpJobResult& result : together.results) {
    EXPECT_EQ(digests_text(result.digests), digests_text(alone.results[0].digests));
    rows += result.figures.tokens;
  }
  EXPECT_EQ(rows, kTokens);

  const SafetensorsFile file(one);
  EXPECT_EQ(file.tensor("out").info->shape, (std::vector<std::int64_t>{kTokens, kHeads, kDim}));
  EXPECT_EQ(file.tensor("lse").info->shape, (std::vector<std::int64_t>{kHeads, kTokens}));
  for (const std::string_view text : {"from the caller", "cpu_attention", alone.results[0].digests[0].hex.c_str()}) {
    EXPECT_NE(bytes_of(one).find(text), std::string::npos) << text;
  }
}

// A file that holds what a seed makes is the same job as the seed; packed in two sequences, it is another one.
TEST(FileJob, ReadsEveryRowOfItsInput) {
  const testing::TemporaryFolder folder;
  const std::string whole = folder.file("whole.safetensors");
  const std::string packed = folder.file("packed.safetensors");
  write_input(whole, false);
  write_input(packed, true);
  FileJob seed;
  seed.input = synthetic_of(3);
  const Outcome expected = run_on(2, seed);
  const Outcome from_file = run_on(3, job_of(whole, ""));
  const Outcome from_packed = run_on(2, job_of(packed, ""));
  ASSERT_FALSE(expected.error || from_file.error || from_packed.error);
  EXPECT_EQ(digests_text(from_file.results[0].digests), digests_text(expected.results[0].digests));
  EXPECT_NE(from_packed.results[0].digests[0].hex, expected.results[0].digests[0].hex);
}

TEST(FileJob, AppliesTheNumerics) {
  FileJob job;
  job.input = synthetic_of(5);
  const std::string usual = run_on(2, job).results[0].digests[0].hex;
  const auto digest_with = [&](const std::function<void(Numerics&)>& change) {
    FileJob other = job;
    change(other.numerics);
    return run_on(2, other).results[0].digests[0].hex;
  };
  EXPECT_EQ(digest_with([](Numerics& numerics) { numerics.softmax_scale = 0.125; }), usual);  // 1 / sqrt(64)
  EXPECT_NE(digest_with([](Numerics& numerics) { numerics.softmax_scale = 0.5; }), usual);
  EXPECT_NE(digest_with([](Numerics& numerics) { numerics.softcap = 1.0; }), usual);
  EXPECT_NE(digest_with([](Numerics& numerics) { numerics.mask = {-1, -1}; }), usual);
  EXPECT_NE(digest_with([](Numerics& numerics) { numerics.query_offset = 7; }), usual);
}

TEST(FileJob, RefusesBeforeItComputes) {
  const testing::TemporaryFolder folder;
  const std::string input = folder.file("in.safetensors");
  write_input(input, true);
  const std::string taken = folder.file("taken.safetensors");
  std::ofstream(taken) << "a result of hours";
  for (const int ranks : {1, 3}) {
    const Outcome exists = run_on(ranks, job_of(input, taken));
    ASSERT_TRUE(exists.error);
    EXPECT_EQ(exists.error->code(), ErrorCode::kFile);
    EXPECT_EQ(exists.error->suggestion(), (MessageTemplate{"Choose another name, or replace it with ", setting("force"),
                                                           "."}));  // from rank 0, in its parts
    EXPECT_EQ(bytes_of(taken), "a result of hours");

    const Outcome missing = run_on(ranks, job_of(folder.file("none.safetensors"), ""));
    ASSERT_TRUE(missing.error);
    EXPECT_EQ(missing.error->code(), ErrorCode::kFile);

    FileJob shape_alone;
    shape_alone.input = synthetic_of(std::nullopt);
    const Outcome nothing_to_read = run_on(ranks, shape_alone);
    ASSERT_TRUE(nothing_to_read.error);
    EXPECT_EQ(nothing_to_read.error->code(), ErrorCode::kUsage);
  }
  FileJob replacing = job_of(input, taken);
  replacing.output.replace = true;
  EXPECT_FALSE(run_on(3, replacing).error);
  EXPECT_EQ(SafetensorsFile(taken).tensor("out").info->shape[0], kTokens);
}

TEST(FileJob, RefusesShapesThatContradictThemselves) {
  const auto refusal = [](const std::function<void(SyntheticInput&)>& change) {
    SyntheticInput input = synthetic_of(1);
    change(input);
    return testing::error_of([&] { JobInput(input, {}); });
  };
  EXPECT_EQ(refusal([](SyntheticInput& input) { input.kv_heads = 3; }).code(), ErrorCode::kUsage);
  EXPECT_EQ(refusal([](SyntheticInput& input) { input.kv_heads = 0; }).code(), ErrorCode::kUsage);
  EXPECT_EQ(refusal([](SyntheticInput& input) { input.tokens = -1; }).code(), ErrorCode::kUsage);
  EXPECT_EQ(refusal([](SyntheticInput& input) { input.head_dim = 0; }).code(), ErrorCode::kUsage);
  const Error large = refusal([](SyntheticInput& input) { input.tokens = std::int64_t{1} << 55; });
  EXPECT_STREQ(large.what(),
               "seq = 36028797018963968 with batch = 1 and 4 heads (a tensor would have more than 2^60 elements). Use "
               "fewer tokens, sequences or heads.");
}

// What a report says before a job runs: without overlap, the sum of all transfers and kernels.
TEST(FileJob, EstimatesWithoutOverlapWhatItDoes) {
  run_ranks(make_threads_world(3), [&](Transport& world) {
    SyntheticInput input = synthetic_of(1);
    input.tokens = 10000;  // never computed
    const JobInput job(input, {});
    Options options = cpu_options();
    options.block_tokens = 1000;
    options.machine = {"test", 1e9, 1e6, 1e-3};
    PreparedJob overlapped(job, world, options);
    options.overlap = false;
    PreparedJob waiting(job, world, options);
    const Plan& plan = waiting.attention().plan();
    const MachineModel& machine = waiting.attention().options().machine;  // at the kernel's speed for the job
    EXPECT_EQ(machine.link_bytes_per_second, options.machine.link_bytes_per_second);
    EXPECT_DOUBLE_EQ(waiting.attention().time_estimate().seconds, estimate_time(plan, machine, false).seconds);
    EXPECT_LT(overlapped.attention().time_estimate().seconds, waiting.attention().time_estimate().seconds);
  });
}

}  // namespace
}  // namespace ringattn
