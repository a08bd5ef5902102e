// SPDX-License-Identifier: Apache-2.0
// Blocks of keys that a GPU chooses for a decode step are those that the host chooses: scores, masks and means by
// memcmp.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "base/gpu.hpp"
#include "kernels/common/platform.hpp"
#include "tests/support/block_chooser.hpp"
#include "tests/support/decode_runner.hpp"

namespace ringattn::testing {
namespace {

class CudaBlockChoice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = cuda::cuda_unavailable(); !why.empty()) GTEST_SKIP() << "needs: " << why;
  }

  static void expect_same(const AttentionInputs& inputs, std::int64_t page, int count) {
    SCOPED_TRACE(fmt::format("{}, page {}, the best {}", describe(inputs.spec), page, count));
    BlockChooser host(cpu::make_cpu_backend({2, 0}), inputs, page, count);
    BlockChooser device(cuda::make_cuda_backend({1, 0}), inputs, page, count);
    host.pool();
    device.pool();
    EXPECT_TRUE(device.means() == host.means());
    const BlockChooser::Result expected = host.choose();
    const BlockChooser::Result got = device.choose();
    EXPECT_TRUE(got.scores == expected.scores) << "scores";
    EXPECT_TRUE(got.counts == expected.counts) << "counts";
    EXPECT_TRUE(got.chosen == expected.chosen) << "lists";
    EXPECT_TRUE(device.choose() == expected) << "again";
  }
};

AttentionInputs inputs_of(Dtype dtype, int heads, int kv_heads, int dim, int mask_heads, int rows,
                          const std::vector<std::int64_t>& lengths, std::uint64_t seed) {
  AttentionSpec spec = make_spec(dtype, heads, kv_heads, dim, {-1, 0});
  spec.block_mask = {16, 32, mask_heads};
  return decode_inputs(spec, rows, lengths, seed);
}

TEST_F(CudaBlockChoice, IsTheHosts) {
  std::uint64_t seed = 1;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const int dim : {64, 96, 128, 256}) {
      const AttentionInputs inputs = inputs_of(dtype, 8, 2, dim, seed % 2 == 0 ? 1 : 2, seed % 3 == 0 ? 16 : 1,
                                               {32 * 100 + 8, 1, 32, 33, 32 * 70, 32 * 65 + 31}, seed);
      for (const int count : {1, 30, 90}) expect_same(inputs, seed % 2 == 0 ? 16 : 128, count);
      ++seed;
    }
  }
  expect_same(inputs_of(Dtype::kBf16, 32, 1, 576, 1, 2, {32 * 20 + 3}, seed), 64, 6);  // queries come in pieces
}

// More blocks than a CTA has threads, and many that score the same.
TEST_F(CudaBlockChoice, ManyBlocksAndTies) {
  AttentionInputs inputs = inputs_of(Dtype::kF32, 2, 2, 8, 2, 1, {32 * 3000 + 8, 32 * 1025}, 21);
  expect_same(inputs, 0, 500);
  std::mt19937 generator(3);
  for (std::size_t s = 0; s < 2; ++s) {
    for (std::int64_t key = 0; key < inputs.sequences[s].k_len; ++key) {
      for (int head = 0; head < 2; ++head) {
        const float level = key / 32 % 5 == 0 ? 1.0F : static_cast<float>(generator() % 3) * 0.0F;
        for (int d = 0; d < 8; ++d) inputs.set_k(inputs.k_begin(s) + key, head, d, level);
      }
    }
  }
  for (const int count : {2, 100, 607, 608, 1500, 3000}) expect_same(inputs, 16, count);
  inputs.set_k(32 * 40, 1, 2, std::numeric_limits<float>::infinity());
  inputs.set_k(32 * 41, 1, 2, -std::numeric_limits<float>::infinity());
  expect_same(inputs, 16, 700);
}

// More mask rows than a grid has rows.
TEST_F(CudaBlockChoice, ManySequences) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t s = 0; s < 1050; ++s) lengths.push_back(s % 5 == 0 ? 150 : s % 37);
  expect_same(inputs_of(Dtype::kBf16, 64, 64, 8, 64, 1, lengths, 23), 0, 3);
}

TEST_F(CudaBlockChoice, MeansFollowGrowingSequences) {
  const AttentionInputs inputs = inputs_of(Dtype::kBf16, 8, 2, 128, 2, 3, {32 * 12 + 3, 32 * 4, 400}, 13);
  BlockChooser steps(cuda::make_cuda_backend({1, 0}), inputs, 16, 4);
  BlockChooser whole(cuda::make_cuda_backend({1, 0}), inputs, 0, 4);
  whole.pool();
  for (std::int64_t back = 120; back >= 0; back -= 3) {
    std::vector<std::int64_t> lengths;
    for (const SequenceShape& of : inputs.sequences) lengths.push_back(of.k_len - back);
    steps.set_lengths(lengths);
    back == 120 ? steps.pool() : steps.enqueue();
  }
  EXPECT_TRUE(steps.means() == whole.means());
}

}  // namespace
}  // namespace ringattn::testing
