// SPDX-License-Identifier: Apache-2.0
// The words of gemm_gpu_bench, and what its shapes come to. peers_test.py has the same figures for the peers.
#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "bench/gemm_gpu_arguments.hpp"

namespace ringattn {
namespace {

std::vector<GemmShape> shapes(const std::vector<std::string_view>& words) { return parse_gemm_arguments(words).shapes; }

TEST(GemmArguments, EveryShapeWithEveryCache) {
  const auto found = shapes({"--shapes", "expand:32kx16,back:1x128", "--cache", "warm,cold"});
  ASSERT_EQ(found.size(), 4U);
  EXPECT_EQ(found[0].use, GemmUse::kExpand);
  EXPECT_EQ(found[0].rows, 32768);
  EXPECT_EQ(found[0].heads, 16);
  EXPECT_FALSE(found[0].cold);
  EXPECT_TRUE(found[1].cold);
  EXPECT_EQ(found[3].use, GemmUse::kBack);
  EXPECT_EQ(found[3].rows, 1);
}

TEST(GemmArguments, WithoutAnyTheThreeUses) {
  const GemmArguments words = parse_gemm_arguments({});
  EXPECT_EQ(words.kernel, "sm90_gemm");
  EXPECT_EQ(words.dtype, Dtype::kBf16);
  EXPECT_EQ(words.shapes.size(), 6U);
  EXPECT_EQ(parse_gemm_arguments({"--kernel", "other", "--dtype", "fp16"}).dtype, Dtype::kF16);
}

TEST(GemmArguments, ShapesCountWhatIsReadAndWritten) {
  const auto found = shapes({"--shapes", "expand:32kx16,absorb:128x128,back:128x128", "--cache", "cold"});
  EXPECT_EQ(found[0].flops(), 2.0 * 32768 * 16 * 512 * 128);
  EXPECT_EQ(found[0].bytes(), 2 * (32768 * 512 + 16 * 128 * 512 + 32768 * 16 * 128));
  EXPECT_EQ(found[1].bytes(), 2 * (128 * 128 * 128 + 128 * 128 * 512 + 128 * 128 * 512));
  EXPECT_EQ(found[2].bytes(), found[1].bytes());
  EXPECT_EQ(found[1].copies(), 15);
  EXPECT_EQ(found[1].launches(), 30);
  EXPECT_EQ(shapes({"--shapes", "back:128x128", "--cache", "warm"})[0].copies(), 1);
  EXPECT_EQ(shapes({"--shapes", "back:128x128", "--cache", "warm"})[0].launches(), 16);
  EXPECT_EQ(name_of(GemmUse::kExpand), "expand");
  EXPECT_EQ(name_of(GemmUse::kBack), "back");
}

TEST(GemmArguments, WhatIsNoWordIsRefused) {
  const std::vector<std::vector<std::string_view>> wrong = {
      {"--shapes"},
      {"--shapes", ""},
      {"--shapes", "128x128"},
      {"--shapes", "back:128"},
      {"--shapes", "back:x"},
      {"--rows", "1"},
      {"--shapes", "fold:1x1"},
      {"--shapes", "back:0x1"},
      {"--cache", "hot"},
      {"--dtype", "fp32"},
      {"--shapes", "back:1x1025"},
      {"--shapes", "back:1x1,"},
      {"--cache", ""},
      {"back:128x128"},
      {"--kernel"},
  };
  for (const auto& words : wrong) {
    try {
      parse_gemm_arguments(words);
      ADD_FAILURE() << words.front() << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
    }
  }
}

}  // namespace
}  // namespace ringattn
