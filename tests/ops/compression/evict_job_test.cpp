// SPDX-License-Identifier: Apache-2.0
// Files that have lost tokens: what is written whatever the order of axes, where queries stand in them, and what is
// refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/threads.hpp"
#include "ops/compression/compress_job.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/file_job.hpp"
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
  // Queries after all evicted tokens are moved; the second sequence keeps only its first tokens. A single query that
  // sees all keys stands at the last one, as a decode step's does.
  Numerics full;
  full.mask = {-1, -1};
  const JobInput moved(FileInput{folder.file("kept")}, full);
  EXPECT_EQ(moved.job().positions, nullptr);
  tensors["q_offset"] = long_list({40, 9, 65});
  evict_file({write_tensors(folder.file("whole"), tensors)}, folder.file("kept"), "streaming", 0.5);
  const JobInput behind(FileInput{folder.file("kept")}, {});
  EXPECT_EQ(behind.job().positions, nullptr);
  EXPECT_EQ(behind.job().batch.sequences, (SequenceList{{40, 20, 20}, {2, 4, 9}, {1, 32, 31}}));
}

std::string result_of(int ranks, const std::string& input, const std::string& output, const Mask& mask = {-1, 0}) {
  FileJob job;
  job.input = FileInput{input};
  job.numerics.mask = mask;
  job.output.path = output;
  job.output.replace = true;
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  run_ranks(make_threads_world(ranks), [&](Transport& world) { run_file_job(job, world, options); });
  return read_whole(output);
}

// What is left of a cache in pages lies in pages, of the same tokens as what is left of rows, and O and LSE are those
// of these, byte for byte: of steps, and of rows in any number.
TEST(EvictedFiles, OfPagesAreThoseOfRows) {
  const TemporaryFolder folder;
  const std::string rows = folder.file("rows"), pages = folder.file("pages");
  const std::vector<std::vector<std::int64_t>> queries = {{1, 1, 1, 1}, {3, 3, 3, 3}, {40, 1, 2, 65}};
  for (const std::vector<std::int64_t>& q_lens : queries) {
    for (const auto& [page_size, head_major] : {std::pair{16, false}, {64, true}}) {
      CacheShape shape;
      shape.lengths = {140, 3, 17, 265};
      shape.q_lens = q_lens;
      shape.page_size = page_size;
      shape.head_major = head_major;
      shape.sinks = head_major;
      const FileInput whole_rows{write_tensors(folder.file("whole_rows"), row_tensors(shape))};
      const FileInput whole_pages{write_cache(folder.file("whole_pages"), shape)};
      for (const char* const method :
           {"snapkv:window=8", "expected:window=9,heads=all", "knorm", "streaming:first=1", "knorm:last=3"}) {
        SCOPED_TRACE(fmt::format("{}, {} queries, pages of {}", method, q_lens[0], page_size));
        const CompressResult of_rows = evict_file(whole_rows, rows, method, 0.6);
        const CompressResult of_pages = evict_file(whole_pages, pages, method, 0.6);
        EXPECT_EQ(of_pages.tokens, of_rows.tokens);
        EXPECT_EQ(of_pages.kept, of_rows.kept);
        EXPECT_EQ(of_pages.position_bytes, of_rows.position_bytes);
        EXPECT_LT(of_pages.bytes_after(), of_pages.bytes_before());
        // With a mask that leaves positions where they are.
        Numerics window;
        window.mask = {200, 0};
        const JobInput from_rows(FileInput{rows}, window), from_pages(FileInput{pages}, window);
        ASSERT_NE(from_rows.job().positions, nullptr);
        ASSERT_NE(from_pages.job().positions, nullptr);
        EXPECT_TRUE(*from_rows.job().positions == *from_pages.job().positions);
        EXPECT_EQ(from_rows.job().batch.sequences, from_pages.job().batch.sequences);
        for (const SyntheticTensor tensor : {SyntheticTensor::kK, SyntheticTensor::kV}) {
          EXPECT_EQ(rows_of(from_rows, tensor, kKvHeads), rows_of(from_pages, tensor, kKvHeads));
        }
        EXPECT_EQ(from_pages.op(), Op::kAttention);
        ASSERT_NE(from_pages.pages(), nullptr);
        EXPECT_EQ(from_pages.pages()->page_size, page_size);
        EXPECT_EQ(from_pages.head_major_pages(), head_major);
        for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, window.mask}) {
          const std::string expected = result_of(1, rows, folder.file("out"), mask);
          for (int ranks = 1; ranks <= 3; ++ranks) {
            EXPECT_TRUE(result_of(ranks, pages, folder.file("out"), mask) == expected) << ranks << " ranks";
          }
        }
      }
    }
  }
}

// A step's rows stand at the end of what is left, or are moved there where they see all of it.
TEST(EvictedFiles, OfPagesAreDecodedWherePositionsSayNoMore) {
  const TemporaryFolder folder;
  const auto open = [&](std::int64_t rows, const char* method, const Mask& mask) {
    CacheShape shape;
    shape.lengths = {140, 60};
    shape.q_lens = {rows, rows};
    evict_file({write_cache(folder.file("whole"), shape)}, folder.file("kept"), method, 0.5);
    Numerics numerics;
    numerics.mask = mask;
    return JobInput(FileInput{folder.file("kept")}, numerics);
  };
  const Mask causal{-1, 0}, full{-1, -1}, window{20, 0};
  for (const auto& [rows, method, mask] : {std::tuple{1, "streaming", causal},
                                           {4, "streaming", causal},
                                           {4, "snapkv", causal},
                                           {1, "knorm", causal},
                                           {4, "knorm", full}}) {
    const JobInput kept = open(rows, method, mask);
    EXPECT_EQ(kept.op(), Op::kDecode) << method << rows;
    EXPECT_EQ(kept.job().positions, nullptr);
    EXPECT_EQ(kept.job().batch.sequences, (SequenceList{{rows, 70, 70 - rows}, {rows, 30, 30 - rows}}));
    EXPECT_TRUE(kept.not_decoded_reason().empty());
  }
  for (const auto& [rows, method, mask] : {std::tuple{4, "knorm", causal}, {1, "knorm", window}}) {
    const JobInput kept = open(rows, method, mask);
    EXPECT_EQ(kept.op(), Op::kAttention) << method << rows;
    EXPECT_NE(kept.not_decoded_reason().find("queries are not the last tokens"), std::string::npos);
  }
}

// Sequences that share pages keep tokens of their own, in pages of their own.
TEST(EvictedFiles, OfSharedPagesHaveTheirOwn) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.lengths = {100, 70};
  shape.q_lens = {2, 2};
  NamedTensors shared = cache_tensors(shape);
  auto& table = shared["block_table"];
  const auto columns = static_cast<std::size_t>(table.shape[1]);
  std::copy_n(table.bytes.begin(), 4 * 3, table.bytes.begin() + static_cast<std::ptrdiff_t>(4 * columns));
  const FileInput pages{write_tensors(folder.file("shared"), shared)};
  const JobInput opened(pages, {});
  NamedTensors tensors = row_tensors(shape);
  tensors["k"].bytes = rows_of(opened, SyntheticTensor::kK, kKvHeads);
  tensors["v"].bytes = rows_of(opened, SyntheticTensor::kV, kKvHeads);
  evict_file(pages, folder.file("pages"), "snapkv:window=2", 0.5);
  evict_file({write_tensors(folder.file("plain"), tensors)}, folder.file("rows"), "snapkv:window=2", 0.5);
  const JobInput kept(FileInput{folder.file("pages")}, {}), of_rows(FileInput{folder.file("rows")}, {});
  EXPECT_EQ(kept.pages()->pages, 4 + 3);
  EXPECT_EQ(rows_of(kept, SyntheticTensor::kK, kKvHeads), rows_of(of_rows, SyntheticTensor::kK, kKvHeads));
  EXPECT_EQ(rows_of(kept, SyntheticTensor::kV, kKvHeads), rows_of(of_rows, SyntheticTensor::kV, kKvHeads));
  EXPECT_TRUE(result_of(2, folder.file("pages"), folder.file("out")) ==
              result_of(1, folder.file("rows"), folder.file("out")));
}

// In pages, what is left is compressed in a step of its own, and gives what rows give in one.
TEST(EvictedFiles, OfPagesAreCompressedAfterwards) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.lengths = {140, 61};
  shape.q_lens = {20, 33};
  shape.head_dim = shape.head_dim_v = 64;
  const FileInput whole{write_cache(folder.file("whole"), shape)};
  const FileInput rows{write_tensors(folder.file("rows"), row_tensors(shape))};
  const auto error = error_of([&] { evict_file(whole, folder.file("no"), "snapkv+int8", 0.5); });
  EXPECT_EQ(error.code(), ErrorCode::kFile);
  EXPECT_NE(std::string(error.what()).find("holds pages"), std::string::npos);
  evict_file(whole, folder.file("kept"), "snapkv:window=8", 0.5);
  for (const char* const method : {"int8", "int4"}) {
    CompressJob job;
    job.input = FileInput{folder.file("kept")};
    job.output = folder.file("codes");
    job.replace = true;
    job.method = parse_cache_method(method);
    compress_file(job);
    const JobInput codes(FileInput{job.output}, {});
    EXPECT_NE(codes.job().positions, nullptr);
    evict_file(rows, folder.file("expected"), fmt::format("snapkv:window=8+{}", method), 0.5);
    const std::string expected = result_of(1, folder.file("expected"), folder.file("out"));
    for (const int ranks : {1, 3}) {
      EXPECT_TRUE(result_of(ranks, job.output, folder.file("out")) == expected) << method << ", " << ranks << " ranks";
    }
  }
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
  EXPECT_FILE_ERROR(open(pages), "k_lengths");
  pages["k_lengths"] = good["k_lengths"];
  EXPECT_EQ(open(pages).job().batch.k_tokens(), 8);
  pages["k_positions"] = int_list({0, 3, 5, 8, 0, 0, 2, 6, 7}, {9, 1});
  EXPECT_FILE_ERROR(open(pages), "the sequences have 8 keys of 2 heads: it is I32 [8, 1 or 2]");
  pages["k_positions"] = int_list({0, 3, 5, 5, 0, 0, 2, 6}, {8, 1});
  EXPECT_FILE_ERROR(open(pages), "[3, 0] is 5");
  // Twice is not possible, and neither is what follows from blocks of keys.
  write_tensors(folder.file("good"), good);
  EXPECT_FILE_ERROR(evict_file({folder.file("good")}, folder.file("no"), "knorm", 0.5), "evicted tokens");
  pages["k_positions"] = good["k_positions"];
  write_tensors(folder.file("good_pages"), pages);
  EXPECT_FILE_ERROR(evict_file({folder.file("good_pages")}, folder.file("no"), "knorm", 0.5), "evicted tokens");
  Numerics block_mask;
  block_mask.block_mask = "window:64";
  EXPECT_EQ(error_of([&] { JobInput(FileInput{folder.file("good")}, block_mask); }).code(), ErrorCode::kUsage);
}

}  // namespace
}  // namespace ringattn::testing
