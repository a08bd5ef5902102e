// SPDX-License-Identifier: Apache-2.0
// Lists of key blocks in files: the same bits from a mask, from compressed rows and from a pattern that says the same.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/block_mask_patterns.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

NamedTensors rows_of(const BlockMask& lists) {
  const std::vector<std::int64_t> begins(lists.indptr().begin(), lists.indptr().end());
  return {{"block_indptr", long_list(begins)},
          {"block_indices", int_list({lists.indices().begin(), lists.indices().end()})}};
}

// A dense boolean mask. All sequences must have the same number of blocks.
NamedTensors mask_of(const BlockMask& lists) {
  const auto sequences = static_cast<std::int64_t>(lists.sequences().size());
  const TileRange rows = lists.query_blocks(0);
  const std::int64_t keys = (lists.sequences()[0].keys + lists.shape().key_block - 1) / lists.shape().key_block;
  NamedTensor mask{FileDtype::kU8, {sequences, lists.shape().heads, rows.end - rows.begin, keys}, {}};
  mask.bytes.resize(static_cast<std::size_t>((lists.indptr().size() - 1)) * static_cast<std::size_t>(keys));
  for (std::size_t n = 0; n + 1 < lists.indptr().size(); ++n) {
    for (std::int64_t i = lists.indptr()[n]; i < lists.indptr()[n + 1]; ++i) {
      const auto block = static_cast<std::size_t>(lists.indices()[static_cast<std::size_t>(i)]);
      mask.bytes[n * static_cast<std::size_t>(keys) + block] = std::byte{1};
    }
  }
  return {{"block_mask", mask}};
}

// window:300+vertical:0,700+slash:0,513 of all sequences, one mask a K/V head, and in the second one's a block more.
BlockMask lists_of(const std::vector<MaskedSequence>& sequences) {
  const BlockMaskShape shape{128, 128, 2};
  const BlockMaskPattern pattern = union_of_patterns(
      {window_blocks(shape, 300), vertical_slash_blocks(shape, {{{0, 700}, {0, 513}}, {{0, 700}, {0, 513}}})});
  return make_block_mask(shape, sequences, [&](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
    pattern(place, blocks);
    if (place.head == 1) blocks.push_back(static_cast<std::int32_t>(place.blocks / 2));
  });
}

std::string digest(const Words& words) {
  const Finished run = tool(words);
  EXPECT_EQ(run.code, 0) << run.out << run.err;
  return digest_of(run.out);
}

void expect_passes(const Words& words) {
  const Finished run = tool(words);
  EXPECT_EQ(run.code, 0) << run.out << run.err;
}

TEST(BlockMaskFiles, RowsHaveTheBitsOfAMask) {
  const TemporaryFolder folder;
  const BlockMask lists = lists_of({{0, 1500, 1500}, {0, 1500, 1500}});
  const std::string mask = write_tensors(folder.file("mask.safetensors"), mask_of(lists));
  const std::string rows = write_tensors(folder.file("rows.safetensors"), rows_of(lists));
  const Words job{"--synthetic", "7", "--seq",      "1500", "--batch",    "2",
                  "--heads",     "4", "--kv-heads", "2",    "--head-dim", "16"};
  const std::string expected = digest(Words{"run", "--block-mask", mask} + job);
  EXPECT_NE(expected, digest(Words{"run"} + job));
  for (const char* ranks : {"1", "2", "3"}) {
    EXPECT_EQ(digest(Words{"run", "--ranks", ranks, "--block-mask", rows} + job), expected) << ranks;
  }
  expect_passes(Words{"verify", "--ranks", "3", "--block-mask", rows} + job);
  expect_passes(Words{"verify", "--against", "oracle", "--block-mask", rows} + job);
  expect_passes(Words{"verify", "--decode", "--rows", "40", "--block-mask", rows} + job);
  const auto planned = [&](const std::string& file) {
    const Finished plan = tool({"plan", "--world", "2", "--seq", "1500", "--batch", "2", "--heads", "4", "--kv-heads",
                                "2", "--head-dim", "16", "--block-mask", file});
    EXPECT_EQ(plan.code, 0) << plan.err;
    EXPECT_TRUE(has(plan.out, "block mask of 128x128 blocks, one per KV head")) << plan.out;
    return plan.out;
  };
  EXPECT_EQ(planned(rows), planned(mask));
}

// Steps with masks of their last blocks; a mask of these says the same.
TEST(BlockMaskFiles, StepsByRows) {
  const TemporaryFolder folder;
  const BlockMask lists = lists_of({{1498, 2, 1500}, {1498, 2, 1500}, {1498, 2, 1500}});
  const std::string mask = write_tensors(folder.file("mask.safetensors"), mask_of(lists));
  const std::string rows = write_tensors(folder.file("rows.safetensors"), rows_of(lists));
  const Words job{"--synthetic", "7",       "--seq", "1500",       "--batch", "3",          "--q-len",
                  "2",           "--heads", "4",     "--kv-heads", "2",       "--head-dim", "16"};
  const std::string expected = digest(Words{"run", "--block-mask", mask} + job);
  const Words step = Words{"--op", "decode", "--page-size", "64", "--block-mask", rows} + job;
  for (const char* ranks : {"1", "2", "4"}) {
    const Finished run = tool(Words{"run", "--ranks", ranks} + step);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(has(run.out, "# job: decode")) << run.out;
    EXPECT_EQ(digest_of(run.out), expected) << ranks;
  }
  expect_passes(Words{"verify", "--ranks", "3"} + step);
  expect_passes(
      Words{"plan", "--world", "2"} + Words(step.begin(), step.begin() + 6) +
      Words{"--seq", "1500", "--batch", "3", "--q-len", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"});
}

// Sequences of different lengths have no mask. The lists stand beside the tensors that they belong to.
TEST(BlockMaskFiles, RowsOfSequencesOfDifferentLengths) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.lengths = {1400, 3, 513, 130};
  shape.q_lens = {1400, 3, 200, 1};
  std::vector<MaskedSequence> sequences;
  for (std::size_t s = 0; s < shape.lengths.size(); ++s) {
    sequences.push_back({shape.lengths[s] - shape.q_lens[s], shape.q_lens[s], shape.lengths[s]});
  }
  const auto pattern = [&](const BlockMaskShape& lists) {
    return make_block_mask(
        lists, sequences,
        union_of_patterns({window_blocks(lists, 100), vertical_slash_blocks(lists, {{{0, 700}, {513}}})}));
  };
  const auto beside = [](NamedTensors tensors, const BlockMask& lists) {
    tensors.merge(rows_of(lists));
    return tensors;
  };
  const BlockMask lists = pattern({128, 128, 1});
  const std::string file = write_tensors(folder.file("rows.safetensors"), beside(row_tensors(shape), lists));
  const std::string expected = digest({"run", "--input", file, "--block-mask", "window:100+vertical:0,700+slash:513"});
  EXPECT_NE(expected, digest({"run", "--input", file}));
  for (const char* ranks : {"1", "3"}) {
    EXPECT_EQ(digest({"run", "--input", file, "--block-mask", file, "--ranks", ranks}), expected) << ranks;
  }
  expect_passes({"verify", "--input", file, "--block-mask", file, "--ranks", "3"});
  expect_passes({"verify", "--input", file, "--block-mask", file, "--against", "oracle"});
  expect_passes({"plan", "--input", file, "--block-mask", file, "--world", "2"});
  expect_passes({"bench", "--input", file, "--block-mask", file, "--samples", "2"});

  shape.q_lens = {1, 1, 1, 1};
  sequences.clear();
  for (const std::int64_t length : shape.lengths) sequences.push_back({length - 1, 1, length});
  const BlockMask last = pattern({128, 128, 1});
  const std::string rows = write_tensors(folder.file("last.safetensors"), beside(row_tensors(shape), last));
  const std::string cache = write_tensors(folder.file("cache.safetensors"), beside(cache_tensors(shape), last));
  const std::string prefill = digest({"run", "--input", rows, "--block-mask", rows});
  for (const char* ranks : {"1", "2", "5"}) {
    const Finished step = tool({"run", "--input", cache, "--block-mask", cache, "--ranks", ranks});
    EXPECT_EQ(step.code, 0) << step.err;
    EXPECT_TRUE(has(step.out, "# job: decode")) << step.out;
    EXPECT_EQ(digest_of(step.out), prefill) << ranks;
  }
  expect_passes({"verify", "--input", cache, "--block-mask", cache, "--ranks", "2"});
  expect_passes({"plan", "--input", cache, "--block-mask", cache});
}

TEST(BlockMaskFiles, WordsOfColumnsAndDiagonals) {
  const Words job = Words{"--block-mask", "vertical:0,200+slash:0,130"} + small_job();
  expect_passes(Words{"verify", "--ranks", "3"} + job);
  expect_passes(Words{"verify", "--against", "oracle"} + job);
  expect_passes(Words{"verify", "--decode", "--rows", "40"} + job);
  const Words step{"--op", "decode", "--page-size", "16"};
  EXPECT_EQ(digest(Words{"run", "--q-len", "1", "--ranks", "2"} + step + job),
            digest(Words{"run", "--q-len", "1"} + job));
  // Every key of a window stands on a diagonal.
  EXPECT_EQ(digest(Words{"run", "--block-mask", "slash:0,128"} + small_job()),
            digest(Words{"run", "--block-mask", "window:128"} + small_job()));
  const Finished plan = tool({"plan", "--seq", "64k", "--world", "4", "--block-mask", "vertical:0,9k+slash:0,128,4k"});
  EXPECT_EQ(plan.code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out, "% of the pairs")) << plan.out;
  const Finished unknown = tool(Words{"run", "--block-mask", "slahs:5"} + small_job());
  EXPECT_EQ(unknown.code, 2);
  EXPECT_TRUE(has(unknown.err, "did you mean slash?")) << unknown.err;
}

}  // namespace
}  // namespace ringattn::testing
