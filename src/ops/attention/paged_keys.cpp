// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/paged_keys.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "ops/attention/compressed_blocks.hpp"

namespace ringattn {

namespace {

void check_pool(std::string_view name, const CacheView& pool, const AttentionSpec& spec, std::int64_t page_size,
                int dim) {
  if (pool.dtype == spec.dtype && pool.page_size == page_size && pool.heads == spec.kv_heads && pool.dim == dim) return;
  fail(ErrorCode::kUsage,
       fmt::format("the pool of {} is {} [pages, {}, {}, {}]", name, dtype_name(pool.dtype), pool.page_size, pool.heads,
                   pool.dim),
       fmt::format("the job has {} [pages, {}, {}, {}]", dtype_name(spec.dtype), page_size, spec.kv_heads, dim),
       "Pass another order of axes by strides.");
}

// True if pages of quantized values can be copied as 16-bit elements.
bool has_even_layout(const FormatStream& stream, Dtype dtype, const PagedStream& at) {
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at.data) % 2);
  const std::int64_t all = at.page_stride | at.token_stride | at.head_stride | stream.token_bytes(dtype) / stream.heads;
  return (address | all) % 2 == 0;
}

void check_quantized_pool(std::string_view name, const CompressedCache& pool, const RowFormat& format,
                          const RowShape& shape, std::int64_t page_size) {
  bool complete = pool.format == format && pool.shape == shape && pool.page_size == page_size;
  for (std::size_t i = 0; complete && i < format_tables(format, shape, 1).size(); ++i) {
    complete = pool.tables[i] != nullptr;
  }
  for (std::size_t i = 0; complete && i < format_streams(format, shape).size(); ++i) {
    complete = pool.streams[i].data != nullptr || pool.pages == 0;
  }
  if (!complete) {
    fail(ErrorCode::kUsage,
         fmt::format("the pool of {} is {} of {} [pages, {}, {}, {}]", name, describe(pool.format),
                     dtype_name(pool.shape.dtype), pool.page_size, pool.shape.heads, pool.shape.dim),
         fmt::format("the job's is {} of {} [pages, {}, {}, {}], with all its parts", describe(format),
                     dtype_name(shape.dtype), page_size, shape.heads, shape.dim),
         "Job::format says how k and v are stored.");
  }
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format, shape)) {
    if (has_even_layout(stream, shape.dtype, pool.streams[at++])) continue;
    fail(ErrorCode::kUsage,
         fmt::format("{}_{} in pages has an odd number of bytes in a row or a stride", name, stream.name),
         "quantized pages are copied two bytes at a time", "Copy the pages to contiguous rows, or decode over them.");
  }
}

// A stream of a compressed cache as a plain cache of 16-bit elements.
CacheView as_16_bit(const CompressedCache& pool, const FormatStream& stream, const PagedStream& at) {
  return {at.data,
          Dtype::kBf16,
          pool.pages,
          pool.page_size,
          stream.heads,
          stream.token_bytes(pool.shape.dtype) / stream.heads / 2,
          at.page_stride / 2,
          at.token_stride / 2,
          at.head_stride / 2};
}

// The page pools of the job's streams: k, then v.
std::vector<CacheView> pools_of(const PagedKeys& keys, const Job& job) {
  std::vector<CacheView> pools;
  const auto add = [&](const RowFormat& format, const CacheView& plain, const CompressedCache& packed) {
    if (format.is_plain()) return pools.push_back(plain);
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(format, packed.shape)) {
      pools.push_back(as_16_bit(packed, stream, packed.streams[at++]));
    }
  };
  add(job.format.k, keys.k, keys.quantized_k);
  add(job.format.v, keys.v, keys.quantized_v);
  return pools;
}

void check_entries(const PagedKeys& keys, std::int64_t sequence, std::int64_t rows) {
  const std::int64_t needed = (rows + keys.page_size() - 1) / keys.page_size();
  if (needed > keys.max_pages) {
    fail(ErrorCode::kUsage,
         fmt::format("sequence {} lacks pages: it has {} keys here, which fill {} pages of {}", sequence, rows, needed,
                     keys.page_size()),
         fmt::format("a row of the block table has {}", keys.max_pages), "Give the block table more columns.");
  }
  const std::span<const std::int32_t> pages = keys.pages_of(sequence, rows);
  const auto outside = [&](std::int32_t page) { return page < 0 || page >= keys.pages(); };
  const auto found = std::find_if(pages.begin(), pages.end(), outside);
  if (found == pages.end()) return;
  fail(ErrorCode::kUsage,
       fmt::format("entry {} of sequence {} in the block table is page {}", found - pages.begin(), sequence, *found),
       fmt::format("the pool has {} pages", keys.pages()), "Pages are counted from 0.");
}

}  // namespace

std::vector<std::int64_t> rows_of_sequences(const Layout& keys, int rank) {
  std::vector<std::int64_t> rows(keys.cu().size() - 1, 0);
  for (const TokenRun& run : keys.runs(rank)) rows[static_cast<std::size_t>(run.sequence)] += run.tokens();
  return rows;
}

void check_paged_keys(const PagedKeys& keys, const Job& job, std::span<const std::int64_t> rows) {
  const auto check = [&](std::string_view name, const RowFormat& format, const RowShape& shape, const CacheView& plain,
                         const CompressedCache& packed) {
    if (format.is_plain()) {
      check_pool(name, plain, job.spec, job.page_size, static_cast<int>(shape.dim));
    } else {
      check_quantized_pool(name, packed, format, shape, job.page_size);
    }
    if ((format.is_plain() ? packed.streams[0].data : plain.data) != nullptr) {
      fail(ErrorCode::kUsage,
           fmt::format("the pool of {} is {}", name, format.is_plain() ? "compressed" : "uncompressed"),
           fmt::format("the job stores it as {}", describe(format)), "Job::format says how k and v are stored.");
    }
    return format.is_plain() ? plain.pages : packed.pages;
  };
  const std::int64_t k_pages = check("k", job.format.k, k_shape(job.spec), keys.k, keys.quantized_k);
  const std::int64_t v_pages = check("v", job.format.v, v_shape(job.spec), keys.v, keys.quantized_v);
  if (k_pages != v_pages) {
    fail(ErrorCode::kUsage, fmt::format("the pool of k has {} pages, that of v {}", k_pages, v_pages),
         "a token's key and value have the same index in both", "Give two pools of one size.");
  }
  const auto sequences = static_cast<std::int64_t>(rows.size());
  if (keys.max_pages < 0 ||
      static_cast<std::int64_t>(keys.block_table.size()) / std::max<std::int64_t>(1, sequences) < keys.max_pages) {
    fail(ErrorCode::kUsage, fmt::format("the block table has {} entries", keys.block_table.size()),
         fmt::format("{} sequences of {} pages have more", sequences, keys.max_pages),
         "Give it as [sequences, max_pages].");
  }
  for (std::int64_t s = 0; s < sequences; ++s) check_entries(keys, s, rows[static_cast<std::size_t>(s)]);
}

void map_pages(const PagedKeys& keys, std::int64_t page_rows, const Plan& plan, const BlockPlan& block,
               std::vector<PageRun>& tiles) {
  const std::int64_t page_size = keys.k.page_size;
  const std::int64_t piece_keys = plan.kernel.key_tile / page_runs_per_tile(plan.kernel.key_tile, page_size);
  tiles.clear();
  for (const KeyRun& run : block.key_runs) {
    const std::int64_t length = plan.key_lengths[static_cast<std::size_t>(run.sequence)];
    const std::span<const std::int32_t> pages = keys.pages_of(run.sequence, length);
    const std::int64_t end = (run.first_tile + run.tiles) * plan.kernel.key_tile;
    for (std::int64_t key = run.first_tile * plan.kernel.key_tile; key < end; key += piece_keys) {
      PageRun& piece = tiles.emplace_back(PageRun{kOwnShard, 0});
      if (key >= length) continue;  // the page has no keys and is not read
      piece.row = pages[static_cast<std::size_t>(key / page_size)] * page_rows + key % page_size;
    }
  }
}

void gather_pages(const PagedKeys& keys, const Job& job, std::span<const std::int64_t> rows_of_sequence,
                  Backend& backend, const StreamRows& rows, Stream stream) {
  const std::vector<CacheView> pools = pools_of(keys, job);
  for (std::size_t s = 0; s < rows.size(); ++s) {
    const CacheView& pool = pools[s];
    std::byte* target = rows[s];
    for (std::size_t sequence = 0; sequence < rows_of_sequence.size(); ++sequence) {
      const std::int64_t count = rows_of_sequence[sequence];
      backend.gather_pages(target, pool, keys.pages_of(static_cast<std::int64_t>(sequence), count), count, stream);
      target += count * pool.heads * pool.dim * static_cast<std::int64_t>(size_of(pool.dtype));
    }
  }
}

}  // namespace ringattn
