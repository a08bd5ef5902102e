// SPDX-License-Identifier: Apache-2.0
// A rank's keys and values in the pages of a KV cache, as a caller passes them to Attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/plan.hpp"
#include "attention/ring/row_stream.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/quant/compressed_rows.hpp"

namespace ringattn {

// Key i of a sequence means here the i-th of the keys that this rank holds, in ascending order over its runs. On one
// rank these are all keys of the sequence.
struct PagedKeys {
  CacheView k;  // [pages, page_size, kv_heads, head_dim], in the kernel's kind of memory
  CacheView v;  // [pages, page_size, kv_heads, head_dim_v]; same pages and page size as k, any strides
  // [sequences, max_pages] in host memory, read before a call returns. Keys [i · page_size, (i + 1) · page_size) of
  // sequence s lie in page block_table[s · max_pages + i]. Sequences may share pages. Entries after a sequence's last
  // page are not read.
  std::span<const std::int32_t> block_table;
  std::int64_t max_pages = 0;
  // Instead of k and v, exactly if Job::format is not plain; the tables are those of Inputs::quantized_k.
  CompressedCache quantized_k{};
  CompressedCache quantized_v{};

  std::int64_t pages() const { return quantized_k.pages > 0 ? quantized_k.pages : k.pages; }
  std::int64_t page_size() const { return quantized_k.page_size > 0 ? quantized_k.page_size : k.page_size; }

  // Block table entries of a sequence with `rows` keys on this rank.
  std::span<const std::int32_t> pages_of(std::int64_t sequence, std::int64_t rows) const {
    return block_table.subspan(static_cast<std::size_t>(sequence * max_pages),
                               static_cast<std::size_t>((rows + page_size() - 1) / page_size()));
  }
};

// [sequences] number of keys of each sequence that a rank holds.
std::vector<std::int64_t> rows_of_sequences(const Layout& keys, int rank);

// Throws kUsage if the pools don't fit the job or each other, or if a sequence, of which the rank has rows[s] keys,
// lacks a page or names one outside of the pool.
void check_paged_keys(const PagedKeys& keys, const Job& job, std::span<const std::int64_t> rows);

// Maps the tiles of a block to pages, for a rank that has all keys: AttentionTask::tiles, with page_runs_per_tile()
// runs per tile. `page_rows` is that of their PoolSource.
void map_pages(const PagedKeys& keys, std::int64_t page_rows, const Plan& plan, const BlockPlan& block,
               std::vector<PageRun>& tiles);

// Copies the rank's keys and values to `rows`, contiguous in the order of its shard, one stream each. Ordered on
// `stream`.
void gather_pages(const PagedKeys& keys, const Job& job, std::span<const std::int64_t> rows_of_sequence,
                  Backend& backend, const StreamRows& rows, Stream stream);

}  // namespace ringattn
