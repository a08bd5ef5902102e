// SPDX-License-Identifier: Apache-2.0
// Files that have lost tokens: what is written whatever the order of axes, where queries stand in them, and what is
// refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention/job/compress_job.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kTokens = 60, kBatch = 2, kKept = 24;
constexpr int kHeads = 4, kKvHeads = 2, kDim = 16;

// q, k and v of two sequences in this order of axes, the same numbers in every order.
NamedTensors ordered_tensors(AxisOrder order) {
  NamedTensors tensors;
  const auto add = [&](const char* name, SyntheticTensor tensor, int heads) {
    const RowGrid grid{order, kBatch, kTokens, heads, kDim};
    const PackedRun all{0, grid.tokens()};
    std::vector<std::byte> rows(static_cast<std::size_t>(grid.tokens() * heads * kDim) * 2);
    const MutableTensorView view =
        dense_view(static_cast<void*>(rows.data()), Dtype::kBf16, grid.tokens(), heads, kDim);
    fill_synthetic(7, tensor, {&all, 1}, view, 1);
    NamedTensor& into = tensors[name] = {FileDtype::kBf16, grid.shape(), std::vector<std::byte>(rows.size())};
    for_each_segment(grid, {&all, 1}, 2, std::int64_t{1} << 30, [&](const RowSegment& segment) {
      gather_rows(
          view, segment.row, segment.head, segment.heads,
          {into.bytes.data() + segment.offset, static_cast<std::size_t>(segment.tokens * segment.heads * kDim) * 2});
    });
  };
  add("q", SyntheticTensor::kQ, kHeads);
  add("k", SyntheticTensor::kK, kKvHeads);
  add("v", SyntheticTensor::kV, kKvHeads);
  return tensors;
}

CompressResult evict_file(const FileInput& input, const std::string& output, const std::string& method, double ratio) {
  CompressJob job;
  job.input = input;
  job.output = output;
  job.replace = true;
  job.method = parse_cache_method(method);
  job.ratio = ratio;
  job.threads = 2;
  return compress_file(job);
}

std::vector<std::byte> rows_of(const JobInput& input, SyntheticTensor tensor, int heads) {
  const std::int64_t tokens =
      tensor == SyntheticTensor::kQ ? input.job().batch.q_tokens() : input.job().batch.k_tokens();
  std::vector<std::byte> rows(static_cast<std::size_t>(tokens * heads * kDim) * 2);
  const PackedRun all{0, tokens};
  input.read(tensor, {&all, 1}, dense_view(static_cast<void*>(rows.data()), Dtype::kBf16, tokens, heads, kDim), 1);
  return rows;
}

TEST(EvictedFiles, AreTheSameInAnyOrderOfAxes) {
  const TemporaryFolder folder;
  for (const char* const method : {"snapkv:window=8", "expected:window=9,heads=all", "knorm:last=3+int8"}) {
    std::vector<std::byte> k, v;
    std::shared_ptr<const KeyPositions> positions;
    for (const AxisOrder order : {AxisOrder::kBthd, AxisOrder::kBhtd}) {
      const FileInput whole{write_tensors(folder.file("whole"), ordered_tensors(order)), {}, order};
      const CompressResult result = evict_file(whole, folder.file("kept"), method, 0.6);
      EXPECT_EQ(result.tokens, kBatch * kTokens);
      EXPECT_EQ(result.kept, kBatch * kKept);
      EXPECT_EQ(result.bytes_before(), kBatch * kTokens * kKvHeads * kDim * 2 * 2);
      const JobInput kept(FileInput{folder.file("kept"), {}, order}, {});
      EXPECT_EQ(kept.job().batch.sequences, SequenceList(kBatch, {kTokens, kKept, 0}));
      ASSERT_NE(kept.job().positions, nullptr);
      EXPECT_EQ(rows_of(kept, SyntheticTensor::kQ, kHeads), rows_of(JobInput(whole, {}), SyntheticTensor::kQ, kHeads));
      if (k.empty()) {
        k = rows_of(kept, SyntheticTensor::kK, kKvHeads);
        v = rows_of(kept, SyntheticTensor::kV, kKvHeads);
        positions = kept.job().positions;
        const std::vector<std::byte> all = rows_of(JobInput(whole, {}), SyntheticTensor::kK, kKvHeads);
        for (std::int64_t row = 0; row < kBatch * kKept && std::string(method).find('+') == std::string::npos; ++row) {
          for (int head = 0; head < kKvHeads; ++head) {
            const auto sequence = static_cast<std::size_t>(row / kKept);
            const auto own = positions->of(sequence, positions->heads() == 1 ? 0 : head);
            const std::int64_t token = row / kKept * kTokens + own[static_cast<std::size_t>(row % kKept)];
            EXPECT_TRUE(std::equal(k.begin() + (row * kKvHeads + head) * kDim * 2,
                                   k.begin() + (row * kKvHeads + head + 1) * kDim * 2,
                                   all.begin() + (token * kKvHeads + head) * kDim * 2));
          }
        }
        continue;
      }
      EXPECT_EQ(rows_of(kept, SyntheticTensor::kK, kKvHeads), k) << method;
      EXPECT_EQ(rows_of(kept, SyntheticTensor::kV, kKvHeads), v) << method;
      EXPECT_TRUE(*kept.job().positions == *positions) << method;
    }
  }
}

CacheShape packed_shape() {
  CacheShape shape;
  shape.lengths = {40, 9, 65};
  shape.q_lens = {40, 2, 1};
  return shape;
}

// Without offsets queries are aligned to the end of what the sequences were, else they stand where the file says.
TEST(EvictedFiles, QueriesStandWhereTheyStood) {
  const TemporaryFolder folder;
  NamedTensors tensors = row_tensors(packed_shape());
  const auto sequences = [&](const Numerics& numerics) {
    evict_file({write_tensors(folder.file("whole"), tensors)}, folder.file("kept"), "knorm", 0.5);
    const JobInput kept(FileInput{folder.file("kept")}, numerics);
    EXPECT_NE(kept.job().positions, nullptr);
    return kept.job().batch.sequences;
  };
  EXPECT_EQ(sequences({}), (SequenceList{{40, 20, 0}, {2, 4, 7}, {1, 32, 64}}));
  Numerics offset;
  offset.query_offset = 3;
  EXPECT_EQ(sequences(offset), (SequenceList{{40, 20, 3}, {2, 4, 3}, {1, 32, 3}}));
  tensors["q_offset"] = long_list({5, 6, 30});
  EXPECT_EQ(sequences({}), (SequenceList{{40, 20, 5}, {2, 4, 6}, {1, 32, 30}}));
  // Behind everything that was taken out they are moved; of the second one the first tokens alone are left.
  Numerics full;
  full.mask = {-1, -1};
  const JobInput moved(FileInput{folder.file("kept")}, full);
  EXPECT_EQ(moved.job().positions, nullptr);
  tensors["q_offset"] = long_list({40, 9, 65});
  evict_file({write_tensors(folder.file("whole"), tensors)}, folder.file("kept"), "streaming", 0.5);
  const JobInput behind(FileInput{folder.file("kept")}, {});
  EXPECT_EQ(behind.job().positions, nullptr);
  EXPECT_EQ(behind.job().batch.sequences, (SequenceList{{40, 20, 20}, {2, 4, 9}, {1, 32, 32}}));
}

TEST(EvictedFiles, BadTensorsAreRefused) {
  const TemporaryFolder folder;
  CacheShape shape = packed_shape();
  shape.lengths = {4, 1, 3};
  shape.q_lens = {1, 1, 1};
  NamedTensors good = row_tensors(shape);
  good["k_positions"] = int_list({0, 3, 5, 8, 0, 0, 2, 6}, {8, 1});
  good["k_lengths"] = int_list({9, 1, 7});
  const auto open = [&](const NamedTensors& tensors) {
    return JobInput(FileInput{write_tensors(folder.file("bad"), tensors)}, {});
  };
  EXPECT_EQ(open(good).job().batch.k_tokens(), 8);
  const auto with = [&](const char* name, const NamedTensor& tensor) {
    NamedTensors tensors = good;
    tensors[name] = tensor;
    return tensors;
  };
  EXPECT_FILE_ERROR(open(with("k_positions", int_list({0, 3, 5, 8, 0, 0, 2, 6}))), "it is I32 [8, 1 or 2]");
  EXPECT_FILE_ERROR(open(with("k_positions", int_list({0, 3, 5, 8, 0, 0, 2}, {7, 1}))), "it is I32 [8, 1 or 2]");
  EXPECT_FILE_ERROR(open(with("k_positions", long_list({0, 3, 5, 8, 0, 0, 2, 6}))), "it is I32 [8, 1 or 2]");
  EXPECT_FILE_ERROR(open(with("k_positions", int_list({0, 3, 3, 8, 0, 0, 2, 6}, {8, 1}))), "[2, 0] is 3");
  EXPECT_FILE_ERROR(open(with("k_positions", int_list({0, 3, 5, 8, 1, 0, 2, 6}, {8, 1}))), "[4, 0] is 1");
  EXPECT_FILE_ERROR(open(with("k_lengths", int_list({9, 1}))), "the job has 3 sequences");
  EXPECT_FILE_ERROR(open(with("k_lengths", int_list({9, 0, 7}))), "sequence 1 had 0 tokens");
  EXPECT_FILE_ERROR(open(with("k_lengths", long_list({9, 1, std::int64_t{1} << 31}))), "sequence 2 had 2147483648");
  NamedTensors alone = good;
  alone.erase("k_lengths");
  EXPECT_FILE_ERROR(open(alone), "k_lengths");
  NamedTensors unplaced = good;
  unplaced.erase("k_positions");
  EXPECT_FILE_ERROR(open(unplaced), "it belongs to k_positions, which the file lacks");
  NamedTensors pages = cache_tensors(shape);
  pages["k_positions"] = good["k_positions"];
  EXPECT_FILE_ERROR(open(pages), "the file holds pages");
  // Twice is not possible, and neither is what follows from blocks of keys.
  write_tensors(folder.file("good"), good);
  EXPECT_FILE_ERROR(evict_file({folder.file("good")}, folder.file("no"), "knorm", 0.5), "lost tokens");
  Numerics lists;
  lists.lists = "window:64";
  EXPECT_EQ(error_of([&] { JobInput(FileInput{folder.file("good")}, lists); }).code(), ErrorCode::kUsage);
}

}  // namespace
}  // namespace ringattn::testing
