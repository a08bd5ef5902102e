// SPDX-License-Identifier: Apache-2.0
// The promise under mpirun: each rank's rows equal those of a single rank, byte for byte. Run at several world sizes.
#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"
#include "comm/self.hpp"
#include "kernels/common/simd_target.hpp"
#include "tests/distributed/mpi_tally.hpp"
#include "tests/distributed/over_mpi.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

class MpiInvariance : public OverMpi {
 protected:
  void expect_same_bits(const Job& job, Options options, const std::string& what) {
    const JobTensors tensors = random_tensors(job, 11);
    Transport& transport = this->transport();
    options.kernel.backend = backend();
    Options alone;
    alone.threads = 1;
    alone.kernel = options.kernel;
    JobResult reference = poisoned_result(job, 1);
    run_rank(job, alone, tensors, *make_self_transport(transport.memory(), transport.device()), reference);

    JobResult result = poisoned_result(job, transport.size());
    run_rank(job, options, tensors, transport, result);

    expect_rows_of_all_ranks(job.batch.q_tokens(), result, reference, poisoned_result(job, 1), what);
  }
};

AttentionSpec small_spec(Mask mask) {
  AttentionSpec spec;
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.head_dim = 64;
  spec.head_dim_v = 32;
  spec.mask = mask;
  spec.softmax_scale = 0.125F;
  return spec;
}

TEST_P(MpiInvariance, CausalOnAllLayouts) {
  const Job job{small_spec({-1, 0}), uniform_batch(1, 2111, 2111)};
  for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
    for (const std::int64_t block : {0, 128, 640}) {
      Options options;
      options.threads = 1;
      options.layout.kind = kind;
      options.block_tokens = block;
      options.checksum = block == 640 && GetParam() == "mpi";  // of host memory
      expect_same_bits(job, options, std::string(layout_name(kind)) + ", block " + std::to_string(block));
    }
  }
}

TEST_P(MpiInvariance, RaggedBatchFullMaskOddStripes) {
  const Job job{small_spec({-1, -1}), {{300, 300, 0}, {1, 1, 0}, {0, 0, 0}, {77, 500, 423}, {129, 64, 0}}};
  for (const std::int64_t stripe : {37, 128}) {
    Options options;
    options.threads = 1;
    options.layout.stripe = stripe;
    options.overlap = stripe == 37;
    expect_same_bits(job, options, "stripe " + std::to_string(stripe));
  }
}

TEST_P(MpiInvariance, SlidingWindowMovesOnlyItsHalo) {
  const Job job{small_spec({150, 0}), uniform_batch(1, 3000, 3000)};
  Options options;
  options.threads = 1;
  options.layout.kind = LayoutKind::kContiguous;
  expect_same_bits(job, options, "window");
}

TEST_P(MpiInvariance, OneToken) {
  const Job job{small_spec({-1, 0}), uniform_batch(1, 1, 1)};
  Options options;
  options.threads = 1;
  expect_same_bits(job, options, "one token");
}

// One host has no AMX, or no AVX-512, as far as its kernels know.
TEST_P(MpiInvariance, HostsOfDifferentKindsRunWhatHasTheSameBits) {
  if (backend() != "cpu") GTEST_SKIP() << "needs: CPU kernels";
  if (simd_target_names_here().front() != "amx") GTEST_SKIP() << "needs: a processor with AMX";
  Transport& transport = this->transport();
  const int last = transport.size() - 1;
  const auto use = [&](const char* of_last) { set_simd_target(transport.rank() == last ? of_last : "amx"); };
  Options options;
  options.threads = 1;
  options.kernel.backend = "cpu";
  Job job{small_spec({-1, 0}), uniform_batch(1, 700, 700)};
  const auto expect_refusal = [&](const std::string& values) {
    if (transport.size() == 1) return;
    try {
      Attention(job, transport, options);
      FAIL() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_EQ(
          std::string(error.what()),
          "rank " + std::to_string(last) + " and rank 0 differ in SIMD target (" + values +
              "). Set RINGATTN_SIMD_TARGET on all ranks to a target that every host has; ringattn's info lists them.");
    }
  };
  use("avx512");
  job.spec.dtype = Dtype::kBf16;
  expect_refusal("AVX3 against AVX3+AMX-BF16");
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16}) {
    job.spec.dtype = dtype;
    expect_same_bits(job, options, "with and without AMX");
  }
  use("avx2");
  job.spec.dtype = Dtype::kF32;
  expect_refusal("AVX2 against AVX3");
  set_simd_target("avx2");
  job.spec.dtype = Dtype::kBf16;
  expect_same_bits(job, options, "a common target");
  set_simd_target("auto");
}

INSTANTIATE_TEST_SUITE_P(Transports, MpiInvariance, ::testing::Values("mpi", "p2p", "nccl"), transport_name);

}  // namespace
}  // namespace ringattn::testing
