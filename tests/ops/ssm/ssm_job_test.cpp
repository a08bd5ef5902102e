// SPDX-License-Identifier: Apache-2.0
// Whole SSM jobs through the library: from file to file, in every shape with the same bits, and checks that find what
// is wrong.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "comm/threads.hpp"
#include "ops/ssm/ssm_shapes.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/ssm_jobs.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

TEST(SsmJobs, WriteTheSameBytesInEveryWorld) {
  const TemporaryFolder folder;
  const SsmFile shape{.lengths = {66'000, 70, 65'536}, .heads = 2, .head_dim = 8, .state_dim = 8};
  SsmFileJob job;
  job.input = FileInput{write_tensors(folder.file("in"), ssm_tensors(shape))};
  job.numerics.final_states = true;
  std::vector<std::string> files;
  for (const int ranks : {1, 2, 4}) {
    job.output.path = folder.file(std::to_string(ranks));
    run_threads_world(ranks, {}, [&](Transport& transport) { run_ssm_job(job, transport); });
    files.push_back(read_whole(job.output.path));
    EXPECT_TRUE(files.back() == files.front()) << ranks << " ranks";
  }
  EXPECT_NE(files.front().find(R"("shape":[131606, 2, 8])"), std::string::npos);  // y
  EXPECT_NE(files.front().find(R"("shape":[3, 2, 8, 8])"), std::string::npos);    // final_states
  EXPECT_EQ(
      error_of([&] { run_threads_world(1, {}, [&](Transport& transport) { run_ssm_job(job, transport); }); }).code(),
      ErrorCode::kFile);  // which is there
}

TEST(SsmJobs, InEveryShapeHaveTheSameBits) {
  for (const bool selective : {false, true}) {
    const std::int64_t tokens = (selective ? 1 : 2) * kSuperSegmentTokens + 100;
    const SsmInput input = SsmInput(small_ssm(tokens, selective), {}).with_final_states();
    const std::vector<SsmShape> shapes = ssm_shapes({1, 2, 3}, input.job().lengths);
    ASSERT_EQ(shapes.size(), selective ? 5U : 6U);  // where there is a third piece, 2 ranks in turn; 1 and 3 resumed
    run_threads_world(3, {}, [&](Transport& transport) {
      std::size_t done = 0;
      run_ssm_shapes(input, one_thread(), shapes, transport, 1.0,
                     [&](const SsmShape& shape, const SsmShapeResult& result) {
                       EXPECT_FALSE(result.difference) << "shape " << done;
                       const bool a_piece_each = selective && shape.resumed;
                       EXPECT_EQ(result.states > 0, shape.ranks > 1 && !a_piece_each) << "shape " << done;
                       ++done;
                     });
      EXPECT_EQ(done, shapes.size());
    });
  }
}

TEST(SsmAccuracyCheck, PassesWhatIsRight) {
  for (const bool selective : {false, true}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      SyntheticSsmInput scan = small_ssm(3000, selective);
      scan.dtype = dtype;
      scan.batch = 2;
      const SsmAccuracy accuracy = checked(finished(SsmInput(scan, {})));
      EXPECT_TRUE(accuracy.passes()) << accuracy.part;
      EXPECT_GT(accuracy.part, 0.0);
      EXPECT_GE(accuracy.rows, 60);
      EXPECT_EQ(accuracy.compared, accuracy.rows * (selective ? 1 : 8));
    }
  }
}

TEST(SsmAccuracyCheck, FindsWhatIsWrong) {
  FinishedSsm scan = finished(SsmInput(small_ssm(3000), {}));
  const std::size_t last = scan.result.y.bytes() - 2;  // the last token, head and dim: always sampled
  std::byte kept[2];
  std::memcpy(kept, scan.result.y.data() + last, 2);
  const float value = load_element(kept, Dtype::kBf16);
  store_element(scan.result.y.data() + last, Dtype::kBf16, value + 1.0F);
  const SsmAccuracy off = checked(scan);
  EXPECT_FALSE(off.passes());
  EXPECT_EQ(off.worst, (RowSample{2999, 1}));
  store_element(scan.result.y.data() + last, Dtype::kBf16, std::numeric_limits<float>::quiet_NaN());
  const SsmAccuracy lost = checked(scan);
  EXPECT_EQ(lost.misplaced, 1);
  EXPECT_EQ(lost.first_misplaced, (RowSample{2999, 1}));
}

TEST(SsmAccuracyCheck, ComparesFinalStates) {
  for (const bool selective : {false, true}) {
    for (const std::int64_t tokens : {1, 3000}) {
      SyntheticSsmInput made = small_ssm(tokens, selective);
      made.batch = 2;
      made.update = tokens == 1;
      made.conv_width = 4;
      FinishedSsm scan = finished(SsmInput(made, {}).with_final_states());
      const SsmAccuracy right = checked(scan);
      EXPECT_TRUE(right.passes()) << right.states.part;
      EXPECT_GT(right.states.part, 0.0);
      EXPECT_EQ(right.states.compared, 2 * (selective ? 4 * 8 : 2 * 8 * 8)) << "of four heads at most";
      auto* const last = reinterpret_cast<float*>(scan.result.states.data() + scan.result.states.bytes()) - 1;
      const float kept = *last;
      *last += 1.0F;
      const SsmAccuracy off = checked(scan);
      EXPECT_FALSE(off.passes());
      EXPECT_LE(off.part, 1.0) << "y is as it was";
      EXPECT_EQ(off.states.sequence, 1);
      EXPECT_EQ(off.states.head, selective ? 7 : 1);
      *last = std::numeric_limits<float>::quiet_NaN();
      EXPECT_EQ(checked(scan).states.misplaced, 1);
      EXPECT_FALSE(checked(scan).passes());
      *last = kept;
      EXPECT_TRUE(checked(scan).passes());
    }
  }
  EXPECT_EQ(checked(finished(SsmInput(small_ssm(300), {}))).states.compared, 0) << "there are none";
}

// A kernel that rounds factors may lose three roundings of a row whose terms have one sign, but not many more.
TEST(SsmAccuracyCheck, AllowsRoundedFactorsWhatTheyLose) {
  FinishedSsm scan = finished(SsmInput(small_ssm(3000), {}));
  EXPECT_TRUE(checked(scan, true).passes());
  EXPECT_LT(checked(scan, true).part, checked(scan).part);
  std::byte* const last = scan.result.y.data() + scan.result.y.bytes() - 2;
  const float value = load_element(last, Dtype::kBf16);
  ASSERT_GT(std::fabs(value), 1e-3F);
  const auto passes = [&](float factor, bool rounded) {
    store_element(last, Dtype::kBf16, value * factor);
    return checked(scan, rounded).passes();
  };
  EXPECT_FALSE(passes(1.0F + 0x1p-6F, false));
  EXPECT_TRUE(passes(1.0F + 0x1p-6F, true));
  EXPECT_FALSE(passes(1.25F, true));
}

TEST(SsmAccuracyCheck, SeesAStateThatWasNotHandedOn) {
  // What a rank would compute that starts from zero in its second super-segment.
  const SsmInput whole(small_ssm(kSuperSegmentTokens + 200), {});
  FinishedSsm scan = finished(whole);
  const std::int64_t begins[] = {kSuperSegmentTokens};
  const std::int64_t ends[] = {kSuperSegmentTokens + 200};
  const std::vector<std::byte> zeros(2 * 8 * 8 * sizeof(float));
  const FinishedSsm alone = finished(whole.part(begins, ends, zeros));
  std::memcpy(scan.result.y.data() + scan.result.y.bytes() - alone.result.y.bytes(), alone.result.y.data(),
              alone.result.y.bytes());
  EXPECT_FALSE(checked(scan).passes());
  EXPECT_FALSE(checked(scan, true).passes());
}

TEST(SsmAccuracyCheck, LetsNonFiniteInputsReachTheirOwnChunkAndWhatIsBehind) {
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({.lengths = {1000}, .heads = 2, .head_dim = 8, .state_dim = 8});
  store_element(tensors["x"].bytes.data() + 2 * (500 * 16 + 3), Dtype::kBf16, std::numeric_limits<float>::infinity());
  const SsmInput input(FileInput{write_tensors(folder.file("in"), tensors)}, {});
  FinishedSsm scan = finished(input);
  EXPECT_TRUE(checked(scan).passes()) << checked(scan).misplaced;
  EXPECT_TRUE(checked(scan, true).passes()) << checked(scan, true).misplaced;
  EXPECT_EQ(scan.result.non_finite, 1);
}

TEST(SsmJobs, OfOtherInputsAreRefused) {
  const TemporaryFolder folder;
  const SsmFile shape{.lengths = {100}, .heads = 2, .head_dim = 8, .state_dim = 8};
  NamedTensors tensors = ssm_tensors(shape);
  SsmFileJob job;
  job.input = FileInput{write_tensors(folder.file("a"), tensors)};
  SsmFileJob other;
  tensors["z"].bytes[7] ^= std::byte{1};
  other.input = FileInput{write_tensors(folder.file("b"), tensors)};
  run_threads_world(2, {}, [&](Transport& transport) {
    const SsmFileJob& mine = transport.rank() == 0 ? job : other;
    const Error different = error_of([&] { run_ssm_job(mine, transport); });
    EXPECT_EQ(different.code(), ErrorCode::kFile);
    EXPECT_NE(std::string(different.what()).find("read different files"), std::string::npos) << different.what();
  });
  // Another shape of the same seed is another job.
  run_threads_world(2, {}, [&](Transport& transport) {
    const SsmInput mine(small_ssm(transport.rank() == 0 ? 100 : 101), {});
    EXPECT_EQ(error_of([&] { PreparedSsm(mine, transport, one_thread()); }).code(), ErrorCode::kUnsupported);
  });
}

TEST(SsmJobs, ReportHowLongTheyWaitForStates) {
  ThreadsDelivery slow;
  slow.max_delay = std::chrono::milliseconds(20);
  const SsmInput input(small_ssm(kSuperSegmentTokens + 64), {});
  run_threads_world(2, slow, [&](Transport& transport) {
    PreparedSsm prepared(input, transport, one_thread());
    const SsmRankResult result = prepared.compute();
    EXPECT_GT(result.stats.seconds, 0.0);
    EXPECT_LE(result.stats.exposed_comm_seconds, result.stats.seconds);
    EXPECT_EQ(prepared.ssm().bytes_received(), transport.rank() == 1 ? 2 * 8 * 8 * 4 : 0);
    if (transport.rank() == 1) {
      EXPECT_GT(result.stats.exposed_comm_seconds, 0.0);
    }
  });
  run_threads_world(1, {}, [&](Transport& transport) {
    EXPECT_EQ(PreparedSsm(input, transport, one_thread()).compute().stats.exposed_comm_seconds, 0.0);
  });
}

}  // namespace
}  // namespace ringattn::testing
