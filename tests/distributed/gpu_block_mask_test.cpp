// SPDX-License-Identifier: Apache-2.0
// Jobs with a block mask on GPUs, over every attention kernel of the cuda backend: a full mask is the job
// without block mask, and other masks give the bits of one rank on several, in any layout and blocks.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "tests/support/gpu_rows.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

class GpuBlockMask : public GpuRowTest {
 protected:
  // Blocks of that many of the kernel's tiles. A kernel without query tiles takes blocks of any number of queries.
  BlockMaskShape shape_of(const AttentionSpec& spec, int heads, int tiles = 1) const {
    const Tiles sizes = tiles_of(spec);
    return {(sizes.query == 1 ? 24 : sizes.query) * tiles, sizes.key * tiles, heads};
  }
  static Job with_block_mask(Job job, const BlockMaskShape& shape, const BlockMaskPattern& make) {
    set_block_mask(job, std::make_shared<const BlockMask>(make_block_mask(shape, masked_sequences(job.batch), make)));
    return job;
  }
  Options shaped(LayoutKind kind, std::int64_t stripe, std::int64_t block) const {
    Options asked = options(block);
    asked.layout = {kind, stripe};
    return asked;
  }

  void expect_same_everywhere(const Job& job, const JobTensors& tensors) const {
    const JobResult reference = run_gpu_job(job, options(), tensors, 1);
    for (const int world : {1, 2, 3}) {
      for (const Options& asked : {shaped(LayoutKind::kStriped, 0, 0), shaped(LayoutKind::kStriped, 37, 640),
                                   shaped(LayoutKind::kZigzag, 0, 256), shaped(LayoutKind::kContiguous, 0, 1024)}) {
        EXPECT_TRUE(run_gpu_job(job, asked, tensors, world).same_bits(reference))
            << describe(job) << ": " << world << " ranks, " << layout_name(asked.layout.kind) << ", stripe "
            << asked.layout.stripe << ", block " << asked.block_tokens;
      }
    }
  }
};

TEST_P(GpuBlockMask, OfEverythingAreTheJob) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{200, 0}}) {
    const Job dense{make_spec(Dtype::kBf16, 4, 2, 128, mask), {{900, 900, 0}, {1, 1, 0}, {100, 700, 600}}};
    const JobTensors tensors = random_tensors(dense, 3);
    const JobResult reference = run_gpu_job(dense, options(), tensors, 1);
    for (const int heads : {1, 2, 4}) {
      const Job job = with_block_mask(dense, shape_of(dense.spec, heads), all_blocks());
      ASSERT_TRUE(able(job.spec)) << describe(job);
      for (const int world : {1, 2, 3}) {
        EXPECT_TRUE(run_gpu_job(job, options(), tensors, world).same_bits(reference)) << describe(job) << ", " << world;
      }
    }
  }
}

TEST_P(GpuBlockMask, HaveTheSameBitsOnAnyNumberOfRanks) {
  const std::vector<Sequence> ragged = {{300, 300, 0}, {0, 0, 0},       {257, 90, 11},
                                        {64, 0, 0},    {2000, 2000, 0}, {17, 40, -9}};
  for (const auto& [heads, mask] : {std::pair{1, Mask{-1, 0}}, {2, Mask{-1, -1}}, {4, Mask{300, 0}}}) {
    AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 128, mask);
    spec.sinks = heads == 2;
    const BlockMaskShape shape = shape_of(spec, heads);
    const Job job = with_block_mask(
        {spec, ragged}, shape,
        union_of_patterns({random_blocks(shape, mask, 2, 7), global_blocks(shape, heads == 4 ? 70 : 0)}));
    expect_same_everywhere(job, random_tensors(job, 4));
  }
}

// More tiles than a KV split in every mask row, so that blocks and ranks cut splits anywhere.
TEST_P(GpuBlockMask, OfSeveralKvSplits) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 2, 1, 128, {-1, 0});
  const BlockMaskShape shape = shape_of(spec, 2);
  const std::int64_t keys = std::int64_t{shape.key_block} * 200 + 50;
  const Job job =
      with_block_mask({spec, {{90, keys, keys - 90}}}, shape,
                      union_of_patterns({random_blocks(shape, spec.mask, 130, 9), window_blocks(shape, 100)}));
  const JobTensors tensors = random_tensors(job, 5);
  const JobResult reference = run_gpu_job(job, options(), tensors, 1);
  for (const int world : {2, 3}) {
    for (const std::int64_t block : {std::int64_t{0}, std::int64_t{10} * shape.key_block}) {
      EXPECT_TRUE(run_gpu_job(job, options(block), tensors, world).same_bits(reference)) << world << ", " << block;
    }
  }
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(GpuBlockMask);

}  // namespace
}  // namespace ringattn::testing
