// SPDX-License-Identifier: Apache-2.0
// A rank's keys and values in the pages of a cache, as a caller passes them to Attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/ring/plan.hpp"
#include "attention/ring/row_stream.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/attention.hpp"
#include "kernels/cache_view.hpp"
#include "kernels/compressed_rows.hpp"

namespace ringattn {

// The keys of a sequence that the rank has, in ascending order, are key 0, 1, … of the sequence here: those of all its
// runs, one behind the other. On one rank they are all keys of the sequence.
struct PagedKeys {
  CacheView k;  // [pages, page_size, kv_heads, head_dim], in the kernel's kind of memory
  CacheView v;  // [pages, page_size, kv_heads, head_dim_v], as many pages of as many tokens; strides of its own
  // [sequences, max_pages] in host memory, read before a call returns: keys [i · page_size, (i + 1) · page_size) of
  // sequence s lie in page block_table[s · max_pages + i]. Pages may lie anywhere in the pool, and sequences may share
  // them. What stands behind a sequence's last page is not read, nor is any page that no sequence has.
  std::span<const std::int32_t> block_table;
  std::int64_t max_pages = 0;
  // Instead of k, and of v, exactly where Job::format is not plain; tables are those of Inputs::quantized_k.
  CompressedCache quantized_k{};
  CompressedCache quantized_v{};

  std::int64_t pages() const { return quantized_k.pages > 0 ? quantized_k.pages : k.pages; }
  std::int64_t page_size() const { return quantized_k.page_size > 0 ? quantized_k.page_size : k.page_size; }

  // The pages of a sequence that has `rows` keys here.
  std::span<const std::int32_t> pages_of(std::int64_t sequence, std::int64_t rows) const {
    return block_table.subspan(static_cast<std::size_t>(sequence * max_pages),
                               static_cast<std::size_t>((rows + page_size() - 1) / page_size()));
  }
};

// Keys of each sequence that a rank has: [sequences].
std::vector<std::int64_t> rows_of_sequences(const Layout& keys, int rank);

// Throws kUsage where the pools don't fit the job or each other, and where a sequence, of which the rank has rows[s]
// keys, lacks a page or names one that the pool doesn't have.
void check_paged_keys(const PagedKeys& keys, const Job& job, std::span<const std::int64_t> rows);

// The map of a block's tiles, of a rank that has all keys: AttentionTask::tiles, in page_runs_per_tile() pieces.
// `page_rows` is that of their PoolSource.
void map_pages(const PagedKeys& keys, std::int64_t page_rows, const Plan& plan, const BlockPlan& block,
               std::vector<PageRun>& tiles);

// Copies the rank's keys and values side by side to `rows`, as the job's streams and in the order of its shard. Ordered
// on `stream`.
void gather_pages(const PagedKeys& keys, const Job& job, std::span<const std::int64_t> rows_of_sequence,
                  Backend& backend, const StreamRows& rows, Stream stream);

}  // namespace ringattn
