// SPDX-License-Identifier: Apache-2.0
// Steps over compressed caches in files, in every format: O and LSE are, byte for byte, those over pages that hold what
// decompression gives, on any number of ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <vector>

#include "comm/threads.hpp"
#include "kernels/quant/low_rank.hpp"
#include "ops/compression/compress_job.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/file_job.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

std::string result_of(int ranks, const std::string& input, const std::string& output) {
  FileJob job;
  job.input = FileInput{input};
  job.output.path = output;
  job.output.replace = true;
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  run_ranks(make_threads_world(ranks), [&](Transport& world) { run_file_job(job, world, options); });
  return read_whole(output);
}

// The same cache with elements in its pages, NaN where no token is.
NamedTensors decompressed(const JobInput& small, NamedTensors tensors) {
  const PageTable& table = *small.pages();
  const AttentionSpec& spec = small.job().spec;
  const std::vector<PackedRun> all{{0, small.job().batch.k_tokens()}};
  for (const auto& [tensor, name, dim] :
       {std::tuple{SyntheticTensor::kK, "k_pages", spec.head_dim}, {SyntheticTensor::kV, "v_pages", spec.head_dim_v}}) {
    std::vector<std::byte> rows(static_cast<std::size_t>(all[0].end * spec.kv_heads * dim) * size_of(spec.dtype));
    small.read(tensor, all, dense_view(static_cast<void*>(rows.data()), spec.dtype, all[0].end, spec.kv_heads, dim), 1);
    const std::size_t row_bytes = rows.size() / static_cast<std::size_t>(all[0].end);
    NamedTensor& pages = tensors[name];
    pages.shape = {table.pages, table.page_size, spec.kv_heads, dim};
    pages.bytes.assign(pages.bytes.size(), std::byte{0xff});
    const std::byte* from = rows.data();
    for (const PackedRun& run : pool_runs(table, small.job().batch.cu_k(), all)) {
      const std::size_t bytes = static_cast<std::size_t>(run.tokens()) * row_bytes;
      std::memcpy(pages.bytes.data() + static_cast<std::size_t>(run.begin) * row_bytes, from, bytes);
      from += bytes;
    }
  }
  return tensors;
}

class CompressedPages : public ::testing::TestWithParam<const char*> {};

TEST_P(CompressedPages, AreThePagesThatDecompressionGives) {
  const std::string method = GetParam();
  if ((method.starts_with("lowrank") || method == "hybrid") && !has_low_rank()) GTEST_SKIP() << "skipped: needs Eigen";
  const TemporaryFolder folder;
  const bool codes =
      method.starts_with("fp8") || method == "int8" || method == "int4";  // tables of others are looked for
  for (const bool head_major : {false, true}) {
    CacheShape shape;
    const std::int64_t page_size = head_major ? 128 : 16;
    // Over the end of a quantization group of 8,192 keys, at it, and before the first.
    shape.lengths = codes ? std::vector<std::int64_t>{9000, 65, 8192, 31} : std::vector<std::int64_t>{300, 65, 128, 31};
    shape.q_lens = {2, 2, 2, 2};
    shape.head_dim = shape.head_dim_v = 64;
    shape.page_size = page_size;
    shape.head_major = head_major;
    shape.dtype = head_major ? Dtype::kF16 : Dtype::kBf16;
    CompressJob job;
    job.input = FileInput{write_cache(folder.file("cache"), shape)};
    job.output = folder.file("small");
    job.replace = true;
    job.method = parse_cache_method(method);
    const CompressResult made = compress_file(job);
    EXPECT_LT(made.bytes_after(), made.bytes_before());
    const JobInput small(FileInput{job.output}, {});
    ASSERT_EQ(small.op(), Op::kDecode);
    EXPECT_EQ(small.job().format, (CacheFormat{made.k.format, made.v.format}));
    CacheShape thd = shape;
    thd.head_major = false;
    const std::string plain = write_tensors(folder.file("plain"), decompressed(small, cache_tensors(thd)));
    const std::string expected = result_of(1, plain, folder.file("out"));
    for (int ranks = 1; ranks <= 5; ++ranks) {
      // What stands in a file beside O and LSE says nothing of where the keys lay.
      EXPECT_TRUE(result_of(ranks, job.output, folder.file("out")) == expected)
          << method << ", pages of " << page_size << ", " << ranks << " ranks";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Methods, CompressedPages,
                         ::testing::Values("fp8", "fp8 tensor", "int8", "int4", "vq", "lowrank", "lowrank:heads=2",
                                           "hybrid"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::ranges::replace_if(
                               name, [](char letter) { return std::isalnum(letter) == 0; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace ringattn::testing
