// SPDX-License-Identifier: Apache-2.0
// Memory of a run besides inputs and outputs: two block buffers, a dense copy of strided shards, and the attention
// state where a block follows or Options::state_out asks for it; and what then comes out.
#include "attention/ring/workspace.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.hpp"
#include "comm/self.hpp"
#include "ops/attention/attention_work.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr std::size_t kAlignment = 256;

Job small_job() { return {make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), uniform_batch(1, 1000, 1000)}; }

Options on_cpu(std::int64_t block_tokens = 0, bool state_out = false) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  options.block_tokens = block_tokens;
  options.state_out = state_out;
  return options;
}

std::size_t rounded_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::size_t state_bytes(Attention& attention) {
  return attention.kernel()
      .row->make_kernel(attention.job().spec, attention.backend())
      ->state_bytes(attention.q_rows());
}

TEST(Workspace, PiecesLieApartAndAligned) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 40, {-1, 0}, 24);
  const WorkspaceLayout layout = workspace_layout(kv_streams({spec, {}}), 1001, {7}, {3});
  const std::size_t k = rounded_up(7 * 2 * 40 * 2), v = rounded_up(7 * 2 * 24 * 2);
  EXPECT_EQ(layout.state, 0U);
  EXPECT_EQ(layout.buffers[0][0], 1024U);
  EXPECT_EQ(layout.buffers[0][1], 1024 + k);
  EXPECT_EQ(layout.buffers[1][0], 1024 + k + v);
  EXPECT_EQ(layout.buffers[1][1], 1024 + 2 * k + v);
  EXPECT_EQ(layout.staged[0], 1024 + 2 * (k + v));
  EXPECT_EQ(layout.staged[1], layout.staged[0] + rounded_up(3 * 2 * 40 * 2));
  EXPECT_EQ(layout.bytes, layout.staged[1] + rounded_up(3 * 2 * 24 * 2));
  EXPECT_EQ(workspace_layout(kv_streams({spec, {}}), 0, {}, {}).bytes, 0U);
}

TEST(Workspace, OneRankInOneBlockNeedsNone) {
  const auto self = make_self_transport();
  EXPECT_EQ(Attention(small_job(), *self, on_cpu()).workspace_bytes(), 0U);
  EXPECT_EQ(Attention(small_job(), *self, on_cpu(1 << 20)).workspace_bytes(), 0U);
  EXPECT_EQ(Attention(small_job(), *self, on_cpu()).workspace_bytes(/*dense_kv=*/false), 0U);  // strides are fine
}

TEST(Workspace, HoldsTheStateWhereItIsKept) {
  const auto self = make_self_transport();
  Attention blocks(small_job(), *self, on_cpu(512));
  ASSERT_EQ(blocks.plan().blocks.size(), 2U);
  EXPECT_EQ(blocks.workspace_bytes(), rounded_up(state_bytes(blocks)));
  Attention asked(small_job(), *self, on_cpu(0, true));
  ASSERT_EQ(asked.plan().blocks.size(), 1U);
  EXPECT_EQ(asked.workspace_bytes(), rounded_up(state_bytes(asked)));

  for (const std::int64_t block_tokens : {std::int64_t{512}, std::int64_t{1} << 20}) {
    run_threads_world(3, {}, [&](Transport& transport) {
      Attention attention(small_job(), transport, on_cpu(block_tokens));
      const AttentionSpec& spec = attention.job().spec;
      const auto bytes = [](std::int64_t rows, std::int64_t row_bytes) {
        return rounded_up(static_cast<std::size_t>(rows * row_bytes));
      };
      const auto rows = [&](std::int64_t count) {
        return bytes(count, k_token_bytes(spec)) + bytes(count, v_token_bytes(spec));
      };
      const std::size_t state = attention.plan().blocks.size() > 1 ? rounded_up(state_bytes(attention)) : 0;
      EXPECT_EQ(state > 0, block_tokens == 512);
      EXPECT_EQ(attention.workspace_bytes(), state + 2 * rows(attention.plan().buffer_rows));
      EXPECT_EQ(attention.workspace_bytes(/*dense_kv=*/false), attention.workspace_bytes() + rows(attention.k_rows()));
    });
  }
}

TEST(Workspace, ABudgetCountsTheStateWhereItIsKept) {
  const auto self = make_self_transport();
  Attention free(small_job(), *self, on_cpu());
  const std::size_t without = free.plan().memory_bytes;
  const std::size_t state = state_bytes(free);
  const auto refused = [&](Options options, std::size_t budget) {
    options.memory_budget = budget;
    try {
      Attention(small_job(), *self, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMemory) << error.what();
      return true;
    }
    return false;
  };
  EXPECT_FALSE(refused(on_cpu(), without));
  EXPECT_TRUE(refused(on_cpu(), without - 1));
  for (const Options& keeps : {on_cpu(512), on_cpu(0, true)}) {
    EXPECT_TRUE(refused(keeps, without + state - 1));
    EXPECT_FALSE(refused(keeps, without + state));
  }
}

// m, l and O of every row come out, and O and LSE are the bits of a run that doesn't ask for them.
TEST(Workspace, TheStateComesOutOnRequest) {
  const Job job = small_job();
  const JobTensors tensors = random_tensors(job, 31);
  const JobResult expected = run_job(job, on_cpu(), tensors, 1);
  constexpr std::int64_t kRows = 1000;
  for (const std::int64_t block_tokens : {0, 384}) {
    const auto self = make_self_transport();
    Attention attention(job, *self, on_cpu(block_tokens, true));
    const AttentionSpec& spec = job.spec;
    std::vector<std::byte> workspace(attention.workspace_bytes(), std::byte{0xff});
    std::vector<std::byte> out(tensors.q.size());
    std::vector<float> lse(kRows * 4), m(kRows * 4), l(kRows * 4), o(kRows * 4 * 64);
    const auto dense = [&spec](const std::vector<std::byte>& bytes, int heads) {
      return dense_view(static_cast<const void*>(bytes.data()), spec.dtype, kRows, heads, 64);
    };
    const Inputs inputs{dense(tensors.q, 4), dense(tensors.k, 2), dense(tensors.v, 2)};
    Outputs outputs{dense_view(static_cast<void*>(out.data()), spec.dtype, kRows, 4, 64), {lse.data(), 4, 1}, {}};
    EXPECT_EQ(error_of([&] { attention.run(inputs, outputs, workspace); }).code(), ErrorCode::kUsage);
    outputs.state = {{m.data(), 4, 1}, {l.data(), 4, 1}, dense_view(o.data(), Dtype::kF32, kRows, 4, 64)};
    attention.run(inputs, outputs, workspace);
    EXPECT_EQ(out, expected.out);
    EXPECT_EQ(lse, expected.lse);
    for (std::size_t i = 0; i < lse.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(m[i]) + std::log(static_cast<double>(l[i])), lse[i], 1e-5) << i;
      const float first = load_element(out.data() + i * 64 * 2, spec.dtype);
      ASSERT_NEAR(o[i * 64] / l[i], first, 0x1p-8F * std::max(1.0F, std::abs(first))) << i;  // rounded to bf16
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
