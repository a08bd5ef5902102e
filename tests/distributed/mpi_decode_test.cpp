// SPDX-License-Identifier: Apache-2.0
// Decode under mpirun: the rows that each rank gives are those of Attention on a single rank, byte for byte. Run at
// several world sizes.
#include <gtest/gtest.h>
#include <mpi.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "tests/distributed/over_mpi.hpp"
#include "tests/support/block_mask_steps.hpp"
#include "tests/support/decode_rank.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

class MpiDecode : public OverMpi {
 protected:
  DecodeOptions options() {
    DecodeOptions options;
    options.kernel.backend = backend();
    options.threads = 1;
    return options;
  }

  Decode prepare(const Job& job, int rows, const CacheLayout& layout) {
    return Decode(decode_job(job, rows, layout), transport(), options());
  }

  JobResult attended(const Job& job, const JobTensors& tensors) {
    Options options;
    options.kernel.backend = backend();
    options.threads = 1;
    JobResult result = poisoned_result(job, 1);
    run_rank(job, options, tensors, *make_self_transport(transport().memory(), transport().device()), result);
    return result;
  }

  // Every sequence has one rank that gives its rows.
  static void expect_all_owned(const Decode& decode, const Job& job) {
    const auto sequences = static_cast<std::int64_t>(job.batch.sequences.size());
    const long long mine = decode.owned(sequences).count;
    long long all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(all, sequences);
  }
};

AttentionSpec small_spec(const Mask& mask) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 64, mask);
  spec.sinks = true;
  return spec;
}

TEST_P(MpiDecode, RaggedBatch) {
  for (const auto& [mask, rows] : {std::pair{Mask{-1, 0}, 1}, {Mask{-1, -1}, 5}, {Mask{8300, 0}, 2}}) {
    Job job{small_spec(mask), {}};
    for (const std::int64_t length : {1, 0, 8193, 300, 16400, 129}) {
      job.batch.sequences.push_back({rows, length, length - rows});
    }
    const CacheLayout layout{.page_size = rows == 5 ? 0 : 64};
    const JobTensors tensors = random_tensors(job, 11);
    const JobResult reference = attended(job, tensors);
    Decode decode = prepare(job, rows, layout);
    DecodeRank rank(decode, job, tensors, layout);
    rank.fill(job.batch.k_lengths());
    rank.load(job.batch.k_lengths(), rows);
    decode.run(rank.inputs(false, false), rank.outputs(), rank.stream());
    EXPECT_EQ(rank.difference(reference), "") << "rank " << transport().rank();
    expect_all_owned(decode, job);
  }
}

// Steps follow each other without a wait between them, but for reading the results of some.
TEST_P(MpiDecode, GrowingSequences) {
  constexpr std::int64_t kSteps = 60;
  Job job{small_spec({-1, 0}), {}};
  for (const std::int64_t length : {std::int64_t{8192} + 30, kSteps})
    job.batch.sequences.push_back({length, length, 0});
  const CacheLayout layout{.page_size = 16};
  const JobTensors tensors = random_tensors(job, 12);
  const JobResult reference = attended(job, tensors);
  Decode decode = prepare(job, 1, layout);
  DecodeRank rank(decode, job, tensors, layout);
  std::vector<std::int64_t> lengths = {8192 + 30 - kSteps, 0};
  rank.fill(lengths);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    for (std::int64_t& length : lengths) ++length;
    rank.load(lengths, 1);
    decode.enqueue(rank.inputs(true, true), rank.outputs(), rank.stream());
    decode.wait();
    EXPECT_EQ(rank.difference(reference), "") << "step " << step << ", rank " << transport().rank();
  }
  transport().barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

// With a block mask ranks keep some of the heads, or, where there are fewer than ranks, of the sequences.
TEST_P(MpiDecode, ByLists) {
  for (const int kv_heads : {2, 5}) {
    for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{8192 + 1300}, {2000, 300, 1400, 130}}) {
      const BlockMaskShape shape{128, 128, kv_heads == 5 ? kv_heads : 1};
      AttentionSpec spec = make_spec(Dtype::kBf16, 2 * kv_heads, kv_heads, 64, {-1, 0});
      spec.sinks = true;
      const BlockMaskSteps steps(spec, lengths, 14, backend());
      const auto block_mask = steps.block_mask(shape, lengths, 1, random_blocks(shape, spec.mask, 66, 3));
      const JobResult reference = steps.attended(
          block_mask, lengths, 1, [this](const Job& of, const JobTensors& tensors) { return attended(of, tensors); });
      const CacheLayout layout{.page_size = lengths.size() == 1 ? 64 : 0};
      DecodeJob job = decode_job(steps.job(), 1, layout);
      job.spec.block_mask = shape;
      if (lengths.size() > 1 && transport().size() <= kv_heads) job.head_parts = transport().size();
      Decode decode(job, transport(), options());
      DecodeRank rank(decode, steps.job(), steps.tensors(), layout);
      rank.set_block_mask(*block_mask, 1);
      std::vector<std::int64_t> before = lengths;
      for (std::int64_t& length : before) --length;
      rank.fill(before);
      rank.load(lengths, 1);
      decode.run(rank.inputs(true, true), rank.outputs(), rank.stream());
      EXPECT_EQ(rank.difference(reference), "") << kv_heads << " heads, rank " << transport().rank();
      expect_all_owned(decode, steps.job());
      // As many steps again, none of which is waited for.
      for (int again = 0; again < 3; ++again) {
        decode.enqueue(rank.inputs(false, false), rank.outputs(), rank.stream());
      }
      decode.wait();
      EXPECT_EQ(rank.difference(reference), "") << kv_heads << " heads, rank " << transport().rank();
      transport().barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
    }
  }
}

// One rank's table is wrong: all ranks refuse the step, and the next one is as ever.
TEST_P(MpiDecode, ABadTable) {
  Job job{small_spec({-1, 0}), {{1, 500, 499}, {1, 200, 199}}};
  const CacheLayout layout{.page_size = 64};
  const JobTensors tensors = random_tensors(job, 13);
  const JobResult reference = attended(job, tensors);
  Decode decode = prepare(job, 1, layout);
  DecodeRank rank(decode, job, tensors, layout);
  rank.fill({500, 200});
  rank.load({500, 200}, 1);
  std::int32_t* const bad =
      transport().rank() == 0 ? &rank.table[static_cast<std::size_t>(rank.table_pages) + 2] : nullptr;
  const std::int32_t good = bad != nullptr ? *bad : 0;
  if (bad != nullptr) *bad = 1 << 20;
  rank.upload();
  const Error error = error_of([&] { decode.run(rank.inputs(false, false), rank.outputs(), rank.stream()); });
  EXPECT_EQ(error.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(error.what()).find("sequence 1 has page 1048576 at index 2"), std::string::npos)
      << error.what();
  if (bad != nullptr) *bad = good;
  rank.upload();
  decode.run(rank.inputs(false, false), rank.outputs(), rank.stream());
  EXPECT_EQ(rank.difference(reference), "") << "rank " << transport().rank();
}

INSTANTIATE_TEST_SUITE_P(Transports, MpiDecode, ::testing::Values("mpi", "p2p", "nccl"), transport_name);

}  // namespace
}  // namespace ringattn::testing
