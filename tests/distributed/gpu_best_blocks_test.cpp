// SPDX-License-Identifier: Apache-2.0
// The best blocks of a job's input are the same wherever they are chosen: on the host, or on a GPU, of rows that a seed
// makes there, that a file has and that are stored quantized.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "base/error.hpp"
#include "base/gpu.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/top_k_blocks.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/dealt_block_masks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

class GpuBestBlocks : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = gpus_unavailable(); !why.empty()) GTEST_SKIP() << "needs: " << why;
  }

  static void expect_same(const InputRequest& request, const Numerics& numerics = {}) {
    const JobInput input(request, numerics);
    for (const int heads : {1, input.job().spec.kv_heads, input.job().spec.heads}) {
      AttentionSpec spec = input.job().spec;
      spec.block_mask = {128, 128, heads};
      const BlockMask host = top_k_blocks(input, spec, 3, {});
      const BlockMask device = top_k_blocks(input, spec, 3, {{"cuda", "auto"}, 0});
      ASSERT_EQ(device.indices().size(), host.indices().size()) << describe(input);
      EXPECT_EQ(std::memcmp(device.indices().data(), host.indices().data(), host.indices().size_bytes()), 0)
          << describe(input) << ", lists of " << heads;
      EXPECT_TRUE(device == host);
    }
  }
};

SyntheticInput synthetic(std::int64_t tokens) {
  SyntheticInput input;
  input.seed = 7;
  input.tokens = tokens;
  input.batch = 2;
  input.heads = 8;
  input.kv_heads = 2;
  input.head_dim = 128;
  return input;
}

// Several pieces of rows.
TEST_F(GpuBestBlocks, OfASeed) {
  SyntheticInput input = synthetic(20'001);
  expect_same(input);
  input.q_len = 300;
  expect_same(input);
  input.cache_format = "int8";
  expect_same(input);
}

TEST_F(GpuBestBlocks, OfAFile) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.lengths = {9000, 0, 257};
  shape.q_lens = {9000, 0, 100};
  shape.heads = 32;
  shape.kv_heads = 4;
  shape.head_dim = shape.head_dim_v = 64;
  const std::string path = write_tensors(folder.file("rows"), row_tensors(shape));
  expect_same(FileInput{path});
  Numerics full;
  full.mask = {-1, -1};
  full.query_offset = 130;
  expect_same(FileInput{path}, full);
}

// The job's own path to its block mask.
TEST_F(GpuBestBlocks, OfAJob) {
  Numerics numerics;
  numerics.block_mask = "topk:3+window:200";
  const BlockMask host = *JobInput(synthetic(3000), numerics).job().block_mask;  // released before the next one asks
  EXPECT_TRUE(*JobInput(synthetic(3000), numerics, {{"cuda", "auto"}, 0}).job().block_mask == host);
}

// Several ranks have the rows in their GPUs' memory.
TEST_F(GpuBestBlocks, OfRowsOfSeveralRanks) {
  const Job job{make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0}),
                {{3000, 3000, 0}, {0, 9, 0}, {700, 900, 200}, {1, 300, 299}}};
  const BlockMaskShape shape{128, 128, 2};
  const JobTensors tensors = random_tensors(job, 4);
  const BlockMask expected = block_mask_of_all(job, shape, 5, tensors);
  for (const int world : {1, 2, 3}) {
    const Dealt dealt = deal(job, shape, world, static_cast<std::uint32_t>(world));
    run_gpu_world(world, [&](Transport& transport) {
      if (*block_mask_of_rank(job, shape, 5, dealt, tensors, transport, "cuda") == expected) return;
      fail(ErrorCode::kWrongResult, "a rank has other lists", "the host chose differently");
    });
  }
}

}  // namespace
}  // namespace ringattn::testing
