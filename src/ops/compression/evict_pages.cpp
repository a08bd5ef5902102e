// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "kernels/quant/eviction.hpp"
#include "ops/compression/cache_pool.hpp"
#include "ops/compression/cache_rows.hpp"
#include "ops/compression/compress_common.hpp"
#include "ops/compression/evict_cache.hpp"
#include "ops/compression/pool_slots.hpp"

namespace ringattn {

namespace {

void check_pool(const CachePool& pool) {
  held_slots(pool.table, pool.cu).for_each_part(part_tokens(pool), [&](std::int64_t, std::span<const PackedRun> runs) {
    check_slots(pool, runs);
  });
  pool.source.shard->check_unchanged();
}

// All rows of the sequences, concatenated.
std::vector<std::byte> rows_of(const CachePool& pool) {
  const PackedRun all{0, pool.cu.back()};
  std::vector<std::byte> rows(bytes_of(pool.shape, all.tokens()));
  read_slots(pool, pool_runs(pool.table, pool.cu, {&all, 1}), rows);
  return rows;
}

// Pages for sequences of these lengths, in ascending order. No page is shared.
PageTable pages_for(std::span<const std::int64_t> lengths, std::int64_t page_size) {
  PageTable table;
  table.page_size = page_size;
  for (const std::int64_t length : lengths) {
    for (std::int64_t page = 0; page < pages_of(length, page_size); ++page) {
      table.entries.push_back(static_cast<std::int32_t>(table.pages++));
    }
    table.begin.push_back(table.pages);
  }
  return table;
}

// [sequences, maximum number of pages of a sequence]; −1 after a sequence's last page.
WholeTensor block_table(const PageTable& table) {
  std::size_t columns = 1;
  for (std::size_t s = 0; s < table.sequences(); ++s) columns = std::max(columns, table.of(s).size());
  std::vector<std::int32_t> entries(table.sequences() * columns, -1);
  for (std::size_t s = 0; s < table.sequences(); ++s) {
    std::ranges::copy(table.of(s), entries.begin() + static_cast<std::ptrdiff_t>(s * columns));
  }
  return whole_tensor("block_table", FileDtype::kI32,
                      {static_cast<std::int64_t>(table.sequences()), static_cast<std::int64_t>(columns)}, entries);
}

}  // namespace

CompressResult evict_pages(const SafetensorsFile& file, const FileInput& input, const CompressJob& job,
                           const InputTensors& tensors, std::vector<WholeTensor> others) {
  const Eviction& eviction = *job.method.eviction;
  if (job.method.format) {
    fail(ErrorCode::kFile, fmt::format("{} holds pages", file.path()),
         "a paged cache is evicted in one step and quantized in the next",
         {"Use ", setting("method", eviction.method->name), ", then ", setting("method", job.method.format->name),
          " for the file that it writes."});
  }
  const std::vector<std::int64_t> cu = Batch{tensors.sequences}.cu_k();
  const RowShape k_shape{tensors.dtype, tensors.k_grid.heads, tensors.k_grid.dim};
  const RowShape v_shape{tensors.dtype, tensors.v_grid.heads, tensors.v_grid.dim};
  const CachePool k{"k", tensors.k, tensors.k_grid, *tensors.pages, cu, k_shape};
  const CachePool v{"v", tensors.v, tensors.v_grid, *tensors.pages, cu, v_shape};
  check_extents(k.source, k.grid);
  check_extents(v.source, v.grid);
  CacheRows cache;
  cache.what = fmt::format("the pages of {}", file.path());
  cache.k = k_shape;
  cache.v = v_shape;
  for (std::size_t s = 0; s < k.sequences(); ++s) cache.lengths.push_back(k.length(s));
  cache.others = std::move(others);

  const double share = job.ratio.value_or(kDefaultEviction);
  if (cache.tokens() > 0) check_queries(eviction, cache.has("q"));
  check_host_memory(cache.what, eviction_bytes(eviction, share, cache));
  check_compared_job(job, cache.has("q"));
  check_pool(k);
  check_pool(v);
  if (job.compared) check_compared_queries(file, input.names);
  check_eviction(eviction, job.input, job.numerics, cache);

  CompressResult result;
  result.tokens = cache.tokens();
  result.k.bytes_before = k.source.info->bytes();
  result.v.bytes_before = v.source.info->bytes();
  cache.k_rows = rows_of(k);
  cache.v_rows = rows_of(v);
  result.evict_seconds = seconds_of([&] { evict(eviction, share, job.input, job.numerics, job.threads, cache); });
  result.position_bytes = position_bytes(cache);
  result.kept = cache.tokens();

  const PageTable table = pages_for(cache.lengths, tensors.pages->page_size);
  replace_tensor(cache.others, block_table(table));
  const std::vector<std::int32_t> lengths(cache.lengths.begin(), cache.lengths.end());
  replace_tensor(cache.others,
                 whole_tensor("lengths_k", FileDtype::kI32, {static_cast<std::int64_t>(lengths.size())}, lengths));
  RowGrid k_grid = k.grid, v_grid = v.grid;
  k_grid.batch = v_grid.batch = table.pages;
  std::vector<OutputTensor> planned{{"k_pages", file_dtype(k.shape.dtype), k_grid.shape()},
                                    {"v_pages", file_dtype(v.shape.dtype), v_grid.shape()}};
  const auto writer =
      create_file(job, cache.others, std::move(planned),
                  {{"evicted_by", describe(eviction)}, {"page_order", k.grid.head_major() ? "htd" : "thd"}});
  const std::vector<std::int64_t> left = [&] {
    std::vector<std::int64_t> ends{0};
    for (const std::int64_t length : cache.lengths) ends.push_back(ends.back() + length);
    return ends;
  }();
  const PackedRun all{0, cache.tokens()};
  const std::vector<PackedRun> runs = pool_runs(table, left, {&all, 1});
  writer->write_rows("k_pages", k_grid, runs, view_of(cache.k_rows, cache.k, cache.tokens()));
  writer->write_rows("v_pages", v_grid, runs, view_of(cache.v_rows, cache.v, cache.tokens()));
  finish_file(*writer);
  result.k.bytes_after = table.pages * table.page_size * token_bytes({}, cache.k);
  result.v.bytes_after = table.pages * table.page_size * token_bytes({}, cache.v);
  return result;
}

}  // namespace ringattn
