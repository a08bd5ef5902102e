// SPDX-License-Identifier: Apache-2.0
// The words of decode_gpu_bench, how often it uses which cache, and its lines. steps_test.py has the same figures for
// the peers.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "bench/decode_gpu_arguments.hpp"
#include "bench/decode_gpu_line.hpp"

namespace ringattn {
namespace {

std::vector<DecodeShape> shapes(const std::vector<std::string_view>& words) {
  return parse_decode_arguments(words).shapes;
}

TEST(DecodeArguments, CompressedCachesAreReadMoreOftenInTurn) {
  const auto found = shapes({"--steps", "1x128k", "--cache", "plain,fp8,int4"});
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(cache_rotation_of(found[0]).bytes, 131072 * 8 * 256);
  EXPECT_EQ(cache_rotation_of(found[1]).bytes, 131072 * 8 * 132);
  EXPECT_EQ(cache_rotation_of(found[2]).bytes, 131072 * 8 * 80);
  EXPECT_EQ(cache_rotation_of(found[0]).caches, 1);
  EXPECT_EQ(cache_rotation_of(found[1]).caches, 2);
  EXPECT_EQ(cache_rotation_of(found[2]).caches, 4);
  EXPECT_NE(decode_line("sm90_attention", "a GPU", found[1], {1.0}, "").find("\"form\":\"fp8\""), std::string::npos);
  EXPECT_THROW(shapes({"--cache", "fp4"}), Error);
}

TEST(DecodeArguments, SparseLaunchesReadOtherPartsOfACache) {
  const auto found = shapes({"--steps", "1x128k", "--listed", "102"});
  ASSERT_EQ(found.size(), 1U);
  EXPECT_FALSE(found[0].chosen);
  EXPECT_EQ(cache_rotation_of(found[0]).caches, 1);
  EXPECT_EQ(cache_rotation_of(found[0]).launches, 10);  // 1,024 blocks
  const std::string line = decode_line("sm90_attention", "a GPU", found[0], {1.0}, "");
  EXPECT_NE(line.find("\"form\":\"listed 102 blocks of 128\""), std::string::npos) << line;
  const auto best = shapes({"--steps", "1x128k", "--best", "64", "--slices", "4"});
  EXPECT_TRUE(best[0].chosen);
  EXPECT_NE(decode_line("sm90_attention", "a GPU", best[0], {1.0}, "").find("slices 4, best 64 blocks of 128"),
            std::string::npos);
  EXPECT_THROW(shapes({"--steps", "1x1k", "--listed", "9"}), Error);
}

TEST(DecodeArguments, EveryStepWithEveryPageSizeRowsAndSlices) {
  const auto found = shapes({"--steps", "1x4k,32x16k", "--page-size", "0,64", "--rows", "1,16", "--slices", "auto,8",
                             "--heads", "64", "--kv-heads", "4", "--head-dim", "96"});
  ASSERT_EQ(found.size(), 16U);
  EXPECT_EQ(found.front().batch, 1);
  EXPECT_EQ(found.front().keys, 4096);
  EXPECT_EQ(found.front().page, 0);
  EXPECT_EQ(found.front().rows, 1);
  EXPECT_EQ(found.front().slices, 0);
  EXPECT_EQ(found.back().batch, 32);
  EXPECT_EQ(found.back().keys, 16384);
  EXPECT_EQ(found.back().page, 64);
  EXPECT_EQ(found.back().rows, 16);
  EXPECT_EQ(found.back().slices, 8);
  for (const DecodeShape& shape : found) {
    EXPECT_EQ(shape.heads, 64);
    EXPECT_EQ(shape.kv_heads, 4);
    EXPECT_EQ(shape.head_dim, 96);
  }
}

TEST(DecodeArguments, WithAndWithoutUpdates) {
  const auto found = shapes({"--cache", "plain,fp8", "--update", "0,1"});
  ASSERT_EQ(found.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(found[i].update, i % 2 == 1) << "side by side, " << i;
  const auto form = [&](std::size_t i) { return decode_line("sm90_attention", "a GPU", found[i], {1.0}, ""); };
  EXPECT_EQ(form(0).find("update"), std::string::npos);
  EXPECT_NE(form(1).find("\"form\":\"with its update\""), std::string::npos) << form(1);
  EXPECT_NE(form(3).find("\"form\":\"fp8, with its update\""), std::string::npos) << form(3);
  EXPECT_THROW(shapes({"--update", "2"}), Error);
}

TEST(DecodeArguments, WithoutAnyOneStep) {
  const DecodeArguments words = parse_decode_arguments({});
  EXPECT_EQ(words.kernel, "sm90_attention");
  ASSERT_EQ(words.shapes.size(), 1U);
  EXPECT_EQ(words.shapes[0].keys, 4096);
  EXPECT_EQ(parse_decode_arguments({"--kernel", "other"}).kernel, "other");
}

// A prefix lies in one cache once.
TEST(DecodeArguments, SharedPrefixes) {
  const auto found = shapes({"--steps", "32x16640", "--page-size", "64", "--prefix", "16k"});
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].prefix, 16384);
  const CacheRotation rotation = cache_rotation_of(found[0]);
  EXPECT_EQ(rotation.shared, 256);
  EXPECT_EQ(rotation.pool, 256 + 32 * 4);
  EXPECT_EQ(rotation.bytes, (256 + 32 * 4) * 64 * 8 * 128 * 2);
  EXPECT_NE(decode_line("k", "d", found[0], {1.0}, "").find("\"prefix 16384\""), std::string::npos);
}

TEST(DecodeArguments, WhatIsNoWordIsRefused) {
  const std::vector<std::vector<std::string_view>> wrong = {
      {"--steps"},         {"--steps", ""},       {"--steps", "4k"},       {"--steps", "x4k"},       {"--steps", "1x"},
      {"--steps", "0x4k"}, {"--steps", "1x4k,"},  {"--steps", "1x4m"},     {"--rows", "17"},         {"--rows", "0"},
      {"--slices", "16"},  {"--slices", "0"},     {"--page-size", "-1"},   {"--batch", "1"},         {"sm90_attention"},
      {"--prefix", "64"},  {"--head-dim", "abc"}, {"--heads", "32", "4k"}, {"--page-size", "0,512"},
  };
  for (const auto& words : wrong) {
    try {
      parse_decode_arguments(words);
      ADD_FAILURE() << words.front() << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
    }
  }
}

TEST(DecodeArguments, CachesAreFarApartAndUsedEquallyOften) {
  for (const std::string_view step : {"1x1", "1x1k", "1x3000", "1x16k", "1x65537", "1x100000", "1x1m", "32x16k"}) {
    for (const std::string_view page : {"0", "16", "256"}) {
      const DecodeShape shape = shapes({"--steps", step, "--page-size", page}).front();
      const CacheRotation rotation = cache_rotation_of(shape);
      EXPECT_GE(rotation.pages * rotation.page, shape.keys);
      EXPECT_EQ(rotation.bytes, shape.batch * rotation.pages * rotation.page * 8 * 128 * 2);
      EXPECT_GE(rotation.caches * 2 * rotation.bytes, kFarBeyondCache);
      EXPECT_GE(rotation.launches, kMinLaunches);
      EXPECT_EQ(rotation.launches % rotation.caches, 0);
    }
  }
  const auto rotation = [](std::string_view step) { return cache_rotation_of(shapes({"--steps", step}).front()); };
  EXPECT_EQ(rotation("1x1k").caches, 128);
  EXPECT_EQ(rotation("1x1k").launches, 128);
  EXPECT_EQ(rotation("1x48k").caches, 3);
  EXPECT_EQ(rotation("1x48k").launches, 6);
  EXPECT_EQ(rotation("1x1m").caches, 1);
  EXPECT_EQ(rotation("1x1m").launches, 4);
}

// All of a line but what the build puts into it.
std::string line_of(const DecodeShape& shape, const std::vector<double>& times, std::string_view error) {
  const std::string line = decode_line("sm90_attention", "a GPU", shape, times, error);
  const std::string head = fmt::format(
      R"({{"schema":"ringattn.decode/1","tool":{{"name":"ringattn","version":"{}"}},"git":"{}{}","devices":["a GPU"],)",
      version(), git_revision(), git_dirty() ? "-dirty" : "");
  EXPECT_EQ(line.substr(0, head.size()), head);
  return line.substr(std::min(head.size(), line.size()));
}

TEST(DecodeLine, HasTheSchemaThatStepsReads) {
  DecodeShape shape = shapes({"--steps", "32x4k", "--page-size", "64"}).front();
  EXPECT_EQ(
      line_of(shape, {3.0, 1.0, 2.0}, ""),
      R"("kernel":"sm90_attention","job":{"batch":32,"keys":4096,"rows":1,"heads":32,"kv_heads":8,"head_dim":128,)"
      R"("head_dim_v":128,"dtype":"bf16","page_size":64},"form":"","caches":1,"launches":4,"samples":3,)"
      R"("us":{"median":2,"p10":1.2,"p90":2.8}})");
  shape.slices = 8;
  const std::string refused = line_of(shape, {}, "no \"form\"");
  const std::string end = R"("form":"slices 8","caches":1,"launches":4,"samples":0,"us":null,"error":"no \"form\""})";
  EXPECT_EQ(refused.substr(refused.find("\"form\"")), end);
}

}  // namespace
}  // namespace ringattn
