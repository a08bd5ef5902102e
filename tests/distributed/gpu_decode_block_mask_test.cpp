// SPDX-License-Identifier: Apache-2.0
// Decode on GPUs with a block mask: a captured step follows masks that change in device memory, or selects its
// blocks anew with each launch; two ranks deal heads; masks are checked on the device.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "tests/support/block_mask_steps.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/two_ranks.hpp"

namespace ringattn::testing {
namespace {

constexpr int kBlock = 128;
constexpr BlockMaskShape kShape{128, kBlock, 2};

AttentionSpec usual_spec() {
  AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0});
  spec.sinks = true;
  return spec;
}

DecodeOptions decode_on_gpu() {
  DecodeOptions options;
  options.kernel.backend = "cuda";
  return options;
}

DecodeJob job_of(const BlockMaskSteps& steps, int rows, const CacheLayout& layout, int best) {
  DecodeJob job = decode_job(steps.job(), rows, layout);
  job.spec.block_mask = kShape;
  job.top_k_blocks = best;
  return job;
}

std::vector<std::int64_t> plus(std::vector<std::int64_t> lengths, std::int64_t more) {
  for (std::int64_t& length : lengths) length += more;
  return lengths;
}

class GpuDecodeWithBlockMask : public ::testing::Test {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
    AttentionSpec spec = usual_spec();
    spec.block_mask = kShape;
    try {
      choose_kernel(DecodeSpec{spec}, decode_on_gpu().kernel);
    } catch (const Error& error) {
      GTEST_SKIP() << "needs a GPU that decodes: " << error.what();
    }
  }
};

TEST_F(GpuDecodeWithBlockMask, AGraphFollowsTheBlockMask) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  constexpr std::int64_t kSteps = 140;
  const std::vector<std::int64_t> longest = {3 * 8192 + 70, kSteps, 8192 + 4};  // even: two rows are of one block
  const BlockMaskSteps steps(usual_spec(), longest, 1, "cuda");
  for (const std::int64_t page : {0, 16, 256}) {
    const CacheLayout layout{.page_size = page};
    Decode decode(job_of(steps, 2, layout, 0), *self, decode_on_gpu());
    DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
    const std::vector<std::int64_t> start = plus(longest, -kSteps);
    rank.set_block_mask(*steps.block_mask(kShape, longest, 2, all_blocks()), 2);
    rank.fill(start);
    rank.load(plus(start, 2), 2);
    const Graph graph(rank.stream(), [&] { decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream()); });
    for (std::int64_t step = 2; step <= kSteps; step += 2) {
      const std::vector<std::int64_t> lengths = plus(start, step);
      const auto block_mask = steps.block_mask(
          kShape, lengths, 2, random_blocks(kShape, {-1, 0}, static_cast<int>(step), static_cast<std::uint64_t>(step)));
      rank.lengths = rank.lengths_now();
      rank.set_block_mask(*block_mask, 2);
      rank.upload();
      rank.load(lengths, 2);
      graph.launch();
      if (step % 10 != 0 && lengths[0] % kBlock > 3) {
        rank.difference(poisoned_result(steps.job(), 1));  // the outputs are NaN again
        continue;
      }
      ASSERT_EQ(rank.difference(steps.attended(block_mask, lengths, 2)), "") << "step " << step << ", page " << page;
    }
    decode.wait();  // no check has found anything
  }
}

// Each launch grows the sequences, appends rows, makes the means of blocks that are full, chooses blocks and decodes.
TEST_F(GpuDecodeWithBlockMask, AGraphChoosesItsBlocks) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  constexpr std::int64_t kSteps = 300;
  const std::vector<std::int64_t> longest = {2 * 8192 + 150, kSteps, 40 * kBlock + 3};
  const BlockMaskSteps steps(usual_spec(), longest, 2, "cuda");
  for (const std::int64_t page : {0, 64}) {
    const CacheLayout layout{.page_size = page};
    Decode decode(job_of(steps, 1, layout, 12), *self, decode_on_gpu());
    DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
    const std::vector<std::int64_t> start = plus(longest, -kSteps);
    rank.fill(start);
    rank.load(start, 1);
    decode.update_mean_keys(rank.inputs(false, false), rank.stream());
    rank.load(plus(start, 1), 1);
    const Graph graph(rank.stream(), [&] { decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream()); });
    int dense = 0;
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      const std::vector<std::int64_t> lengths = plus(start, step);
      rank.load(lengths, 1);
      graph.launch();
      if (step % 60 != 0 && lengths[0] % kBlock > 1) {
        rank.difference(poisoned_result(steps.job(), 1));
        continue;
      }
      const JobResult expected = steps.attended(steps.best(kShape, lengths, 1, 12), lengths, 1);
      ASSERT_EQ(rank.difference(expected), "") << "step " << step << ", page " << page;
      dense += expected.same_bits(steps.attended(nullptr, lengths, 1)) ? 1 : 0;
    }
    EXPECT_EQ(dense, 0) << "all keys give the same: the test shows nothing";
    decode.wait();
  }
}

// Two ranks with a K/V head each, or with sequences of their own, while sequences grow.
void expect_two_ranks(const char* transport, const std::vector<std::int64_t>& longest, int head_parts, int best) {
  constexpr std::int64_t kSteps = 3;
  const BlockMaskSteps steps(usual_spec(), longest, 5, "cuda");
  const std::vector<std::int64_t> start = plus(longest, -kSteps);
  std::vector<std::shared_ptr<const BlockMask>> block_mask;
  std::vector<JobResult> expected;
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    const std::vector<std::int64_t> lengths = plus(start, step);
    block_mask.push_back(best > 0 ? steps.best(kShape, lengths, 1, best)
                                  : steps.block_mask(kShape, lengths, 1, random_blocks(kShape, {-1, 0}, 70, 3)));
    expected.push_back(steps.attended(block_mask.back(), lengths, 1));
  }
  const CacheLayout layout{.page_size = longest.size() == 1 ? 64 : 0};
  in_two_ranks(transport, [&](Transport& world) {
    DecodeJob job = job_of(steps, 1, layout, best);
    job.head_parts = head_parts;
    Decode decode(job, world, decode_on_gpu());
    EXPECT_EQ(decode.kv_heads().count, head_parts == 2 ? 1 : 2);
    DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
    if (best == 0) rank.set_block_mask(*block_mask[0], 1);
    rank.fill(start);
    rank.load(start, 1);
    if (best > 0) decode.update_mean_keys(rank.inputs(false, false), rank.stream());
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      rank.lengths = rank.lengths_now();
      if (best == 0) rank.set_block_mask(*block_mask[static_cast<std::size_t>(step - 1)], 1);
      rank.upload();
      rank.load(plus(start, step), 1);
      decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream());
      decode.wait();
      EXPECT_EQ(rank.difference(expected[static_cast<std::size_t>(step - 1)]), "")
          << transport << ", step " << step << ", rank " << world.rank() << ", best " << best;
    }
    world.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
  });
}

void expect_two_ranks(const char* transport) {
  for (const int best : {0, 12}) {
    expect_two_ranks(transport, {100 * kBlock + 70}, 2, best);
    expect_two_ranks(transport, {2 * 8192 + 150, 300, 40 * kBlock + 3}, 2, best);
    expect_two_ranks(transport, {2 * 8192 + 150, 300, 40 * kBlock + 3}, 1, best);
  }
}

TEST_F(GpuDecodeWithBlockMask, OnTwoRanks) { expect_two_ranks("p2p"); }

TEST_F(GpuDecodeWithBlockMask, OnTwoRanksByNccl) {
  if (visible_gpus().size() < 2) GTEST_SKIP() << "needs two GPUs: NCCL takes one for each rank";
  expect_two_ranks("nccl");
}

// What the host knows of lengths is checked there, and masks are not: they lie on the device.
TEST_F(GpuDecodeWithBlockMask, StandBesideHostCopiesOfLengths) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  const std::vector<std::int64_t> lengths = {20 * kBlock, 9 * kBlock + 5, 700};
  const BlockMaskSteps steps(usual_spec(), lengths, 4, "cuda");
  const CacheLayout layout;
  Decode decode(job_of(steps, 1, layout, 0), *self, decode_on_gpu());
  DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
  const auto block_mask = steps.block_mask(kShape, lengths, 1, random_blocks(kShape, {-1, 0}, 6, 3));
  rank.set_block_mask(*block_mask, 1);
  rank.fill(lengths);
  rank.load(lengths, 1);
  DecodeInputs inputs = rank.inputs(false, false);
  const std::vector<std::int32_t> known(lengths.begin(), lengths.end());
  inputs.host_lengths = known.data();
  decode.run(inputs, rank.outputs(), rank.stream());
  EXPECT_EQ(rank.difference(steps.attended(block_mask, lengths, 1)), "");
}

TEST_F(GpuDecodeWithBlockMask, AreCheckedOnTheDevice) {
  const auto self = make_self_transport(MemoryKind::kDevice);
  const std::vector<std::int64_t> lengths = {20 * kBlock, 9 * kBlock + 5, 700};
  AttentionSpec spec = usual_spec();
  spec.sinks = false;
  const BlockMaskSteps steps(spec, lengths, 3, "cuda");
  const CacheLayout layout{.page_size = 64};
  Decode decode(job_of(steps, 1, layout, 0), *self, decode_on_gpu());
  DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
  const auto block_mask = steps.block_mask(kShape, lengths, 1, random_blocks(kShape, {-1, 0}, 6, 3));
  const JobResult expected = steps.attended(block_mask, lengths, 1);
  rank.set_block_mask(*block_mask, 1);
  rank.fill(lengths);
  rank.load(lengths, 1);
  const std::size_t stride = rank.list_blocks.size() / rank.list_counts.size();
  const auto spoiled = [&](auto spoil, std::string_view part) {
    rank.set_block_mask(*block_mask, 1);
    spoil();
    rank.upload();
    const Error error = error_of([&] { decode.run(rank.inputs(false, false), rank.outputs()); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    EXPECT_TRUE(rank.is_empty(1));
    rank.difference(expected);
  };
  spoiled([&] { rank.list_blocks[2 * stride + 2] = rank.list_blocks[2 * stride + 1]; },
          "mask row 0 of sequence 1 has block");
  spoiled([&] { rank.list_blocks[3 * stride] = -7; }, "mask row 1 of sequence 1 has block -7 at index 0");
  spoiled([&] { rank.list_counts[3] = 1000; }, "mask row 1 of sequence 1 has 1000 blocks");
  rank.set_block_mask(*block_mask, 1);
  rank.upload();
  decode.run(rank.inputs(false, false), rank.outputs());
  EXPECT_EQ(rank.difference(expected), "");
}

}  // namespace
}  // namespace ringattn::testing
