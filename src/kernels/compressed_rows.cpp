// SPDX-License-Identifier: Apache-2.0
#include "kernels/compressed_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/rank_liveness.hpp"
#include "kernels/cache_partition.hpp"
#include "kernels/cache_update.hpp"
#include "kernels/row_codec.hpp"
#include "kernels/row_quantization.hpp"

namespace ringattn {

namespace {

// Tokens that are coded at a time: a multiple of every group.
constexpr std::int64_t kStagedTokens = 64;
constexpr std::int64_t kPiecesAtOnce = 1 << 10;  // between which the rank shows that it works

struct Piece {
  const CompressedRun* run = nullptr;
  std::int64_t first = 0;  // row of the run
  std::int64_t rows = 0;
  std::int64_t head = 0;
};

// Runs cut into pieces, for one head each.
std::vector<Piece> cut(std::span<const CompressedRun> runs, std::int64_t heads) {
  std::vector<Piece> pieces;
  for (const CompressedRun& run : runs) {
    for (std::int64_t first = 0; first < run.rows; first += kStagedTokens) {
      for (std::int64_t head = 0; head < heads; ++head) {
        pieces.push_back({&run, first, std::min(kStagedTokens, run.rows - first), head});
      }
    }
  }
  return pieces;
}

// Calls work(codec, piece) for all of them, by so many threads.
template <class Work>
void for_pieces(const RowFormat& format, const RowShape& shape, const CompressedRows& rows,
                const std::vector<Piece>& pieces, int threads, const Work& work) {
  const auto count = static_cast<std::int64_t>(pieces.size());
  for (std::int64_t begin = 0; begin < count; begin += kPiecesAtOnce) {
    heartbeat();
    const std::int64_t end = std::min(count, begin + kPiecesAtOnce);
#pragma omp parallel num_threads(threads)
    {
      RowCodec codec(format, shape, rows.tables);
#pragma omp for schedule(static)
      for (std::int64_t i = begin; i < end; ++i) work(codec, pieces[static_cast<std::size_t>(i)]);
    }
  }
  static_cast<void>(threads);
}

StreamRowAt rows_of(const CompressedRows& rows, const Piece& piece) {
  return [&rows, &piece](int stream, std::int64_t position) -> const std::byte* {
    return rows.streams[static_cast<std::size_t>(stream)].at(piece.run->row + position - piece.run->position,
                                                             piece.head);
  };
}

template <class View>
auto row_of(const View& view, const Piece& piece) {
  return [&view, &piece](std::int64_t position) {
    return view.at(piece.run->to + position - piece.run->position, piece.head);
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
  if (task.fault != nullptr)
    note_invalid_element(*task.fault, find_invalid_element(task.format, task.shape, task.from, task.runs));
  const std::int64_t stride = task.plain.token_stride * static_cast<std::int64_t>(size_of(task.shape.dtype));
  for_pieces(task.format, task.shape, task.from, cut(task.runs, task.shape.heads), threads,
             [&](RowCodec& codec, const Piece& piece) {
               const CompressedRun& run = *piece.run;
               codec.decompress(rows_of(task.from, piece), run.sequence, run.position + piece.first, piece.rows,
                                run.keys, piece.head, task.plain.at(run.to + piece.first, piece.head), stride);
             });
}

void compress_on_host(const CompressTask& task, int threads) {
  check_task(task);
  for (const CompressedRun& run : task.runs) {
    if (task.fault == nullptr) break;
    TensorView rows = task.plain;
    rows.data = rows.at(run.to, 0);
    rows.tokens = run.rows;
    auto fault = find_invalid_element(rows);
    if (fault) fault->token += run.to;
    note_invalid_element(*task.fault, fault);
  }
  for_pieces(task.format, task.shape, task.to, cut(task.runs, task.shape.heads), threads,
             [&](RowCodec& codec, const Piece& piece) {
               const CompressedRun& run = *piece.run;
               codec.compress(rows_of(task.to, piece), run.sequence, run.position + piece.first, piece.rows, run.keys,
                              piece.head, row_of(task.plain, piece), row_of(task.products, piece));
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
  auto fault = find_invalid_element(task.rows);
  if (!fault) return;
  fault->part = task.part;
  fault->token += task.first;
  note_invalid_element(*task.fault, fault);
}

void append_on_host(const AppendTask& task) {
  const CacheUpdate& places = *task.update;
  const CompressedCache& cache = task.cache;
  if (task.fault != nullptr) note_invalid_element(*task.fault, find_invalid_element(task.rows));
  RowCodec codec(cache.format, cache.shape, cache.tables);
  for (std::int64_t s = 0; s < places.sequences; ++s) {
    if (out_of_range_entry(places, s).kind != OutOfRangeEntry::Kind::kNone) continue;
    for (int i = 0; i < places.rows; ++i) {
      const std::int64_t position = std::int64_t{places.lengths[s]} - places.rows + i;
      if (page_slot_of(places, s, position).page < 0) continue;
      for (std::int64_t head = 0; head < cache.shape.heads; ++head) {
        const StreamRowAt row_at = [&](int stream, std::int64_t token) -> const std::byte* {
          const PageSlot place = page_slot_of(places, s, token);
          return cache.streams[static_cast<std::size_t>(stream)].at(place.page, place.token, head);
        };
        const auto new_row = [&](std::int64_t) { return task.rows.at(s * places.rows + i, head); };
        // As the last of its sequence: of groups of tokens, in the tail.
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
