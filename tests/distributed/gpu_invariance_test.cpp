// SPDX-License-Identifier: Apache-2.0
// The promise on GPUs: O and LSE of any number of ranks, layout, stripe and block size equal those of one rank, byte
// for byte. Ranks are threads of this process and share the GPUs that there are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/attention/attention_spec.hpp"
#include "tests/support/environment.hpp"
#include "tests/support/gpu_rows.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

// Once for each kernel of the cuda backend.
class GpuInvariance : public GpuRowTest {
 protected:
  // The SIMT kernel takes the same paths with smaller jobs, as it is slow.
  std::int64_t scaled(std::int64_t tokens) const {
    return GetParam().name.find("simt") == std::string_view::npos ? tokens : tokens / 4 + 3;
  }

  void expect_equal_worlds(const Job& job, const std::vector<int>& worlds, const std::vector<Options>& shapes) {
    if (!able(job.spec)) return;
    const JobTensors tensors = random_tensors(job, 21);
    const JobResult reference = run_gpu_job(job, options(), tensors, 1);
    for (const int world : worlds) {
      for (const Options& shape : shapes) {
        Options asked = shape;
        asked.kernel = options().kernel;
        const JobResult result = run_gpu_job(job, asked, tensors, world);
        ASSERT_TRUE(result.same_bits(reference))
            << describe(job.spec) << ": " << world << " ranks, " << layout_name(asked.layout.kind) << ", stripe "
            << asked.layout.stripe << ", block " << asked.block_tokens;
      }
    }
  }
};

Options shape(LayoutKind kind, std::int64_t stripe, std::int64_t block, bool overlap = true) {
  Options options;
  options.layout = {kind, stripe};
  options.block_tokens = block;
  options.overlap = overlap;
  return options;
}

std::vector<Options> all_shapes() {
  return {shape(LayoutKind::kStriped, 0, 0),       shape(LayoutKind::kStriped, 128, 256),
          shape(LayoutKind::kStriped, 37, 640),    shape(LayoutKind::kStriped, 512, 1),
          shape(LayoutKind::kZigzag, 0, 1024),     shape(LayoutKind::kContiguous, 0, 0),
          shape(LayoutKind::kStriped, 0, 0, false)};
}

TEST_P(GpuInvariance, CausalInEveryWorldAndShape) {
  const std::int64_t n = scaled(3001);
  expect_equal_worlds({make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0}), uniform_batch(1, n, n)}, {1, 2, 3, 4, 5, 7},
                      all_shapes());
}

TEST_P(GpuInvariance, FullFp16) {
  const std::int64_t n = scaled(2050);
  expect_equal_worlds({make_spec(Dtype::kF16, 4, 1, 64, {-1, -1}), uniform_batch(1, n, n)}, {2, 3},
                      {shape(LayoutKind::kStriped, 0, 0), shape(LayoutKind::kStriped, 100, 300)});
}

TEST_P(GpuInvariance, RaggedBatchWithSinksAndSoftcap) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0});
  spec.sinks = true;
  spec.softcap = 30.0F;
  expect_equal_worlds({spec, {{300, 300, 0}, {1, 1, 0}, {0, 0, 0}, {77, 500, 423}, {129, 64, 0}, {1000, 1000, 0}}},
                      {2, 3, 4}, {shape(LayoutKind::kStriped, 0, 0), shape(LayoutKind::kStriped, 37, 128)});
}

TEST_P(GpuInvariance, SlidingWindow) {
  const std::int64_t n = scaled(4100);
  expect_equal_worlds({make_spec(Dtype::kBf16, 4, 2, 128, {300, 0}), uniform_batch(1, n, n)}, {2, 3},
                      {shape(LayoutKind::kContiguous, 0, 0), shape(LayoutKind::kStriped, 0, 512)});
}

TEST_P(GpuInvariance, OtherHeadDims) {
  for (const auto& [dim, dim_v] : {std::pair{64, 64}, {96, 96}, {192, 128}, {256, 256}, {40, 24}}) {
    expect_equal_worlds({make_spec(Dtype::kBf16, 4, 2, dim, {-1, 0}, dim_v), uniform_batch(1, 900, 900)}, {3},
                        {shape(LayoutKind::kStriped, 0, 256)});
  }
}

TEST_P(GpuInvariance, Fp32) {
  expect_equal_worlds({make_spec(Dtype::kF32, 2, 1, 64, {-1, 0}), uniform_batch(1, 500, 500)}, {2, 4},
                      {shape(LayoutKind::kStriped, 0, 0), shape(LayoutKind::kStriped, 64, 128)});
}

TEST_P(GpuInvariance, FewTokensManyRanks) {
  for (const std::int64_t n : {1, 2, 129}) {
    expect_equal_worlds({make_spec(Dtype::kBf16, 2, 1, 128, {-1, 0}), uniform_batch(1, n, n)}, {2, 4},
                        {shape(LayoutKind::kStriped, 0, 0)});
  }
}

TEST_P(GpuInvariance, ChunkedPrefillEqualsWholePrefill) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0});
  if (!able(spec)) GTEST_SKIP() << "needs: " << GetParam().missing(spec).front();
  const std::int64_t n = 1500;
  const JobTensors tensors = random_tensors({spec, {{n, n, 0}}}, 5);
  const JobResult whole = run_gpu_job({spec, {{n, n, 0}}}, options(), tensors, 2);
  const std::size_t q_row = 4 * 128 * 2;
  const std::size_t kv_row = 2 * 128 * 2;
  const auto cut = [](const std::vector<std::byte>& all, std::int64_t from, std::int64_t to, std::size_t row) {
    return std::vector<std::byte>(all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(from) * row),
                                  all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(to) * row));
  };
  for (const std::int64_t chunk : {512, 333, 77}) {
    for (std::int64_t begin = 0; begin < n; begin += chunk) {
      const std::int64_t end = std::min(n, begin + chunk);
      const JobTensors part{
          cut(tensors.q, begin, end, q_row), cut(tensors.k, 0, end, kv_row), cut(tensors.v, 0, end, kv_row), {}};
      const JobResult result = run_gpu_job({spec, {{end - begin, end, begin}}}, options(), part, chunk == 77 ? 1 : 3);
      const auto at = static_cast<std::size_t>(begin);
      const auto rows = static_cast<std::size_t>(end - begin);
      ASSERT_EQ(std::memcmp(result.out.data(), whole.out.data() + at * q_row, rows * q_row), 0) << chunk;
      ASSERT_EQ(std::memcmp(result.lse.data(), whole.lse.data() + at * 4, rows * 4 * sizeof(float)), 0) << chunk;
    }
  }
}

TEST_P(GpuInvariance, RepeatsAreEqual) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0});
  if (!able(spec)) GTEST_SKIP() << "needs: " << GetParam().missing(spec).front();
  const Job job{spec, uniform_batch(1, 700, 700)};
  const JobTensors tensors = random_tensors(job, 3);
  const JobResult reference = run_gpu_job(job, options(), tensors, 1);
  for (int i = 0; i < (long_tests() ? 200 : 10); ++i) {
    ASSERT_TRUE(run_gpu_job(job, options(), tensors, 2 + i % 3).same_bits(reference)) << "repeat " << i;
  }
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(GpuInvariance);

}  // namespace
}  // namespace ringattn::testing
