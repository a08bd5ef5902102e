// SPDX-License-Identifier: Apache-2.0
// Which tiles sm90_gemm takes, and which views TMA reads: pure functions of a GEMM's parameters.
// Needs no GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "kernels/common/registry.hpp"
#include "kernels/gemm/sm90/gemm.hpp"

namespace ringattn::sm90 {
namespace {

constexpr int kMultiprocessors = 132;

// Latents to keys of 16 heads; the data's address is never read.
cuda::GemmParams product(std::int32_t rows, std::int32_t heads = 16) {
  const auto* const data = reinterpret_cast<const char*>(std::uintptr_t{1} << 20);
  cuda::GemmParams p{};
  p.rows = {data, 1024, 0, 1, true};
  p.weights = {data, 1024, std::int64_t{128} * 1024, heads, true};
  p.row_count = rows;
  p.heads = heads;
  p.dim_k = 512;
  p.dim_n = 128;
  p.dtype = Dtype::kBf16;
  p.multiprocessors = kMultiprocessors;
  return p;
}

TEST(Sm90Gemm, TilesFollowTheNumberOfRows) {
  EXPECT_EQ(choose_gemm(product(1)).rows(), 64);
  EXPECT_EQ(choose_gemm(product(64)).rows(), 64);
  EXPECT_EQ(choose_gemm(product(65)).rows(), 128);
  EXPECT_EQ(choose_gemm(product(1023, 128)).rows(), 128);
  EXPECT_EQ(choose_gemm(product(1024, 128)).rows(), 256);
  EXPECT_EQ(choose_gemm(product(1024, 16)).rows(), 128) << "64 large tiles would leave multiprocessors without any";
  EXPECT_EQ(choose_gemm(product(32768, 16)).rows(), 256);
}

TEST(Sm90Gemm, TilesAreCountedInRowsColumnsAndHeads) {
  cuda::GemmParams p = product(129, 3);
  EXPECT_EQ(cuda::gemm_tiles(p, 128), 2 * 3);
  p.dim_n = 136;
  EXPECT_EQ(cuda::gemm_tiles(p, 64), 3 * 3 * 2);
}

TEST(Sm90Gemm, TmaReadsWhatIsAligned) {
  EXPECT_TRUE(can_map_gemm(product(5)));
  const auto changed = [](auto change) {
    cuda::GemmParams p = product(5);
    change(p);
    return can_map_gemm(p);
  };
  EXPECT_FALSE(changed([](auto& p) { p.rows.data += 2; }));
  EXPECT_FALSE(changed([](auto& p) { p.rows.stride += 8; }));
  EXPECT_FALSE(changed([](auto& p) { p.weights.data += 8; }));
  EXPECT_FALSE(changed([](auto& p) { p.weights.stride += 2; }));
  EXPECT_FALSE(changed([](auto& p) { p.weights.head_stride += 2; }));
  EXPECT_FALSE(changed([](auto& p) { p.weights.head_stride = 0; })) << "one matrix for all heads";
  // A stride without a second row or head is none.
  EXPECT_TRUE(changed([](auto& p) {
    p.row_count = 1;
    p.rows.stride = 2;
  }));
  EXPECT_TRUE(changed([](auto& p) {
    p.heads = p.weights.heads = 1;
    p.weights.head_stride = 2;
  }));
  EXPECT_TRUE(changed([](auto& p) { p.transposed = true; }));
}

TEST(Sm90Gemm, EveryRowOfTheTableNamesWhatIsMissing) {
  for (const BatchedGemmRow& row : kernel_table<BatchedGemmSpec>()) {
    EXPECT_TRUE(row.missing({Dtype::kBf16, 512, 128}).empty()) << row.name;
    const bool has_fp16 = row.name != "cpu_gemm_amx";
    EXPECT_EQ(row.missing({Dtype::kF16, 128, 512}).empty(), has_fp16) << row.name;
    EXPECT_EQ(row.missing({Dtype::kF16, 12, 0}).size(), has_fp16 ? 2U : 3U) << row.name;
    if (row.backend != "cuda") continue;
    ASSERT_EQ(row.missing({Dtype::kF32, 512, 128}).size(), 1U) << row.name;
    EXPECT_EQ(row.missing({Dtype::kF32, 512, 128}).front(), "fp32 (supported: bf16, fp16)") << row.name;
    ASSERT_NE(row.configs, nullptr) << row.name;
  }
}

}  // namespace
}  // namespace ringattn::sm90
