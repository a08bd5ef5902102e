// SPDX-License-Identifier: Apache-2.0
// Lists of key blocks in files: masks, the same as compressed rows, and what is refused.
#include "ops/attention_jobs/block_mask_tensors.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/philox.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = 4;
constexpr int kKvHeads = 2;

Job job_of(Batch batch) { return {make_spec(Dtype::kBf16, kHeads, kKvHeads, 16, {-1, 0}), std::move(batch)}; }

// 3, 1, no and 2 query blocks of 128; 3, 2, 1 and 5 key blocks.
Job ragged() { return job_of(std::vector<Sequence>{{300, 300, 0}, {5, 200, 195}, {0, 77, 77}, {130, 520, 126}}); }

class BlockMaskTensors : public ::testing::Test {
 protected:
  BlockMask read(const NamedTensors& tensors, const Job& job, const FileMetadata& metadata = {}) const {
    const std::string path = write_tensors(folder_.file("lists.safetensors"), tensors, metadata);
    return block_mask_from_file(SafetensorsFile(path), job, {});
  }
  Error refusal(const NamedTensors& tensors, const Job& job, const FileMetadata& metadata = {}) const {
    return error_of([&] { read(tensors, job, metadata); });
  }

  TemporaryFolder folder_;
};

// Half of all blocks, drawn.
BlockMask some_block_mask(const BlockMaskShape& shape, const Job& job) {
  return make_block_mask(
      shape, masked_sequences(job.batch), [](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
        for (std::int64_t block = 0; block < place.blocks; ++block) {
          const PhiloxWords words =
              philox4x32_10({{static_cast<std::uint32_t>(place.sequence), static_cast<std::uint32_t>(place.head),
                              static_cast<std::uint32_t>(place.block), static_cast<std::uint32_t>(block)}},
                            7);
          if (words.word[0] % 2 == 0) blocks.push_back(static_cast<std::int32_t>(block));
        }
      });
}

NamedTensor integers(const std::vector<std::int64_t>& values, bool wide) {
  return wide ? long_list(values) : int_list({values.begin(), values.end()});
}

NamedTensors rows_of(const BlockMask& block_mask, bool wide_begins, bool wide_blocks) {
  return {{"block_indptr", integers({block_mask.indptr().begin(), block_mask.indptr().end()}, wide_begins)},
          {"block_indices", integers({block_mask.indices().begin(), block_mask.indices().end()}, wide_blocks)}};
}

// A dense boolean mask. All sequences must have the same number of blocks.
NamedTensors mask_of(const BlockMask& block_mask) {
  const auto sequences = static_cast<std::int64_t>(block_mask.sequences().size());
  const TileRange rows = block_mask.query_blocks(0);
  const BlockMaskShape& shape = block_mask.shape();
  const std::int64_t keys = (block_mask.sequences()[0].keys + shape.key_block - 1) / shape.key_block;
  NamedTensor mask{FileDtype::kBool, {sequences, shape.heads, rows.end - rows.begin, keys}, {}};
  for (std::size_t s = 0; s < block_mask.sequences().size(); ++s) {
    for (int head = 0; head < shape.heads; ++head) {
      for (std::int64_t q = rows.begin; q < rows.end; ++q) {
        const std::size_t row = mask.bytes.size();
        mask.bytes.resize(row + static_cast<std::size_t>(keys));
        for (const std::int32_t block : block_mask.row(s, head, q)) {
          mask.bytes[row + static_cast<std::size_t>(block)] = std::byte{1};
        }
      }
    }
  }
  return {{"block_mask", mask}};
}

TEST_F(BlockMaskTensors, RowsSayWhatAMaskSays) {
  const Job job = job_of(uniform_batch(3, 400, 1000));
  for (const int heads : {1, kKvHeads, kHeads}) {
    const BlockMask expected = some_block_mask({128, 128, heads}, job);
    EXPECT_TRUE(read(mask_of(expected), job) == expected) << heads;
    for (const bool wide_begins : {false, true}) {
      for (const bool wide_blocks : {false, true}) {
        EXPECT_TRUE(read(rows_of(expected, wide_begins, wide_blocks), job) == expected) << heads;
      }
    }
  }
  const BlockMask other = some_block_mask({64, 256, kKvHeads}, job);
  const FileMetadata blocks{{"query_block", "64"}, {"key_block", "256"}};
  EXPECT_TRUE(read(rows_of(other, true, false), job, blocks) == other);
  EXPECT_TRUE(read(mask_of(other), job, blocks) == other);
}

TEST_F(BlockMaskTensors, RowsOfSequencesOfDifferentLengths) {
  for (const int heads : {1, kKvHeads, kHeads}) {
    const BlockMask expected = some_block_mask({128, 128, heads}, ragged());
    EXPECT_TRUE(read(rows_of(expected, true, true), ragged()) == expected) << heads;
  }
  const Error mask = refusal({{"block_mask", {FileDtype::kU8, {4, 1, 3, 5}, std::vector<std::byte>(60)}}}, ragged());
  EXPECT_EQ(mask.code(), ErrorCode::kFile);
  EXPECT_NE(std::string(mask.what()).find("need block_indptr and block_indices"), std::string::npos) << mask.what();
  const Job nothing = job_of(std::vector<Sequence>{{0, 77, 77}, {0, 0, 0}});
  EXPECT_EQ(read({{"block_indptr", int_list({0})}, {"block_indices", int_list({}, {0})}}, nothing).indices().size(),
            0U);
}

// More entries than a piece of a tensor has, which are read twice: to be counted, and to be kept.
TEST_F(BlockMaskTensors, RowsThatAreReadInPieces) {
  const Job job = job_of(uniform_batch(1, 64, 6'000'000));
  const BlockMaskShape shape{1, 16, 1};
  const BlockMask expected = make_block_mask(
      shape, masked_sequences(job.batch), [](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
        for (std::int64_t block = place.block % 3; block < place.blocks; block += 3) {
          blocks.push_back(static_cast<std::int32_t>(block));
        }
      });
  ASSERT_GT(expected.indices().size() * sizeof(std::int32_t), std::size_t{1} << 24);
  EXPECT_TRUE(read(rows_of(expected, true, true), job, {{"query_block", "1"}, {"key_block", "16"}}) == expected);
}

struct BadRows {
  const char* what;
  std::vector<std::int64_t> begins, blocks;
  const char* message;
};

TEST_F(BlockMaskTensors, RowsThatAreWrong) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  const Job job = job_of(uniform_batch(1, 300, 300));  // 3 query blocks, 3 key blocks
  const BadRows cases[] = {
      {"a late beginning",
       {1, 2, 3, 4},
       {0, 1, 2, 0},
       "entry 0 of `block_indptr` of lists.safetensors is 1 (the first"},
      {"negative", {-1, 1, 2, 3}, {0, 1, 2}, "entry 0 of `block_indptr` of lists.safetensors is -1 ("},
      {"an early end", {0, 1, 2, 3}, {0, 1, 2, 0}, "entry 3 of `block_indptr` of lists.safetensors is 3 ("},
      {"a late end", {0, 1, 2, 4}, {0, 1, 2}, "block_indices, which has 3 entries"},
      {"an end of 2^63 - 1", {0, 1, 2, kMost}, {0, 1, 2}, "entry 3 of `block_indptr` of lists.safetensors is 92233720"},
      {"an end of -2^63", {0, 1, 2, kLeast}, {0, 1, 2}, "entry 3 of `block_indptr` of lists.safetensors is -92233720"},
      {"descending", {0, 2, 1, 3}, {0, 1, 2}, "entry 2 of `block_indptr` of lists.safetensors is 1 (entry 1 is 2, and"},
      {"beyond the entries", {0, 7, 2, 3}, {0, 1, 2}, "entry 1 of `block_indptr` of lists.safetensors is 7 ("},
      {"2^63 - 1", {0, kMost, 2, 3}, {0, 1, 2}, "entry 1 of `block_indptr` of lists.safetensors is 92233720"},
      {"-2^63", {0, kLeast, 2, 3}, {0, 1, 2}, "entry 1 of `block_indptr` of lists.safetensors is -92233720"},
      {"a block too many",
       {0, 1, 2, 3},
       {0, 1, 3},
       "entry 2 of `block_indices` of lists.safetensors is 3 (in the mask row "
       "of sequence 0, head 0, query block 2: 300 keys are 3 blocks of 128)"},
      {"a negative block", {0, 1, 2, 3}, {0, -1, 2}, "entry 1 of `block_indices` of lists.safetensors is -1 ("},
      {"a block of 2^63 - 1", {0, 1, 2, 3}, {0, kMost, 2}, "entry 1 of `block_indices` of lists.safetensors is 9223"},
      {"a block of 2^32", {0, 1, 2, 3}, {0, std::int64_t{1} << 32, 2}, "entry 1 of `block_indices` of lists"},
      {"a block twice",
       {0, 2, 3, 3},
       {1, 1, 2},
       "entry 1 of `block_indices` of lists.safetensors is 1 (in the mask row of "
       "sequence 0, head 0, query block 0: it comes after 1)"},
      {"descending blocks", {0, 0, 0, 3}, {0, 2, 1}, "query block 2: it comes after 2)"},
      {"too few lists",
       {0, 1, 2},
       {0, 1},
       "3 blocks of 128 queries have 3 mask rows for all heads, 6 for the K/V heads or "
       "12 for the query heads"},
      {"too many lists", {0, 1, 2, 2, 2}, {0, 1}, "`block_indptr` of lists.safetensors has I64 [5]"},
      {"no entry", {}, {0, 1}, "`block_indptr` of lists.safetensors has I64 [0]"}};
  for (const BadRows& bad : cases) {
    const Error error =
        refusal({{"block_indptr", long_list(bad.begins)}, {"block_indices", long_list(bad.blocks)}}, job);
    EXPECT_EQ(error.code(), ErrorCode::kFile) << bad.what;
    std::string text = error.what();
    for (std::size_t at; (at = text.find(folder_.file(""))) != std::string::npos;) {
      text.erase(at, folder_.file("").size());
    }
    EXPECT_NE(text.find(bad.message), std::string::npos) << bad.what << ": " << text;
  }
}

TEST_F(BlockMaskTensors, TensorsThatAreWrong) {
  const Job job = job_of(uniform_batch(1, 300, 300));
  const NamedTensor begins = int_list({0, 1, 2, 3});
  const NamedTensor blocks = int_list({0, 1, 2});
  const auto retyped = [](NamedTensor tensor, FileDtype dtype) {
    tensor.dtype = dtype;
    return tensor;
  };
  const auto reshaped = [](NamedTensor tensor, std::vector<std::int64_t> shape) {
    tensor.shape = std::move(shape);
    return tensor;
  };
  const NamedTensor mask{FileDtype::kU8, {1, 3, 3}, std::vector<std::byte>(9)};
  const std::pair<NamedTensors, const char*> cases[] = {
      {{{"block_indptr", retyped(begins, FileDtype::kF32)}, {"block_indices", blocks}},
       "it is I32 or I64, of one axis"},
      {{{"block_indptr", retyped(begins, FileDtype::kU32)}, {"block_indices", blocks}},
       "it is I32 or I64, of one axis"},
      {{{"block_indptr", begins}, {"block_indices", retyped(blocks, FileDtype::kU32)}},
       "it is I32 or I64, of one axis"},
      {{{"block_indptr", reshaped(begins, {1, 4})}, {"block_indices", blocks}}, "has I32 [1, 4]"},
      {{{"block_indptr", begins}, {"block_indices", reshaped(blocks, {3, 1})}}, "has I32 [3, 1]"},
      {{{"block_indptr", begins}}, "it belongs to block_indices, which the file lacks"},
      {{{"block_indices", blocks}}, "it belongs to block_indptr, which the file lacks"},
      {{{"block_indptr", begins}, {"block_indices", blocks}, {"block_mask", mask}}, "the file has block_indptr, too"},
      {{{"block_mask", mask}, {"block_indices", blocks}}, "the file has block_indices, too"},
      {{{"mask", mask}}, "it has neither block_mask nor block_indptr and block_indices"}};
  for (const auto& [tensors, message] : cases) {
    const Error error = refusal(tensors, job);
    EXPECT_EQ(error.code(), ErrorCode::kFile) << message;
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
  EXPECT_EQ(refusal({{"block_indptr", begins}, {"block_indices", blocks}}, job, {{"key_block", "0"}}).code(),
            ErrorCode::kFile);
  write_tensors(folder_.file("lists.safetensors"), {{"block_indptr", begins}, {"block_indices", blocks}});
  const SafetensorsFile file(folder_.file("lists.safetensors"));
  EXPECT_EQ(error_of([&] { block_mask_from_file(file, job, {30, "there is no more"}); }).code(), ErrorCode::kMemory);
}

}  // namespace
}  // namespace ringattn::testing
