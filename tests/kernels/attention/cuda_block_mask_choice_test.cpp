// SPDX-License-Identifier: Apache-2.0
// Lists that a GPU chooses for a prefill are those that the host chooses, by memcmp.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/gpu.hpp"
#include "kernels/common/platform.hpp"
#include "kernels/common/registry.hpp"
#include "tests/support/special_values.hpp"
#include "tests/support/top_k_block_mask.hpp"

namespace ringattn::testing {
namespace {

class CudaBlockMaskChoice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = cuda::cuda_unavailable(); !why.empty()) GTEST_SKIP() << "needs: " << why;
  }

  // Rows come to the device in pieces of `piece`, and to the host at once.
  static void expect_same(const AttentionInputs& inputs, int count, std::int64_t piece = std::int64_t{1} << 40) {
    std::string sequences;
    for (const SequenceShape& of : inputs.sequences) {
      sequences += fmt::format(" {}/{}@{}", of.q_len, of.k_len, of.q_offset);
    }
    SCOPED_TRACE(fmt::format("{}, the best {}, pieces of {}:{}", describe(inputs.spec), count, piece, sequences));
    const auto device = cuda::make_cuda_backend({1, 0});
    const BlockMask host = top_k_block_mask(inputs, count);
    const BlockMask first = top_k_block_mask(inputs, count, *device, piece);
    const BlockMask again = top_k_block_mask(inputs, count, *device);
    for (const BlockMask* block_mask : {&first, &again}) {
      ASSERT_TRUE(std::ranges::equal(block_mask->indptr(), host.indptr()));
      ASSERT_EQ(block_mask->indices().size(), host.indices().size());
      ASSERT_TRUE(host.indices().empty() ||
                  std::memcmp(block_mask->indices().data(), host.indices().data(), host.indices().size_bytes()) == 0);
    }
  }
};

// Short enough for tools that slow kernels down.
TEST_F(CudaBlockMaskChoice, AFewBlocks) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 40, {-1, 0});
  spec.block_mask = {16, 8, 2};
  expect_same(random_inputs(spec, {{70, 150, 80}, {1, 1, 0}, {0, 9, 0}, {17, 17, 0}}, 5), 4, 13);
}

TEST_F(CudaBlockMaskChoice, IsTheHosts) {
  std::mt19937 random(11);
  const auto any = [&](auto... of) {
    const std::int64_t values[] = {of...};
    return values[random() % std::size(values)];
  };
  for (int round = 0; round < 120; ++round) {
    const auto dtype = static_cast<Dtype>(
        any(static_cast<int>(Dtype::kBf16), static_cast<int>(Dtype::kF16), static_cast<int>(Dtype::kF32)));
    const auto kv_heads = static_cast<int>(any(1, 2, 3));
    const auto heads = static_cast<int>(kv_heads * any(1, 2, 4, 5));
    const auto dim = static_cast<int>(any(1, 8, 31, 64, 96, 128, 130, 192, 256, 576));
    const Mask masks[] = {{-1, 0}, {-1, -1}, {100, 0}, {70, 40}, {-1, 33}};
    AttentionSpec spec = make_spec(dtype, heads, kv_heads, dim, masks[random() % std::size(masks)]);
    spec.block_mask = {static_cast<int>(any(1, 7, 16, 128)), static_cast<int>(any(1, 5, 16, 64)),
                       static_cast<int>(any(1, kv_heads, heads))};
    std::vector<SequenceShape> sequences;
    const std::int64_t most = std::min<std::int64_t>(1, 4000 / dim) * 300 + 20;
    for (std::int64_t n = any(1, 2, 5); n > 0; --n) {
      const std::int64_t keys = any(0, 1, 2, 31, 32, 33, 127, most, static_cast<std::int64_t>(random()) % most);
      const std::int64_t queries = any(0, 1, keys, keys / 2, 3);
      sequences.push_back({queries, keys, any(keys - queries, 0, -5, keys - 1, keys + 40)});
    }
    const AttentionInputs inputs = random_inputs(spec, sequences, static_cast<std::uint64_t>(round));
    expect_same(inputs, static_cast<int>(any(1, 2, 3, 9, 1000)), any(1, 13, 100));
  }
}

// More blocks than a CTA has threads, and than it keeps orders of; many that score the same; numbers that are none.
TEST_F(CudaBlockMaskChoice, ManyBlocksTiesAndNonFiniteRows) {
  AttentionSpec spec = make_spec(Dtype::kF32, 4, 2, 8, {-1, 0});
  spec.block_mask = {4, 2, 2};
  AttentionInputs inputs = random_inputs(spec, {{40, 12000, 11960}, {3, 2100, 2000}}, 21);
  for (const int count : {1, 700, 5000, 7000}) expect_same(inputs, count);
  std::mt19937 random(3);
  for (std::int64_t key = 0; key < inputs.k_tokens(); ++key) {
    for (int head = 0; head < 2; ++head) {
      const float level = key / 2 % 5 == 0 ? 1.0F : static_cast<float>(random() % 3) * 0.0F;
      for (int d = 0; d < 8; ++d) inputs.set_k(key, head, d, level);
    }
  }
  for (const int count : {2, 100, 1200, 1201, 4000}) expect_same(inputs, count);
  const float odd[] = {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(), -0.0F, 1e-45F, 3e38F};
  for (int i = 0; i < 200; ++i) {
    inputs.set_k(static_cast<std::int64_t>(random() % 12000), static_cast<int>(random() % 2),
                 static_cast<int>(random() % 8), odd[random() % std::size(odd)]);
  }
  for (const int count : {2, 100, 1200, 5900}) expect_same(inputs, count);
  for (int i = 0; i < 6; ++i) inputs.set_q(7 * i, i % 4, i, odd[i]);
  for (const int count : {3, 600}) expect_same(inputs, count);
}

// Enough mask rows that selection takes several launches.
TEST_F(CudaBlockMaskChoice, MoreBlockMasksThanFitAtATime) {
  AttentionSpec spec = make_spec(Dtype::kBf16, 16, 16, 8, {-1, 0});
  spec.block_mask = {1, 1, 16};
  expect_same(random_inputs(spec, {{1500, 1500, 0}, {0, 3, 0}, {300, 2000, 100}}, 8), 6, 700);
}

}  // namespace
}  // namespace ringattn::testing
