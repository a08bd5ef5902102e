// SPDX-License-Identifier: Apache-2.0
// Jobs with a block mask: the bits are those of one rank on any number of ranks, in any layout and blocks; a mask
// of everything is the job without a mask; nothing is sent to ranks whose masks don't name it.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "attention/tokens/cost.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "ops/attention/attention_work.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr BlockMaskShape kShape{128, 128, 1};

Job with_block_mask(Job job, const BlockMaskShape& shape, const BlockMaskPattern& make) {
  set_block_mask(job, std::make_shared<const BlockMask>(make_block_mask(shape, masked_sequences(job.batch), make)));
  return job;
}

Options on_the_cpu() {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

void expect_same_everywhere(const Job& job, const JobTensors& tensors, const JobResult& reference) {
  for (int world = 1; world <= 5; ++world) {
    for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
      for (const std::int64_t block : {0, 128, 640}) {
        Options options = on_the_cpu();
        options.layout.kind = kind;
        options.block_tokens = block;
        options.checksum = block == 128;
        EXPECT_TRUE(run_job(job, options, tensors, world).same_bits(reference))
            << describe(job) << ": " << layout_name(kind) << ", world " << world << ", block " << block;
      }
    }
    Options odd = on_the_cpu();
    odd.layout.stripe = 37;
    odd.block_tokens = 256;
    const ThreadsDelivery shuffled{world % 2 == 0 ? Route::kChain : Route::kDirect, 5, std::chrono::microseconds(200)};
    EXPECT_TRUE(run_job(job, odd, tensors, world, shuffled).same_bits(reference)) << describe(job) << ": " << world;
  }
}

TEST(BlockMaskJobs, OfEverythingAreTheJob) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{200, 0}}) {
    const Job dense{make_spec(Dtype::kBf16, 4, 2, 32, mask), {{900, 900, 0}, {1, 1, 0}, {100, 700, 600}}};
    const JobTensors tensors = random_tensors(dense, 3);
    const JobResult reference = run_job(dense, on_the_cpu(), tensors, 1);
    for (const int heads : {1, 2, 4}) {
      const Job job = with_block_mask(dense, {128, 256, heads}, all_blocks());
      EXPECT_EQ(job_flops(job), job_flops(dense));
      for (const int world : {1, 3}) {
        EXPECT_TRUE(run_job(job, on_the_cpu(), tensors, world).same_bits(reference)) << describe(job) << ", " << world;
      }
    }
  }
}

TEST(BlockMaskJobs, HaveTheSameBitsOnAnyNumberOfRanks) {
  const std::vector<Sequence> ragged = {{300, 300, 0}, {0, 0, 0},     {257, 90, 11},
                                        {64, 0, 0},    {900, 900, 0}, {17, 40, -9}};
  for (const auto& [heads, mask] : {std::pair{1, Mask{-1, 0}}, {2, Mask{-1, -1}}, {4, Mask{300, 0}}}) {
    AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 32, mask);
    spec.sinks = heads == 2;
    const BlockMaskShape shape{64, 128, heads};
    const Job job = with_block_mask(
        {spec, ragged}, shape,
        union_of_patterns({random_blocks(shape, mask, 2, 7), global_blocks(shape, heads == 4 ? 70 : 0)}));
    const JobTensors tensors = random_tensors(job, 4);
    expect_same_everywhere(job, tensors, run_job(job, on_the_cpu(), tensors, 1));
  }
}

// More tiles than a KV split in every mask row, so that blocks and ranks cut splits anywhere.
TEST(BlockMaskJobs, OfSeveralKvSplits) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 16, {-1, 0});
  const std::int64_t keys = 128 * 200 + 50;
  const BlockMaskShape shape{32, 128, 2};
  const Job job =
      with_block_mask({spec, {{90, keys, keys - 90}}}, shape,
                      union_of_patterns({random_blocks(shape, spec.mask, 130, 9), window_blocks(shape, 100)}));
  const JobTensors tensors = random_tensors(job, 5);
  const JobResult reference = run_job(job, on_the_cpu(), tensors, 1);
  for (const int world : {2, 3, 5}) {
    for (const std::int64_t block : {0, 1280, 128 * 64}) {
      Options options = on_the_cpu();
      options.block_tokens = block;
      EXPECT_TRUE(run_job(job, options, tensors, world).same_bits(reference)) << world << ", " << block;
    }
  }
}

// A KV block of the layout that no row's block mask names isn't sent.
TEST(BlockMaskJobs, NothingIsSentThatNoBlockMaskNames) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 64, {-1, 0});
  const Job job = with_block_mask({spec, {{4096, 4096, 0}}}, kShape, window_blocks(kShape, 0));
  const Job global = with_block_mask({spec, {{4096, 4096, 0}}}, kShape,
                                     union_of_patterns({window_blocks(kShape, 0), global_blocks(kShape, 128)}));
  Options options;
  options.layout.stripe = 128;
  const auto kernel = kernel_table<AttentionSpec>().back().make_kernel(
      spec, *kernel_table<AttentionSpec>().back().make_backend({1, kNoDevice}));
  for (const int world : {2, 4, 7}) {
    double flops = 0.0;
    for (int rank = 0; rank < world; ++rank) {
      const Plan own = summarize_plan(job, options, *kernel, Route::kDirect, world, rank).plan;
      EXPECT_EQ(own.bytes_sent() + own.bytes_received(), 0) << "rank " << rank << " of " << world;
      flops += own.flops();
      // The first block's owner alone sends, to everyone.
      const PlanSummary shared = summarize_plan(global, options, *kernel, Route::kDirect, world, rank);
      const int owner = shared.layout().keys.owners().front().owner;
      EXPECT_EQ(shared.plan.bytes_received(), rank == owner ? 0 : 128 * kv_token_bytes(spec));
    }
    EXPECT_NEAR(flops, job_flops(job), 1e-9 * flops);
    EXPECT_NEAR(job_flops(job), 32 * 128 * 129 / 2 * pair_flops(spec), 1.0);
  }
}

TEST(BlockMaskJobs, RanksMustAgreeOnTheBlockMask) {
  const Job job{make_spec(Dtype::kBf16, 2, 1, 32, {-1, 0}), {{600, 600, 0}}};
  const auto error = error_of([&] {
    run_threads_world(2, {}, [&](Transport& transport) {
      const BlockMaskShape shape{128, 128, 1};
      const auto seed = static_cast<std::uint64_t>(transport.rank());
      Attention(with_block_mask(job, shape, random_blocks(shape, job.spec.mask, 2, seed)), transport, on_the_cpu());
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("job"), std::string::npos) << error.what();
}

TEST(BlockMaskJobs, BadOnesAreRefused) {
  const Job dense{make_spec(Dtype::kBf16, 2, 1, 32, {-1, 0}), {{600, 600, 0}}};
  const auto refused = [](const Job& job) { return error_of([&] { check_job(job); }).code() == ErrorCode::kUsage; };
  Job missing = with_block_mask(dense, kShape, all_blocks());
  check_job(missing);
  missing.block_mask = nullptr;
  EXPECT_TRUE(refused(missing));
  Job others = with_block_mask(dense, kShape, all_blocks());
  others.batch = std::vector<Sequence>{{600, 599, 0}};
  EXPECT_TRUE(refused(others));
  Job heads =
      with_block_mask({make_spec(Dtype::kBf16, 6, 2, 32, {-1, 0}), {{600, 600, 0}}}, {128, 128, 3}, all_blocks());
  EXPECT_TRUE(refused(heads));
  // No kernel has tiles of 8 keys.
  const Job blocks = with_block_mask(dense, {128, 8, 1}, all_blocks());
  const auto error = error_of([&] { run_job(blocks, on_the_cpu(), random_tensors(blocks, 1), 1); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("block mask of 128 queries and 8 keys"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
