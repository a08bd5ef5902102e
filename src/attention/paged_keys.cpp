// SPDX-License-Identifier: Apache-2.0
#include "attention/paged_keys.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

void check_pool(std::string_view name, const CacheView& pool, const FoldSpec& spec, std::int64_t page_size, int dim) {
  if (pool.dtype == spec.dtype && pool.page_size == page_size && pool.heads == spec.kv_heads && pool.dim == dim) return;
  fail(ErrorCode::kUsage,
       fmt::format("the pool of {} is {} [pages, {}, {}, {}]", name, dtype_name(pool.dtype), pool.page_size, pool.heads,
                   pool.dim),
       fmt::format("the job has {} [pages, {}, {}, {}]", dtype_name(spec.dtype), page_size, spec.kv_heads, dim),
       "Axes in another order are named by strides.");
}

void check_entries(const PagedKeys& keys, std::int64_t sequence, std::int64_t rows) {
  const std::int64_t needed = (rows + keys.k.page_size - 1) / keys.k.page_size;
  if (needed > keys.max_pages) {
    fail(ErrorCode::kUsage,
         fmt::format("sequence {} lacks pages: it has {} keys here, which fill {} pages of {}", sequence, rows, needed,
                     keys.k.page_size),
         fmt::format("a row of the block table has {}", keys.max_pages), "Give the block table more columns.");
  }
  const std::span<const std::int32_t> pages = keys.pages_of(sequence, rows);
  const auto outside = [&](std::int32_t page) { return page < 0 || page >= keys.k.pages; };
  const auto found = std::find_if(pages.begin(), pages.end(), outside);
  if (found == pages.end()) return;
  fail(ErrorCode::kUsage,
       fmt::format("entry {} of sequence {} in the block table is page {}", found - pages.begin(), sequence, *found),
       fmt::format("the pool has {} pages", keys.k.pages), "Pages are counted from 0.");
}

}  // namespace

std::vector<std::int64_t> rows_of_sequences(const Layout& keys, int rank) {
  std::vector<std::int64_t> rows(keys.cu().size() - 1, 0);
  for (const TokenRun& run : keys.runs(rank)) rows[static_cast<std::size_t>(run.sequence)] += run.tokens();
  return rows;
}

void check_paged_keys(const PagedKeys& keys, const FoldSpec& spec, std::int64_t page_size,
                      std::span<const std::int64_t> rows) {
  check_pool("k", keys.k, spec, page_size, spec.head_dim);
  check_pool("v", keys.v, spec, page_size, spec.head_dim_v);
  if (keys.k.pages != keys.v.pages) {
    fail(ErrorCode::kUsage, fmt::format("the pool of k has {} pages, that of v {}", keys.k.pages, keys.v.pages),
         "a token's key and value lie at the same place of both", "Give two pools of one size.");
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
               std::vector<KeyTile>& tiles) {
  const std::int64_t page_size = keys.k.page_size;
  const std::int64_t piece_keys = plan.kernel.key_tile / pieces_of_tile(plan.kernel.key_tile, page_size);
  tiles.clear();
  for (const KeyRun& run : block.key_runs) {
    const std::int64_t length = plan.key_lengths[static_cast<std::size_t>(run.sequence)];
    const std::span<const std::int32_t> pages = keys.pages_of(run.sequence, length);
    const std::int64_t end = (run.first_tile + run.tiles) * plan.kernel.key_tile;
    for (std::int64_t key = run.first_tile * plan.kernel.key_tile; key < end; key += piece_keys) {
      KeyTile& piece = tiles.emplace_back(KeyTile{kOwnShard, 0});
      if (key >= length) continue;  // it holds no key, and is not read
      piece.row = pages[static_cast<std::size_t>(key / page_size)] * page_rows + key % page_size;
    }
  }
}

void gather_pages(const PagedKeys& keys, std::span<const std::int64_t> rows_of_sequence, Backend& backend,
                  const StreamRows& rows, Stream stream) {
  const CacheView* const pools[] = {&keys.k, &keys.v};
  for (std::size_t s = 0; s < rows.size(); ++s) {
    const CacheView& pool = *pools[s];
    std::byte* target = rows[s];
    for (std::size_t sequence = 0; sequence < rows_of_sequence.size(); ++sequence) {
      const std::int64_t count = rows_of_sequence[sequence];
      backend.gather_pages(target, pool, keys.pages_of(static_cast<std::int64_t>(sequence), count), count, stream);
      target += count * pool.heads * pool.dim * static_cast<std::int64_t>(size_of(pool.dtype));
    }
  }
}

}  // namespace ringattn
