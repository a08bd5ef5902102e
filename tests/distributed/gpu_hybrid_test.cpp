// SPDX-License-Identifier: Apache-2.0
// attention → SSM or gated delta rule → attention on the streams of GPUs, everything enqueued before anything is waited
// for: the bytes of one rank on several, whose blocks, rows, states and partial results share one transport.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/gated_delta/gated_delta.hpp"
#include "tests/support/hybrid_stack.hpp"
#include "tests/support/ring_job.hpp"
#include "tests/support/two_ranks.hpp"

namespace ringattn::testing {
namespace {

// Dims that every kind of kernel has, those of Hopper included.
HybridStack on_gpus(LayoutKind layout) {
  HybridStack stack;
  stack.backend = "cuda";
  stack.layout = layout;
  stack.heads = 4;
  stack.dim = 128;
  stack.state_heads = 8;
  stack.state_head_dim = 64;
  stack.state_dim = 128;
  return stack;
}

// The only dims of sm90_gated_delta.
HybridStack with_gated_delta(bool shared_runs) {
  HybridStack stack = on_gpus(LayoutKind::kStriped);
  stack.middle = StateLayer::kGatedDelta;
  stack.shared_runs = shared_runs;
  stack.lengths = {5 * 2048 + 300, 517, 90};
  stack.state_heads = 4;
  stack.state_head_dim = 128;
  return stack;
}

// O of the last layer, packed, as one rank of this process gives it or several, which share GPUs.
std::vector<std::byte> run_stack(const HybridStack& stack, int ranks) {
  std::vector<std::byte> packed(static_cast<std::size_t>(stack.packed_bytes()));
  run_gpu_world(ranks, [&](Transport& world) { run_hybrid_rank(stack, world, packed); });
  return packed;
}

TEST(GpuHybrid, HasTheSameBytesOnAnyNumberOfRanks) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  const HybridStack striped = on_gpus(LayoutKind::kStriped);
  const std::vector<std::byte> one = run_stack(striped, 1);
  EXPECT_EQ(what_is_empty(striped, one), "");
  for (const int ranks : {2, 3}) EXPECT_TRUE(run_stack(striped, ranks) == one) << ranks << " ranks";
  EXPECT_TRUE(run_stack(on_gpus(LayoutKind::kZigzag), 2) == one) << "zigzag";
}

// Kernels of Hopper only.
TEST(GpuHybrid, GatedDeltaHasTheSameBytesOnAnyNumberOfRanks) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  const HybridStack stack = with_gated_delta(true);
  GatedDeltaSpec spec;  // of bf16 heads of 128
  spec.key_heads = spec.value_heads = 2;
  try {
    choose_kernel(spec, {"cuda", "auto"});
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const std::vector<std::byte> one = run_stack(stack, 1);
  EXPECT_EQ(what_is_empty(stack, one), "");
  for (const int ranks : {2, 3}) EXPECT_TRUE(run_stack(stack, ranks) == one) << ranks << " ranks";
  EXPECT_TRUE(run_stack(with_gated_delta(false), 3) == one) << "resharded";
}

TEST(GpuHybrid, HasTheSameBytesByNccl) {
  if (visible_gpus().size() < 2) GTEST_SKIP() << "needs two GPUs: NCCL takes one for each rank";
  const HybridStack stack = on_gpus(LayoutKind::kStriped);
  std::vector<std::byte> packed(static_cast<std::size_t>(stack.packed_bytes()));
  in_two_ranks("nccl", [&](Transport& world) { run_hybrid_rank(stack, world, packed); });
  EXPECT_TRUE(packed == run_stack(stack, 1));
}

}  // namespace
}  // namespace ringattn::testing
