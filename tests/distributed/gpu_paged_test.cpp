// SPDX-License-Identifier: Apache-2.0
// Attention over a paged cache on GPUs, over every attention kernel of the cuda backend: one rank reads pages
// where they lie, several copy theirs first, and all give the bits of the same keys in rows.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "tests/support/gpu_rows.hpp"
#include "tests/support/paged_rank.hpp"

namespace ringattn::testing {
namespace {

class GpuPaged : public GpuRowTest {
 protected:
  static JobResult run_paged(const Job& job, const Options& options, const JobTensors& tensors, int world,
                             const PageLayout& pages) {
    JobResult result = poisoned_result(job, world);
    run_gpu_world(world, [&](Transport& rank) { run_paged_rank(job, options, tensors, rank, pages, result); });
    return result;
  }

  void expect_the_bits_of_rows(const Job& job) const {
    if (!able(job.spec)) return;
    const JobTensors tensors = random_tensors(job, 17);
    const JobResult rows = run_gpu_job(job, options(), tensors, 1);
    for (const std::int64_t page_size : {16, 64, 128, 256}) {
      for (const int world : {1, 2, 3}) {
        for (const std::int64_t block : {0, 512}) {
          const bool head_major = world == 2 || page_size == 64;
          const PageLayout pages{page_size, head_major, 3, 0, page_size == 64 ? 8 : 0};
          EXPECT_TRUE(run_paged(job, options(block), tensors, world, pages).same_bits(rows))
              << describe(job) << "; pages of " << page_size << ", " << world << " ranks, block " << block;
        }
      }
    }
  }
};

TEST_P(GpuPaged, CausalJobs) {
  expect_the_bits_of_rows({make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0}), uniform_batch(1, 1531, 1531)});
  expect_the_bits_of_rows({make_spec(Dtype::kBf16, 2, 2, 64, {-1, 0}), uniform_batch(2, 33, 1400)});
}

TEST_P(GpuPaged, RaggedJobsWithEverything) {
  AttentionSpec everything = make_spec(Dtype::kF16, 4, 2, 128, {150, 33});
  everything.softcap = 20.0F;
  everything.sinks = true;
  expect_the_bits_of_rows({everything,
                           {{1, 1, 0},
                            {300, 300, 0},
                            {0, 0, 0},
                            {129, 129, 0},
                            {5, 700, 695},
                            {257, 90, 11},
                            {64, 0, 0},
                            {900, 900, 0},
                            {17, 40, -9},
                            {128, 128, 0}}});
}

TEST_P(GpuPaged, ShorterLengthsOverTheSamePool) {
  Job job{make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0}), uniform_batch(1, 1531, 1531)};
  job.page_size = 16;
  Job shorter = job;
  shorter.batch = uniform_batch(1, 400, 777);
  Job rows = shorter;
  rows.page_size = 0;
  const JobTensors tensors = random_tensors(shorter, 20);
  const JobResult expected = run_gpu_job(rows, options(), tensors, 1);
  for (const int world : {1, 2, 3}) {
    Options prepared = options();
    prepared.shorter_lengths = true;
    JobResult result = poisoned_result(shorter, world);
    run_gpu_world(world, [&](Transport& rank) {
      Attention attention(job, rank, prepared);
      attention.set_lengths(shorter.batch);
      const PagedRank memory(attention, rank.rank(), tensors, {16, true, 6});
      attention.run(memory.inputs(), memory.outputs(), memory.workspace(), memory.stream());
      memory.collect(result);
      rank.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
    });
    EXPECT_TRUE(result.same_bits(expected)) << world << " ranks";
  }
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(GpuPaged);

}  // namespace
}  // namespace ringattn::testing
