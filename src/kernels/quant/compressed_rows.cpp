// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/compressed_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/rank_liveness.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "kernels/decode/cache_update.hpp"
#include "kernels/quant/row_codec.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn {

namespace {

// Tokens per work item: a multiple of every group.
constexpr std::int64_t kItemTokens = 64;
constexpr std::int64_t kItemsPerHeartbeat = 1 << 10;  // between heartbeats

struct WorkItem {
  const CompressedRun* run = nullptr;
  std::int64_t first = 0;  // row of the run
  std::int64_t rows = 0;
  std::int64_t head = 0;
};

// Divides runs into work items of one head each.
std::vector<WorkItem> work_items(std::span<const CompressedRun> runs, std::int64_t heads) {
  std::vector<WorkItem> items;
  for (const CompressedRun& run : runs) {
    for (std::int64_t first = 0; first < run.rows; first += kItemTokens) {
      for (std::int64_t head = 0; head < heads; ++head) {
        items.push_back({&run, first, std::min(kItemTokens, run.rows - first), head});
      }
    }
  }
  return items;
}

// Calls work(codec, item) for all items, in `threads` threads.
template <class Work>
void for_each_item(const RowFormat& format, const RowShape& shape, const CompressedRows& rows,
                   const std::vector<WorkItem>& items, int threads, const Work& work) {
  const auto count = static_cast<std::int64_t>(items.size());
  for (std::int64_t begin = 0; begin < count; begin += kItemsPerHeartbeat) {
    heartbeat();
    const std::int64_t end = std::min(count, begin + kItemsPerHeartbeat);
#pragma omp parallel num_threads(threads)
    {
      RowCodec codec(format, shape, rows.tables);
#pragma omp for schedule(static)
      for (std::int64_t i = begin; i < end; ++i) work(codec, items[static_cast<std::size_t>(i)]);
    }
  }
  static_cast<void>(threads);
}

StreamRowAt rows_of(const CompressedRows& rows, const WorkItem& item) {
  return [&rows, &item](int stream, std::int64_t position) -> const std::byte* {
    return rows.streams[static_cast<std::size_t>(stream)].at(item.run->row + position - item.run->position, item.head);
  };
}

template <class View>
auto row_of(const View& view, const WorkItem& item) {
  return [&view, &item](std::int64_t position) {
    return view.at(item.run->to + position - item.run->position, item.head);
  };
}

[[noreturn]] void refuse(const std::string& what, const std::string& why) { fail(ErrorCode::kInternal, what, why); }

void check_runs(const RowFormat& format, std::span<const CompressedRun> runs, const TensorView& plain,
                const RowShape& shape) {
  check_format("a tensor", format, shape);
  if (plain.dtype != shape.dtype || plain.heads != shape.heads || plain.dim != shape.dim) {
    refuse(fmt::format("rows of {} [{}, {}]", dtype_name(plain.dtype), plain.heads, plain.dim),
           fmt::format("the task is of {} [{}, {}]", dtype_name(shape.dtype), shape.heads, shape.dim));
  }
  for (const CompressedRun& run : runs) {
    const std::int64_t end = run.position + run.rows;
    const bool whole = quantized_per_token(format) ||
                       (run.position % format.group == 0 && (end == run.keys || end % format.group == 0));
    if (run.rows >= 0 && run.position >= 0 && end <= run.keys && run.to >= 0 && run.to + run.rows <= plain.tokens &&
        whole) {
      continue;
    }
    refuse(fmt::format("tokens {} to {} of {} keys become rows {} to {}", run.position, end, run.keys, run.to,
                       run.to + run.rows),
           fmt::format("the rows are {}, and runs are whole groups", plain.tokens));
  }
}

}  // namespace

CompressedRows rows_at(std::span<std::byte* const> streams, std::span<std::byte* const> tables, const RowFormat& format,
                       const RowShape& shape) {
  CompressedRows rows;
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format, shape)) {
    const std::int64_t token = stream.token_bytes(shape.dtype);
    rows.streams[at] = {streams[at], token, token / stream.heads};
    ++at;
  }
  std::ranges::copy(tables, rows.tables.begin());
  return rows;
}

void check_task(const DecompressTask& task) { check_runs(task.format, task.runs, task.plain, task.shape); }

void check_task(const CompressTask& task) {
  check_runs(task.format, task.runs, task.plain, task.shape);
  if (task.format.encoding == RowEncoding::kLowRank) refuse("factors as a task", "a LowRankCodec makes them");
}

void decompress_on_host(const DecompressTask& task, int threads) {
  check_task(task);
  if (task.invalid != nullptr)
    note_invalid_element(*task.invalid, find_invalid_element(task.format, task.shape, task.from, task.runs));
  const std::int64_t stride = task.plain.token_stride * static_cast<std::int64_t>(size_of(task.shape.dtype));
  for_each_item(task.format, task.shape, task.from, work_items(task.runs, task.shape.heads), threads,
                [&](RowCodec& codec, const WorkItem& item) {
                  const CompressedRun& run = *item.run;
                  codec.decompress(rows_of(task.from, item), run.sequence, run.position + item.first, item.rows,
                                   run.keys, item.head, task.plain.at(run.to + item.first, item.head), stride);
                });
}

void compress_on_host(const CompressTask& task, int threads) {
  check_task(task);
  for (const CompressedRun& run : task.runs) {
    if (task.invalid == nullptr) break;
    TensorView rows = task.plain;
    rows.data = rows.at(run.to, 0);
    rows.tokens = run.rows;
    auto invalid = find_invalid_element(rows);
    if (invalid) invalid->token += run.to;
    note_invalid_element(*task.invalid, invalid);
  }
  for_each_item(task.format, task.shape, task.to, work_items(task.runs, task.shape.heads), threads,
                [&](RowCodec& codec, const WorkItem& item) {
                  const CompressedRun& run = *item.run;
                  codec.compress(rows_of(task.to, item), run.sequence, run.position + item.first, item.rows, run.keys,
                                 item.head, row_of(task.plain, item), row_of(task.products, item));
                });
}

void compute_absmax_on_host(const AbsmaxTask& task, int threads) {
  const TensorView& plain = task.plain;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t head = 0; head < plain.heads; ++head) {
    std::vector<float> row(static_cast<std::size_t>(plain.dim));
    for (std::int64_t token = 0; token < plain.tokens; ++token) {
      widen_row(plain.at(token, head), plain.dtype, plain.dim, row.data());
      for (const float value : row) task.greatest[head] = std::max(task.greatest[head], std::abs(value));
    }
  }
  static_cast<void>(threads);
}

void check_finite_on_host(const FiniteTask& task) {
  auto invalid = find_invalid_element(task.rows);
  if (!invalid) return;
  invalid->part = task.part;
  invalid->token += task.first;
  note_invalid_element(*task.invalid, invalid);
}

void append_on_host(const AppendTask& task) {
  const CacheUpdate& update = *task.update;
  const CompressedCache& cache = task.cache;
  if (task.invalid != nullptr) note_invalid_element(*task.invalid, find_invalid_element(task.rows));
  RowCodec codec(cache.format, cache.shape, cache.tables);
  for (std::int64_t s = 0; s < update.sequences; ++s) {
    if (out_of_range_entry(update, s).kind != OutOfRangeEntry::Kind::kNone) continue;
    for (int i = 0; i < update.rows; ++i) {
      const std::int64_t position = std::int64_t{update.lengths[s]} - update.rows + i;
      if (page_slot_of(update, s, position).page < 0) continue;
      for (std::int64_t head = 0; head < cache.shape.heads; ++head) {
        const StreamRowAt row_at = [&](int stream, std::int64_t token) -> const std::byte* {
          const PageSlot slot = page_slot_of(update, s, token);
          return cache.streams[static_cast<std::size_t>(stream)].at(slot.page, slot.token, head);
        };
        const auto new_row = [&](std::int64_t) { return task.rows.at(s * update.rows + i, head); };
        // The token is the last one of its sequence, so with groups of tokens it goes to the tail.
        codec.compress(row_at, s, position, 1, position, head, new_row, new_row);
        const std::int64_t group = cache.format.group;
        if (quantized_per_token(cache.format) || (position + 1) % group != 0) continue;
        const std::int64_t first = position + 1 - group;
        const auto row_bytes = cache.shape.dim * static_cast<std::int64_t>(size_of(cache.shape.dtype));
        const auto kept = [&](std::int64_t token) -> const std::byte* {
          return cache.tables[0] + ((s * group + token % group) * cache.shape.heads + head) * row_bytes;
        };
        codec.compress(row_at, s, first, group, position + 1, head, kept, kept);
      }
    }
  }
}

}  // namespace ringattn
