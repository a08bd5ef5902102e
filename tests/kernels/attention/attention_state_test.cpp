// SPDX-License-Identifier: Apache-2.0
// The attention kernels' contract besides their results: the exported state, progress between tiles, tasks that don't
// fit the kernel.
#include <atomic>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <thread>

#include "base/error.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

class AttentionStates : public KernelRowTest {};

// m, l and O, exported after every task, give the finished row: O / l and m + log l.
TEST_P(AttentionStates, ExportsNumbers) {
  const std::optional<Dims> dims = usual_dims(row(), Dtype::kF32);
  if (!dims) GTEST_SKIP() << row().name << " has no kernel for fp32";
  const AttentionSpec spec = make_spec(*dims, 4, 2, {-1, 0});
  AttentionRunner runner(row(), spec);
  if (runner.backend().memory() != MemoryKind::kHost) GTEST_SKIP() << "reads the state in place";
  constexpr std::int64_t kRows = 150;
  const AttentionInputs inputs = random_inputs(spec, {{kRows, kRows, -20}}, 71);
  const AttentionResult expected = runner.run(inputs);

  const Buffer state = runner.backend().allocate(runner.kernel().state_bytes(kRows));
  const QueryRun queries{0, -20, 0, kRows};
  const std::int64_t length = kRows;
  const std::int64_t key_tile = runner.kernel().key_tile();
  std::vector<PageRun> tiles;
  for (std::int64_t key = 0; key < length; key += key_tile) tiles.push_back({0, key});
  const auto tile_count = static_cast<std::int64_t>(tiles.size());
  const KeyRun key_run{0, 0, tile_count, 0};
  const KeySource source{inputs.k_view(0), inputs.v_view(0)};
  AttentionTask task;
  task.q = inputs.q_view(0);
  task.queries = {&queries, 1};
  task.key_lengths = {&length, 1};
  task.key_runs = {&key_run, 1};
  task.tiles = tiles;
  task.sources = {&source, 1};
  task.state = state.data();
  runner.kernel().reserve({kRows, 1, 1, tile_count, 1, 1});
  runner.kernel().attend(task, {}, {});

  std::vector<float> m(kRows * 4);
  std::vector<float> l(kRows * 4);
  const auto dim_v = static_cast<std::size_t>(spec.head_dim_v);
  std::vector<float> o(kRows * 4 * dim_v);
  const AttentionStateView view{
      {m.data(), 4, 1}, {l.data(), 4, 1}, dense_view(o.data(), Dtype::kF32, kRows, 4, spec.head_dim_v)};
  runner.kernel().export_state(state.data(), kRows, view, {});
  for (std::size_t i = 0; i < m.size(); ++i) {
    if (i < 20 * 4) {
      ASSERT_EQ(m[i], -kInfinity);
      ASSERT_EQ(l[i], 0.0F);
      continue;
    }
    ASSERT_NEAR(static_cast<double>(m[i]) + std::log(static_cast<double>(l[i])), expected.lse[i], 1e-6);
    for (std::size_t d = 0; d < dim_v; ++d) {
      const float out = load_element(expected.out.data() + (i * dim_v + d) * sizeof(float), Dtype::kF32);
      ASSERT_FLOAT_EQ(o[i * dim_v + d] / l[i], out);
    }
  }
  count_check();
}

TEST_P(AttentionStates, ProgressRunsOnTheCallingThread) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, -1});
  AttentionRunner runner(row(), spec, 3);
  const AttentionInputs inputs = random_inputs(spec, {{300, 900, 0}}, 72);
  const AttentionResult expected = runner.run(inputs);
  int calls = 0;
  bool elsewhere = false;
  const std::thread::id caller = std::this_thread::get_id();
  const AttentionResult result = runner.run(inputs, {.threads = 3}, [&] {
    elsewhere = elsewhere || std::this_thread::get_id() != caller;
    ++calls;
  });
  EXPECT_GT(calls, 0);
  EXPECT_FALSE(elsewhere);
  EXPECT_TRUE(result.same_bits(expected));
}

// What progress throws ends the computation on all threads and comes out unchanged; the kernel is as good as before.
TEST_P(AttentionStates, ProgressMayThrow) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, -1});
  for (const int threads : {1, 4}) {
    AttentionRunner runner(row(), spec, threads);
    const AttentionInputs inputs = random_inputs(spec, {{300, 900, 0}}, 73);
    const AttentionResult expected = runner.run(inputs);
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

TEST_P(AttentionStates, SizesGrowWithRows) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
  AttentionRunner one(row(), spec, 1);
  AttentionRunner four(row(), spec, 4);
  const std::size_t numbers = 4U * static_cast<std::size_t>(spec.head_dim_v + 2) * sizeof(float);  // m, l, O, all heads
  EXPECT_GE(one.kernel().state_bytes(1000), 1000 * numbers);
  EXPECT_LE(one.kernel().state_bytes(1000), 3 * 1000 * numbers);  // O in two parts, l in pieces
  EXPECT_EQ(one.kernel().state_bytes(0), 0U);
  AttentionLimits limits;
  limits.rows = 1000;
  EXPECT_GE(four.kernel().scratch_bytes(limits), one.kernel().scratch_bytes(limits));
  count_check();
}

RINGATTN_FOR_EVERY_KERNEL(AttentionStates);

}  // namespace
}  // namespace ringattn::testing
