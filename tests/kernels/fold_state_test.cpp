// SPDX-License-Identifier: Apache-2.0
// The fold's contract beside its numbers: the exported state, progress between tiles, tasks that don't fit the kernel.
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <thread>

#include "base/error.hpp"
#include "tests/kernels/kernel_row_test.hpp"

namespace ringattn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class FoldState : public KernelRowTest {};

// m, l and O, exported after every task, give the finished row: O / l and m + log l.
TEST_P(FoldState, ExportsNumbers) {
  const FoldSpec spec = make_spec(Dtype::kF32, 4, 2, 64, {-1, 0});
  if (!cannot_run(row(), spec).empty()) GTEST_SKIP() << cannot_run(row(), spec);
  FoldRunner runner(row(), spec);
  if (runner.backend().memory() != MemoryKind::kHost) GTEST_SKIP() << "reads the state in place";
  constexpr std::int64_t kRows = 150;
  const FoldInputs inputs = random_inputs(spec, {{kRows, kRows, -20}}, 71);
  const FoldResult expected = runner.run(inputs);

  const Buffer state = runner.backend().allocate(runner.kernel().state_bytes(kRows));
  const QueryRun queries{0, -20, 0, kRows};
  const std::int64_t length = kRows;
  const KeyRun key_run{0, 0, 2, 0};
  const KeyTile tiles[] = {{0, 0}, {0, 128}};
  const KeySource source{inputs.k_view(0), inputs.v_view(0)};
  FoldTask task;
  task.q = inputs.q_view(0);
  task.queries = {&queries, 1};
  task.key_lengths = {&length, 1};
  task.key_runs = {&key_run, 1};
  task.tiles = tiles;
  task.sources = {&source, 1};
  task.state = state.data();
  runner.kernel().reserve({kRows, 1, 1, 2, 1, 1});
  runner.kernel().fold(task, {}, {});

  std::vector<float> m(kRows * 4);
  std::vector<float> l(kRows * 4);
  std::vector<float> o(kRows * 4 * 64);
  const FoldStateView view{{m.data(), 4, 1}, {l.data(), 4, 1}, dense_view(o.data(), Dtype::kF32, kRows, 4, 64)};
  runner.kernel().export_state(state.data(), kRows, view, {});
  for (std::size_t i = 0; i < m.size(); ++i) {
    if (i < 20 * 4) {
      ASSERT_EQ(m[i], -kInfinity);
      ASSERT_EQ(l[i], 0.0F);
      continue;
    }
    ASSERT_NEAR(static_cast<double>(m[i]) + std::log(static_cast<double>(l[i])), expected.lse[i], 1e-6);
    const float out = load_element(expected.out.data() + i * 64 * sizeof(float), Dtype::kF32);
    ASSERT_FLOAT_EQ(o[i * 64] / l[i], out);
  }
}

TEST_P(FoldState, ProgressRunsOnTheCallingThread) {
  const FoldSpec spec = make_spec(Dtype::kBf16, 4, 2, 64, {-1, -1});
  if (!cannot_run(row(), spec).empty()) GTEST_SKIP() << cannot_run(row(), spec);
  FoldRunner runner(row(), spec, 3);
  const FoldInputs inputs = random_inputs(spec, {{300, 900, 0}}, 72);
  const FoldResult expected = runner.run(inputs);
  int calls = 0;
  bool elsewhere = false;
  const std::thread::id caller = std::this_thread::get_id();
  const FoldResult result = runner.run(inputs, {.threads = 3}, [&] {
    elsewhere = elsewhere || std::this_thread::get_id() != caller;
    ++calls;
  });
  EXPECT_GT(calls, 0);
  EXPECT_FALSE(elsewhere);
  EXPECT_TRUE(result.same_bits(expected));
}

// What progress throws ends the fold on all threads and comes out unchanged; the kernel is as good as before.
TEST_P(FoldState, ProgressMayThrow) {
  const FoldSpec spec = make_spec(Dtype::kBf16, 4, 2, 64, {-1, -1});
  if (!cannot_run(row(), spec).empty()) GTEST_SKIP() << cannot_run(row(), spec);
  for (const int threads : {1, 4}) {
    FoldRunner runner(row(), spec, threads);
    const FoldInputs inputs = random_inputs(spec, {{300, 900, 0}}, 73);
    const FoldResult expected = runner.run(inputs);
    int calls = 0;
    try {
      runner.run(inputs, {}, [&] {
        ++calls;
        fail(ErrorCode::kPeer, "rank 3 is gone");
      });
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "rank 3 is gone.");
      EXPECT_EQ(error.code(), ErrorCode::kPeer);
    }
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(runner.run(inputs).same_bits(expected));
  }
}

TEST_P(FoldState, SizesGrowWithRows) {
  const FoldSpec spec = make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0});
  if (!cannot_run(row(), spec).empty()) GTEST_SKIP() << cannot_run(row(), spec);
  FoldRunner one(row(), spec, 1);
  FoldRunner four(row(), spec, 4);
  const std::size_t numbers = 4U * (64 + 2) * sizeof(float);  // m, l, O of every head
  EXPECT_GE(one.kernel().state_bytes(1000), 1000 * numbers);
  EXPECT_LE(one.kernel().state_bytes(1000), 3 * 1000 * numbers);  // O in two parts, l in pieces
  EXPECT_EQ(one.kernel().state_bytes(0), 0U);
  FoldLimits limits;
  limits.rows = 1000;
  EXPECT_GE(four.kernel().scratch_bytes(limits), one.kernel().scratch_bytes(limits));
}

RINGATTN_FOR_EVERY_KERNEL(FoldState);

}  // namespace
}  // namespace ringattn::testing
