// SPDX-License-Identifier: Apache-2.0
// Attention over compressed keys and values on GPUs, over every attention kernel of the cuda backend: blocks are sent
// quantized, and O and LSE have the bits of attention over what decompression gives, for any number of ranks, layout
// and blocks.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/quant/low_rank.hpp"
#include "tests/support/compressed_rank.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gpu_rows.hpp"

namespace ringattn::testing {
namespace {

JobResult run_compressed(const Job& job, const Options& options, const CompressedJobTensors& tensors, int world,
                         std::int64_t gap = 0) {
  JobResult result = poisoned_result(job, world);
  run_gpu_world(world, [&](Transport& rank) { run_compressed_rank(job, options, tensors, rank, result, gap); });
  return result;
}

std::vector<CacheFormat> formats() {
  std::vector<CacheFormat> all;
  for (const RowFormat& format : quantized_formats()) all.push_back({format, format});
  const RowFormat channel = parse_row_format("int4_channel group 32");
  all.push_back({channel, parse_row_format("int4_token group 32")});
  all.push_back({parse_row_format("fp8 token_head"), {}});
  all.push_back({{}, channel});
  return all;
}

std::vector<CacheFormat> formats_of_a_rank() {
  if (!has_low_rank()) return {};
  const RowFormat factors{RowEncoding::kLowRank, ScaleGrain::kTokenHead, 0, 24};
  const RowFormat remainders{RowEncoding::kHybrid, ScaleGrain::kTokenHead, 32, 16, 0, 4};
  return {{factors, factors}, {remainders, remainders}};
}

class GpuCompressed : public GpuRowTest {
 protected:
  // Whether the kernel's tiles are whole quantization groups of the format.
  bool takes(const AttentionSpec& spec, const CacheFormat& format) const {
    const int tile = tiles_of(spec).key;
    const auto whole = [tile](const RowFormat& rows) { return quantized_per_token(rows) || tile % rows.group == 0; };
    return whole(format.k) && whole(format.v);
  }

  void expect_same_everywhere(const Job& job, const CompressedJobTensors& tensors, const JobResult& reference) const {
    for (const int world : {1, 2, 3, 4, 5}) {
      for (const std::int64_t block : {0, 384}) {
        for (const std::int64_t stripe : {0, 37}) {
          Options asked = options(block);
          asked.layout.stripe = stripe;
          const std::int64_t gap = stripe == 0 ? 0 : 48;
          Job lying = job;  // in rows, or in pages
          lying.page_size = world < 4 && gap == 0 ? (block == 0 ? 16 : 64) : 0;
          EXPECT_TRUE(run_compressed(lying, asked, tensors, world, gap).same_bits(reference))
              << describe(job) << "; k " << describe(job.format.k) << ", v " << describe(job.format.v) << ": " << world
              << " ranks, block " << block << ", stripe " << stripe << ", gap " << gap << ", pages of "
              << lying.page_size;
        }
      }
    }
  }
};

TEST_P(GpuCompressed, HasTheBitsOfWhatComesBackOnAnyNumberOfRanks) {
  AttentionSpec causal = make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0});
  AttentionSpec everything = make_spec(Dtype::kF16, 4, 2, 128, {200, 30});
  everything.sinks = true;
  everything.softcap = 20.0F;
  const Batch ragged = {{1, 1, 0}, {300, 300, 0}, {0, 0, 0}, {129, 129, 0}, {5, 700, 695}, {63, 63, 0}, {17, 40, -9}};
  int taken = 0;
  for (const CacheFormat& format : formats()) {
    for (const AttentionSpec& spec : {causal, everything}) {
      if (!takes(spec, format)) continue;
      const Job plain{spec, ragged};
      Job job = plain;
      job.format = format;
      const CompressedJobTensors tensors = compressed_job_tensors(job, 7);
      expect_same_everywhere(job, tensors, run_gpu_job(plain, options(), tensors.plain, 1));
      ++taken;
    }
  }
  EXPECT_GT(taken, 0);
}

// Products of factors and basis are sums, whose order is the device's own: the reference is one rank of it.
TEST_P(GpuCompressed, FormatsOfARankHaveTheBitsOfOneRank) {
  if (formats_of_a_rank().empty()) GTEST_SKIP() << "needs Eigen in the build";
  for (const CacheFormat& format : formats_of_a_rank()) {
    Job job{make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0}), uniform_batch(2, 450, 450)};
    job.format = format;
    const CompressedJobTensors tensors = compressed_job_tensors(job, 7);
    expect_same_everywhere(job, tensors, run_compressed(job, options(), tensors, 1));
  }
}

// A scale of K and a code of V that no compressed tensor may hold, of the 11th and the 12th key of the second sequence.
TEST_P(GpuCompressed, InvalidEntriesAreNamedOnAnyNumberOfRanks) {
  Job job{make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0}), {{300, 300, 0}, {129, 129, 0}}};
  job.format = {parse_row_format("int8"), parse_row_format("int8")};
  const auto text_of = [&](bool keys, int world) {
    CompressedJobTensors tensors = compressed_job_tensors(job, 3);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (keys) std::memcpy(tensors.k.streams[1].data() + (310 * job.spec.kv_heads + 1) * 4, &nan, 4);
    tensors.v.streams[0][static_cast<std::size_t>((311 * job.spec.kv_heads + 1) * job.spec.head_dim_v + 7)] =
        std::byte{0x80};
    const Error error = error_of([&] { run_compressed(job, options(128), tensors, world); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return std::string(error.what());
  };
  for (const int world : {1, 2, 3}) {
    EXPECT_NE(text_of(true, world).find("k_scales[310, 1, 0] is nan"), std::string::npos) << text_of(true, world);
    EXPECT_NE(text_of(false, world).find("v_codes[311, 1, 7] is -128"), std::string::npos) << text_of(false, world);
  }
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(GpuCompressed);

}  // namespace
}  // namespace ringattn::testing
