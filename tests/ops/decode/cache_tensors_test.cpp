// SPDX-License-Identifier: Apache-2.0
// Files with a paged cache: every token is found, whatever the pages' order, and what can't be right is refused with
// code 3 and a message that names the tensor and, for block_table and lengths_k, the sequence.
#include "ops/decode/cache_tensors.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "base/error.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/expect_file_error.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

std::vector<std::byte> read_all(const JobInput& input, SyntheticTensor tensor, std::span<const PackedRun> runs) {
  const AttentionSpec& spec = input.job().spec;
  const bool q = tensor == SyntheticTensor::kQ;
  const int heads = q ? spec.heads : spec.kv_heads;
  const int dim = tensor == SyntheticTensor::kV ? spec.head_dim_v : spec.head_dim;
  const std::int64_t tokens = total_tokens(runs);
  std::vector<std::byte> rows(static_cast<std::size_t>(tokens * heads * dim) * size_of(spec.dtype));
  input.read(tensor, runs, dense_view(static_cast<void*>(rows.data()), spec.dtype, tokens, heads, dim), 1);
  return rows;
}

TEST(CacheTensors, HoldTheTokensOfTheirSequences) {
  const TemporaryFolder folder;
  for (const bool head_major : {false, true}) {
    for (const std::int64_t page_size : {16, 64, 256}) {
      for (const bool wide : {false, true}) {
        CacheShape shape;
        shape.page_size = page_size;
        shape.head_major = head_major;
        shape.wide_lengths = wide;
        shape.head_dim_v = 24;
        shape.sinks = wide;
        shape.lengths = {300, 0, 1, 256, 257};
        shape.q_lens = {2, 2, 2, 2, 2};
        const NamedTensors rows = row_tensors(shape);
        const JobInput cache(FileInput{write_cache(folder.file("cache"), shape)}, {});
        const JobInput packed(FileInput{write_tensors(folder.file("rows"), rows)}, {});
        EXPECT_EQ(cache.op(), Op::kDecode);
        EXPECT_EQ(packed.op(), Op::kAttention);
        EXPECT_EQ(cache.job().spec, packed.job().spec);
        EXPECT_EQ(cache.job().batch, packed.job().batch);
        ASSERT_NE(cache.pages(), nullptr);
        EXPECT_EQ(cache.pages()->page_size, page_size);
        EXPECT_EQ(cache.head_major_pages(), head_major);
        EXPECT_EQ(cache.sinks().size(), wide ? 4U : 0U);
        EXPECT_EQ(cache.out_grid().shape(), (std::vector<std::int64_t>{10, 4, 24}));
        const PackedRun all[] = {{0, 814}};
        const PackedRun some[] = {{299, 303}, {17, 18}, {500, 814}};
        for (const std::span<const PackedRun> runs : {std::span<const PackedRun>(all), {some}}) {
          EXPECT_EQ(read_all(cache, SyntheticTensor::kK, runs), read_all(packed, SyntheticTensor::kK, runs));
          EXPECT_EQ(read_all(cache, SyntheticTensor::kV, runs), read_all(packed, SyntheticTensor::kV, runs));
        }
        const PackedRun queries[] = {{0, 10}};
        EXPECT_EQ(read_all(cache, SyntheticTensor::kQ, queries), rows.at("q").bytes);
      }
    }
  }
}

TEST(CacheTensors, SayTheirOp) {
  const TemporaryFolder folder;
  const auto op_of = [&](std::vector<std::int64_t> q_lens) {
    CacheShape shape;
    shape.q_lens = std::move(q_lens);
    return JobInput(FileInput{write_cache(folder.file("cache"), shape)}, {}).op();
  };
  EXPECT_EQ(op_of({1, 1, 1, 1}), Op::kDecode);
  EXPECT_EQ(op_of({16, 16, 16, 16}), Op::kDecode);
  EXPECT_EQ(op_of({17, 17, 17, 17}), Op::kAttention);
  EXPECT_EQ(op_of({1, 2, 1, 1}), Op::kAttention);
  EXPECT_EQ(op_of({0, 0, 0, 0}), Op::kAttention);
}

TEST(CacheTensors, TakeQueriesWithAnAxisForTheBatch) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.q_lens = {3, 3, 3, 3};
  NamedTensors tensors = cache_tensors(shape);
  tensors["q"].shape = {4, 3, 4, 16};
  const std::string path = write_tensors(folder.file("cache"), tensors);
  EXPECT_EQ(JobInput(FileInput{path}, {}).out_grid().shape(), (std::vector<std::int64_t>{4, 3, 4, 16}));
  tensors["q"].shape = {2, 6, 4, 16};
  EXPECT_EQ(error_of([&] { JobInput(FileInput{write_tensors(path, tensors)}, {}); }).code(), ErrorCode::kFile);
}

TEST(CacheTensors, HaveOneOrderOrAreTold) {
  const TemporaryFolder folder;
  // 16 heads of 16 tokens, or 16 tokens of 16 heads.
  CacheShape shape;
  shape.heads = shape.kv_heads = 16;
  for (const bool head_major : {false, true}) {
    shape.head_major = head_major;
    const AxisOrder order = head_major ? AxisOrder::kHtd : AxisOrder::kThd;
    shape.metadata.clear();
    FileInput file{write_cache(folder.file("cache"), shape)};
    const Error unsaid = error_of([&] { JobInput(file, {}); });
    EXPECT_NE(std::string(unsaid.what()).find("its pages may be 16 tokens of 16 heads, or 16 heads of 16 tokens"),
              std::string::npos)
        << unsaid.what();
    const PackedRun all[] = {{0, 122}};
    const std::vector<std::byte> expected = row_tensors(shape).at("k").bytes;
    file.page_order = order;
    EXPECT_EQ(read_all(JobInput(file, {}), SyntheticTensor::kK, all), expected);
    shape.metadata = {{"page_order", std::string(axis_order_name(order))}};
    write_cache(file.path, shape);
    file.page_order.reset();
    EXPECT_EQ(read_all(JobInput(file, {}), SyntheticTensor::kK, all), expected);
    // What the caller says counts.
    file.page_order = head_major ? AxisOrder::kThd : AxisOrder::kHtd;
    EXPECT_NE(read_all(JobInput(file, {}), SyntheticTensor::kK, all), expected);
  }
  shape.metadata = {{"page_order", "bhtd"}};
  const std::string bad = write_cache(folder.file("bad"), shape);
  EXPECT_NE(std::string(error_of([&] { JobInput(FileInput{bad}, {}); }).what()).find("page_order is `bhtd`"),
            std::string::npos);
  const std::string rows = write_tensors(folder.file("rows"), row_tensors(shape));
  EXPECT_EQ(error_of([&] { JobInput(FileInput{rows, {}, {}, AxisOrder::kHtd}, {}); }).code(), ErrorCode::kUsage);
}

TEST(CacheTensors, AreFoundByOtherNames) {
  const TemporaryFolder folder;
  const CacheShape shape;
  NamedTensors both = cache_tensors(shape);
  const NamedTensors rows = row_tensors(shape);
  both["k"] = rows.at("k");
  both["v"] = rows.at("v");
  FileInput file{write_tensors(folder.file("both"), both)};
  EXPECT_NE(std::string(error_of([&] { JobInput(file, {}); }).what()).find("holds `k` and `k_pages`"),
            std::string::npos);
  file.names.k_pages = "k_pages";
  EXPECT_EQ(JobInput(file, {}).op(), Op::kDecode);
  file.names.k = "k";  // both are named
  EXPECT_EQ(error_of([&] { JobInput(file, {}); }).code(), ErrorCode::kFile);
  file.names.k_pages.reset();
  EXPECT_EQ(JobInput(file, {}).op(), Op::kAttention);

  NamedTensors renamed;
  for (const auto& [name, tensor] : cache_tensors(shape)) renamed["layer." + name] = tensor;
  file = {write_tensors(folder.file("renamed"), renamed)};
  EXPECT_EQ(error_of([&] { JobInput(file, {}); }).code(), ErrorCode::kFile);
  file.names = {};
  file.names.q = "layer.q";
  file.names.k_pages = "layer.k_pages";
  file.names.v_pages = "layer.v_pages";
  file.names.block_table = "layer.block_table";
  file.names.lengths_k = "layer.lengths_k";
  EXPECT_EQ(JobInput(file, {}).op(), Op::kDecode);
}

TEST(CacheTensors, HaveNamesOfOtherLibraries) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.q_lens = {1, 0, 2, 1};
  shape.sinks = true;
  const NamedTensors tensors = cache_tensors(shape);
  const JobInput plain(FileInput{write_tensors(folder.file("plain"), tensors)}, {});
  NamedTensors renamed = tensors;
  for (const auto& [ours, theirs] : {std::pair{"lengths_k", "seqused_k"},
                                     {"block_table", "page_table"},
                                     {"cu_seqlens_q", "query_start_loc"},
                                     {"sinks", "attn_sink"}}) {
    renamed[theirs] = renamed.extract(ours).mapped();
  }
  const JobInput input(FileInput{write_tensors(folder.file("renamed"), renamed)}, {});
  EXPECT_EQ(input.job().batch, plain.job().batch);
  EXPECT_EQ(input.sinks().size(), 4U);
  EXPECT_EQ(input.unread().count, 0U);
  // Lengths of keys beside rows are those of no cache.
  NamedTensors rows = row_tensors(shape);
  rows["seqused_k"] = tensors.at("lengths_k");
  EXPECT_FILE_ERROR(JobInput(FileInput{write_tensors(folder.file("rows"), rows)}, {}), "k and v in rows have no pages");
  renamed = tensors;
  renamed["cache_seqlens"] = renamed.extract("lengths_k").mapped();
  EXPECT_FILE_ERROR(JobInput(FileInput{write_tensors(folder.file("before"), renamed)}, {}), "Write lengths_k");
}

struct BadCache {
  std::string_view why;
  std::function<void(NamedTensors&)> change;
};

// The values of a tensor of I32, to be changed.
std::int32_t* ints(NamedTensor& tensor) { return reinterpret_cast<std::int32_t*>(tensor.bytes.data()); }

TEST(CacheTensors, AreRefusedWithTheTensorsName) {
  const BadCache cases[] = {
      {"has no tensor `v_pages`", [](NamedTensors& t) { t.erase("v_pages"); }},
      {"has no tensor `block_table`", [](NamedTensors& t) { t.erase("block_table"); }},
      {"has no tensor `lengths_k`", [](NamedTensors& t) { t.erase("lengths_k"); }},
      {"`k_pages` of",
       [](NamedTensors& t) {
         t["k_pages"].shape = {13 * 16, 2, 16};
       }},
      {"it must have 4 axes",
       [](NamedTensors& t) {
         t["v_pages"].shape = {13 * 16, 32};
       }},
      {"q is BF16", [](NamedTensors& t) { t["v_pages"].dtype = FileDtype::kF16; }},
      {"q, k and v are BF16, F16 or F32", [](NamedTensors& t) { t["k_pages"].dtype = FileDtype::kI16; }},
      {"pages hold 8 tokens; 16, 32",
       [](NamedTensors& t) {
         t["k_pages"].shape = {26, 8, 2, 16};
       }},
      {"K has 3 heads and Q has 4",
       [](NamedTensors& t) {
         t["k_pages"].shape = t["v_pages"].shape = {11, 16, 3, 16};
         for (const char* name : {"k_pages", "v_pages"}) t[name].bytes.resize(11 * 16 * 3 * 16 * 2);
       }},
      {"q's head_dim is 16",
       [](NamedTensors& t) {
         t["k_pages"].shape = {26, 16, 2, 8};
       }},
      {"k_pages has 13 pages of 16 tokens and 2 heads",
       [](NamedTensors& t) {
         t["v_pages"].shape = {12, 16, 2, 16};
         t["v_pages"].bytes.resize(12 * 16 * 2 * 16 * 2);
       }},
      {"k_pages has 13 pages",
       [](NamedTensors& t) {
         t["v_pages"].shape = {13, 16, 4, 8};
       }},
      {"it must be I32",
       [](NamedTensors& t) {
         t["block_table"].dtype = FileDtype::kI64;
         t["block_table"].bytes.resize(4 * 5 * 8);
       }},
      {"(sequences, max_pages)", [](NamedTensors& t) { t["block_table"].shape = {20}; }},
      {"lengths_k names 4 sequences",
       [](NamedTensors& t) {
         t["block_table"].shape = {5, 4};
       }},
      {"it must be I32 or I64", [](NamedTensors& t) { t["lengths_k"].dtype = FileDtype::kF32; }},
      {"of one dimension",
       [](NamedTensors& t) {
         t["lengths_k"].shape = {2, 2};
       }},
      {"it names no sequence", [](NamedTensors& t) { t["lengths_k"] = int_list({}); }},
      {"sequence 2 has -1 keys", [](NamedTensors& t) { ints(t["lengths_k"])[2] = -1; }},
      {"sequence 3 has 81 keys, and its 5 entries of the table hold 16 each",
       [](NamedTensors& t) { ints(t["lengths_k"])[3] = 81; }},
      {"sequence 1 has 9223372036854775807 keys",
       [](NamedTensors& t) {
         t["lengths_k"] = long_list({40, INT64_MAX, 17, 65});
       }},
      {"sequence 2, entry 1 of `block_table` of", [](NamedTensors& t) { ints(t["block_table"])[2 * 5 + 1] = 13; }},
      {"is page -7 (the pool has pages 0 to 12)", [](NamedTensors& t) { ints(t["block_table"])[0] = -7; }},
      {"lengths_k names 4 sequences",
       [](NamedTensors& t) {
         t["cu_seqlens_q"] = long_list({0, 2, 4});
       }},
      {"its last entry is 3",
       [](NamedTensors& t) {
         t["cu_seqlens_q"] = long_list({0, 1, 1, 2, 3});
       }},
      {"descends",
       [](NamedTensors& t) {
         t["cu_seqlens_q"] = long_list({0, 2, 1, 2, 4});
       }},
      {"of one dimension",
       [](NamedTensors& t) {
         t["cu_seqlens_q"] = int_list({0, 1, 2, 3}, {2, 2});
       }},
      {"Give each sequence as many rows",
       [](NamedTensors& t) {
         t["q"].shape = {3, 4, 16};
         t["q"].bytes.resize(3 * 4 * 16 * 2);
       }},
      {"is given with a paged cache",
       [](NamedTensors& t) {
         t["cu_seqlens_k"] = long_list({0, 1, 2, 3, 4});
       }},
      {"is given with a paged cache",
       [](NamedTensors& t) {
         t["q_offset"] = long_list({0, 1, 2, 3});
       }},
      {"holds `k` and `k_pages`", [](NamedTensors& t) { t["k"] = t["q"]; }},
      {"q has 4 heads",
       [](NamedTensors& t) {
         t["sinks"] = {FileDtype::kF32, {2}, std::vector<std::byte>(8)};
       }},
      {"at least one head and one dim",
       [](NamedTensors& t) {
         t["v_pages"].shape = {13, 16, 2, 0};
         t["v_pages"].bytes.clear();
       }},
  };
  const TemporaryFolder folder;
  for (const BadCache& bad : cases) {
    SCOPED_TRACE(bad.why);
    NamedTensors tensors = cache_tensors(CacheShape());
    bad.change(tensors);
    const std::string path = write_tensors(folder.file("bad"), tensors);
    const Error error = error_of([&] { JobInput(FileInput{path}, {}); });
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kFile) << message;
    EXPECT_NE(message.find(bad.why), std::string::npos) << message;
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_NE(message.find("). "), std::string::npos) << message << ": it lacks a suggestion";
  }
}

// Table entries after a sequence's last page are never read.
TEST(CacheTensors, TablesHoldAnythingBehindASequencesEnd) {
  const TemporaryFolder folder;
  NamedTensors tensors = cache_tensors(CacheShape());
  ints(tensors["block_table"])[1 * 5] = 1 << 30;  // sequence 1 has no keys
  ints(tensors["block_table"])[0 * 5 + 3] = -5;
  EXPECT_NO_THROW(JobInput(FileInput{write_tensors(folder.file("cache"), tensors)}, {}));
}

TEST(PageTable, DealsEveryPageOnceAndBySeed) {
  const Batch batch{{1, 100, 99}, {1, 0, -1}, {1, 16, 15}, {1, 17, 16}};
  const PageTable table = deal_pages(batch, 16, 3);
  EXPECT_EQ(table.begin, (std::vector<std::int64_t>{0, 7, 7, 8, 10}));
  std::vector<std::int32_t> pages = table.entries;
  std::sort(pages.begin(), pages.end());
  EXPECT_EQ(pages, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(deal_pages(batch, 16, 3), table);
  EXPECT_NE(deal_pages(batch, 16, 4), table);
  EXPECT_NE(table.entries, pages);
  const std::vector<std::int64_t> cu_k = batch.cu_k();
  const PackedRun runs[] = {{15, 17}, {100, 101}, {132, 133}};
  const std::int32_t first = table.of(0)[0];
  EXPECT_EQ(pool_runs(table, cu_k, runs), (std::vector<PackedRun>{{first * 16 + 15, first * 16 + 16},
                                                                  {table.of(0)[1] * 16, table.of(0)[1] * 16 + 1},
                                                                  {table.of(2)[0] * 16, table.of(2)[0] * 16 + 1},
                                                                  {table.of(3)[1] * 16, table.of(3)[1] * 16 + 1}}));
  EXPECT_EQ(error_of([] { deal_pages(uniform_batch(1, 1, std::int64_t{1} << 31), 16, 1); }).code(), ErrorCode::kMemory);
}

TEST(SyntheticInput, QueriesAreThoseOfTheLastTokens) {
  SyntheticInput whole;
  whole.seed = 5;
  whole.tokens = 50;
  whole.batch = 3;
  whole.heads = 2;
  whole.head_dim = 8;
  SyntheticInput last = whole;
  last.q_len = 4;
  const JobInput prefill(whole, {});
  const JobInput rows(last, {});
  EXPECT_EQ(rows.job().batch.sequences, (std::vector<Sequence>{{4, 50, 46}, {4, 50, 46}, {4, 50, 46}}));
  const PackedRun of_prefill[] = {{46, 50}, {96, 100}, {147, 150}};
  const PackedRun of_rows[] = {{0, 8}, {9, 12}};
  EXPECT_EQ(read_all(rows, SyntheticTensor::kQ, of_rows), read_all(prefill, SyntheticTensor::kQ, of_prefill));
  const PackedRun all[] = {{0, 150}};
  EXPECT_EQ(read_all(rows, SyntheticTensor::kK, all), read_all(prefill, SyntheticTensor::kK, all));
  SyntheticInput step = whole;
  step.op = Op::kDecode;
  step.page_size = 16;
  const JobInput decode(step, {});
  EXPECT_EQ(decode.job().batch.sequences[0], (Sequence{1, 50, 49}));
  EXPECT_EQ(decode.pages()->pages, 12);
  const PackedRun tails[] = {{49, 50}, {99, 100}, {149, 150}};
  const PackedRun steps[] = {{0, 3}};
  EXPECT_EQ(read_all(decode, SyntheticTensor::kQ, steps), read_all(prefill, SyntheticTensor::kQ, tails));
}

}  // namespace
}  // namespace ringattn::testing
