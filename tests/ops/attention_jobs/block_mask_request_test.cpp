// SPDX-License-Identifier: Apache-2.0
// Lists of key tiles as users ask for them: patterns in words, masks in files, top-k of scores, and what they keep.
#include "ops/attention_jobs/block_mask_request.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/kept_mass.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Job small_job(std::int64_t tokens = 1000) {
  return {make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0}), uniform_batch(1, tokens, tokens)};
}

const TopKBlocks kNoRows = [](const AttentionSpec&, int) -> BlockMask {
  throw std::logic_error("nobody asked for the best blocks");
};

std::shared_ptr<const BlockMask> asked(const std::string& request) {
  JobShare share;
  return requested_block_mask({request}, small_job(), kNoRows, share).block_mask;
}

TEST(BlockMaskRequest, Patterns) {
  const auto made = [](const BlockMaskShape& shape, const BlockMaskPattern& make) {
    return make_block_mask(shape, masked_sequences(small_job().batch), make);
  };
  const BlockMaskShape usual{128, 128, 1};
  EXPECT_TRUE(*asked("all") == made(usual, all_blocks()));
  EXPECT_TRUE(*asked("window:200") == made(usual, window_blocks(usual, 200)));
  EXPECT_TRUE(*asked("window:1k+global:64") ==
              made(usual, union_of_patterns({window_blocks(usual, 1024), global_blocks(usual, 64)})));
  EXPECT_TRUE(*asked("vertical:0,130,1k+slash:0,200") ==
              made(usual, vertical_slash_blocks(usual, {{{0, 130, 1024}, {0, 200}}})));
  EXPECT_TRUE(*asked("slash:500+heads:kv") ==
              made({128, 128, 2}, vertical_slash_blocks({128, 128, 2}, {{{}, {500}}, {{}, {500}}})));
  EXPECT_TRUE(*asked("strided:300") == made(usual, strided_blocks(usual, 300)));
  EXPECT_TRUE(*asked("random:3,9") == made(usual, random_blocks(usual, {-1, 0}, 3, 9)));
  EXPECT_TRUE(*asked("random:3") == made(usual, random_blocks(usual, {-1, 0}, 3, 0)));
  EXPECT_TRUE(*asked("bigbird:64,32,2,5") ==
              made(usual, union_of_patterns({window_blocks(usual, 64), global_blocks(usual, 32),
                                             random_blocks(usual, {-1, 0}, 2, 5)})));
  const BlockMaskShape wide{64, 256, 4};
  EXPECT_TRUE(*asked("heads:each+window:10+block:64,256") == made(wide, window_blocks(wide, 10)));
  EXPECT_EQ(asked("all+heads:kv")->shape().heads, 2);
  EXPECT_EQ(asked("block:256+all")->shape(), (BlockMaskShape{256, 256, 1}));
}

TEST(BlockMaskRequest, WordsThatMakeNoPatternAreRefused) {
  for (const std::string request : {"",
                                    "windw:5",
                                    "window",
                                    "window:",
                                    "window:1,2",
                                    "window:-3",
                                    "window:x",
                                    "global:1+",
                                    "block:128",
                                    "block:0+all",
                                    "block:1,2,3+all",
                                    "block:64+block:64+all",
                                    "heads:some+all",
                                    "heads:kv+heads:kv+all",
                                    "strided:0",
                                    "vertical",
                                    "vertical:",
                                    "vertical:-1",
                                    "vertical:1,,2",
                                    "slash:x",
                                    "slash:3,2g",
                                    "random:1,x",
                                    "bigbird:1,2",
                                    "topk:0",
                                    "topk:1+topk:2",
                                    "all:1",
                                    "window:99999999g"}) {
    const Error error = error_of([&] { asked(request); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << request;
  }
  EXPECT_NE(std::string(error_of([] { asked("windw:5"); }).what()).find("did you mean window?"), std::string::npos);
}

// One tensor of bytes as a safetensors file.
std::string file_of(const std::string& shape, const std::string& entries, const std::string& metadata,
                    const std::string& dtype = "U8") {
  std::string header = "{" + metadata + "\"block_mask\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
                       ",\"data_offsets\":[0," + std::to_string(entries.size()) + "]}}";
  while (header.size() % 8 != 0) header += ' ';
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i) & 255U);
  return file + header + entries;
}

TEST(BlockMaskRequest, Files) {
  const TemporaryFolder folder;
  const std::string path = folder.file("mask.safetensors");
  const std::string blocks = R"("__metadata__":{"query_block":"512","key_block":"256"},)";
  const std::string entries{1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1};
  const auto write = [&](const std::string& bytes) { folder.write("mask.safetensors", bytes); };
  write(file_of("[2,2,4]", entries, blocks));
  const auto block_mask = asked(path);
  EXPECT_EQ(block_mask->shape(), (BlockMaskShape{512, 256, 2}));
  const auto list = [&](int head, std::int64_t block) {
    const auto found = block_mask->row(0, head, block);
    return std::vector<std::int32_t>(found.begin(), found.end());
  };
  EXPECT_EQ(list(0, 0), (std::vector<std::int32_t>{0}));
  EXPECT_EQ(list(0, 1), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(list(1, 0), (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(list(1, 1), (std::vector<std::int32_t>{3}));
  write(file_of("[1,2,2,4]", entries, blocks, "BOOL"));
  EXPECT_TRUE(*asked(path) == *block_mask);
  for (const std::string& bad :
       {file_of("[2,2,4]", entries, ""), file_of("[4,4]", entries, blocks), file_of("[2,2,4]", entries, blocks, "I8"),
        file_of("[1,4,4]", entries, blocks), file_of("[2,1,2,4]", entries, blocks), std::string("no file"),
        file_of("[2,2,4]", entries, R"("__metadata__":{"query_block":"-1"},)")}) {
    write(bad);
    EXPECT_EQ(error_of([&] { asked(path); }).code(), ErrorCode::kFile) << bad.substr(8, 90);
  }
  EXPECT_EQ(error_of([&] { asked(folder.file("none.safetensors")); }).code(), ErrorCode::kFile);
}

// Where memory is too small, the mask is refused before rows are read or a mask is built.
TEST(BlockMaskRequest, BlockMasksThatDontFitAreRefusedFirst) {
  JobShare share;
  for (const std::string request : {"topk:3", "all", "window:100+heads:each"}) {
    const Error error = error_of([&] {
      requested_block_mask({request, nullptr, "", 100}, small_job(), kNoRows, share);
    });
    EXPECT_EQ(error.code(), ErrorCode::kMemory) << request;
    EXPECT_NE(std::string(error.what()).find("takes more than 100 bytes (a rank's memory budget is no larger)"),
              std::string::npos)
        << error.what();
  }
  EXPECT_EQ(
      error_of([&] { requested_block_mask({"topk:60000"}, small_job(std::int64_t{1} << 24), kNoRows, share); }).code(),
      ErrorCode::kMemory);
}

// The ranks of a process have them once, and a mask that was replaced is read anew.
TEST(BlockMaskRequest, AreSharedByThoseWhoAskForTheSame) {
  const Job job = small_job();
  JobShare share;
  const RequestedBlockMask first = requested_block_mask({"window:200"}, job, kNoRows, share);
  EXPECT_EQ(requested_block_mask({"window:200"}, job, kNoRows, share).block_mask, first.block_mask);
  EXPECT_NE(requested_block_mask({"window:200"}, small_job(999), kNoRows, share).block_mask, first.block_mask);
  EXPECT_NE(requested_block_mask({"window:200", nullptr, "7"}, job, kNoRows, share).block_mask, first.block_mask);
  const TemporaryFolder folder;
  const std::string blocks = R"("__metadata__":{"query_block":"512","key_block":"256"},)";
  folder.write("mask.safetensors", file_of("[1,2,4]", std::string(8, '\1'), blocks));
  const RequestedBlockMask mask = requested_block_mask({folder.file("mask.safetensors")}, job, kNoRows, share);
  ASSERT_NE(mask.file, nullptr);
  EXPECT_EQ(requested_block_mask({folder.file("mask.safetensors")}, job, kNoRows, share).block_mask, mask.block_mask);
  folder.write("other.safetensors", file_of("[1,2,4]", std::string(8, '\0'), blocks));
  std::filesystem::rename(folder.file("other.safetensors"), folder.file("mask.safetensors"));
  EXPECT_TRUE(
      requested_block_mask({folder.file("mask.safetensors")}, job, kNoRows, share).block_mask->indices().empty());
}

JobInput synthetic(const std::string& block_mask, std::int64_t tokens = 1500) {
  SyntheticInput shape;
  shape.seed = 7;
  shape.tokens = tokens;
  shape.batch = 2;
  shape.heads = 4;
  shape.kv_heads = 2;
  Numerics numerics;
  numerics.block_mask = block_mask;
  return {shape, numerics};
}

TEST(BlockMaskRequest, BestBlocksOfAJobAreTheSameEachTime) {
  const JobInput input = synthetic("topk:3");
  ASSERT_NE(input.job().block_mask, nullptr);
  EXPECT_EQ(input.job().spec.block_mask, (BlockMaskShape{128, 128, 2}));
  EXPECT_TRUE(*input.job().block_mask == *synthetic("topk:3").job().block_mask);
  EXPECT_FALSE(*input.job().block_mask == *synthetic("topk:4").job().block_mask);
  EXPECT_LT(visible_pairs(input.job()), 0.6 * visible_pairs(synthetic("").job()));
}

// A place on a device is where the kernel computes that was asked for: here the host.
TEST(BlockMaskRequest, BestBlocksOfAKernelOfTheHost) {
  const JobInput input = synthetic("");
  AttentionSpec spec = input.job().spec;
  spec.block_mask = {128, 128, 2};
  const BlockMask block_mask = top_k_blocks(input, spec, 3, {});
  EXPECT_TRUE(top_k_blocks(input, spec, 3, {{"cpu", "auto"}, 0}) == block_mask);
  EXPECT_TRUE(*synthetic("topk:3").job().block_mask == block_mask);
  spec.block_mask.key_block = 1;
  EXPECT_EQ(error_of([&] { top_k_blocks(input, spec, 3, {{"cpu", "auto"}, 0}); }).code(), ErrorCode::kUnsupported);
  spec.block_mask.heads = 3;
  EXPECT_EQ(error_of([&] { top_k_blocks(input, spec, 3, {}); }).code(), ErrorCode::kUsage);
}

TEST(KeptMass, OfEverythingAndOfLess) {
  const auto world = make_self_transport();
  const Collective collective(*world, Timeouts(10.0));
  const auto share = [&](const std::string& block_mask) {
    return kept_mass(collective, synthetic(block_mask, 400), 40, 1);
  };
  const KeptMass all = share("all");
  EXPECT_EQ(all.rows, 40);
  EXPECT_NEAR(all.minimum, 1.0, 1e-12);
  EXPECT_NEAR(all.mean, 1.0, 1e-12);
  const KeptMass some = share("topk:2");
  EXPECT_GT(some.minimum, 0.0);
  EXPECT_LT(some.minimum, some.mean);
  EXPECT_LT(some.mean, 0.98);
  const KeptMass more = share("topk:3");
  EXPECT_GT(more.mean, some.mean);
}

}  // namespace
}  // namespace ringattn::testing
