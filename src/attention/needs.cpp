// SPDX-License-Identifier: Apache-2.0
#include "attention/needs.hpp"

#include <algorithm>

namespace ringattn {

namespace {

std::int64_t query_tile_begin(std::int64_t position, int query_tile) {
  const std::int64_t begin = position / query_tile * query_tile;
  return begin > position ? begin - query_tile : begin;
}

// Key tiles of its sequence that any of `rows` consecutive rows folds (folded_tiles() of each of them). Neighbouring
// rows see overlapping or adjacent keys, so the union has no holes and is what one large query tile would fold.
TileRange folded_tiles_of_rows(const Mask& mask, std::int64_t position, std::int64_t rows, std::int64_t key_length,
                               int query_tile, int key_tile) {
  const std::int64_t first = query_tile_begin(position, query_tile);
  const std::int64_t last = query_tile_begin(position + rows - 1, query_tile) + query_tile - 1;
  const std::int64_t begin = visible_keys(mask, first, key_length).begin;
  const std::int64_t end = visible_keys(mask, last, key_length).end;
  if (begin >= end) return {0, 0};
  return {begin / key_tile, (end + key_tile - 1) / key_tile};
}

}  // namespace

Needs::Needs(const Job& job, const JobLayout& layout, const TileAxis& axis, int query_tile, int key_tile)
    : keys_(&layout.keys),
      axis_(&axis),
      spans_(static_cast<std::size_t>(layout.queries.world())),
      scattered_tokens_{0} {
  scattered_tokens_.reserve(static_cast<std::size_t>(axis.tiles()) + 1);
  auto run = layout.keys.owners().begin();
  for (std::int64_t tile = 0; tile < axis.tiles(); ++tile) {
    const std::int64_t end = axis.token(tile + 1);
    while (run->end() <= axis.token(tile)) ++run;
    scattered_tokens_.push_back(scattered_tokens_.back() + (run->end() < end ? end - axis.token(tile) : 0));
  }

  for (int rank = 0; rank < world(); ++rank) {
    std::vector<Span>& spans = spans_[static_cast<std::size_t>(rank)];
    for (const TokenRun& queries : layout.queries.runs(rank)) {
      const Sequence& s = job.sequences[static_cast<std::size_t>(queries.sequence)];
      TileRange tiles = folded_tiles_of_rows(job.spec.mask, s.q_offset + queries.begin, queries.tokens(), s.k_len,
                                             query_tile, key_tile);
      if (tiles.empty()) continue;
      tiles.begin += axis.first(queries.sequence);
      tiles.end += axis.first(queries.sequence);
      if (!spans.empty() && tiles.begin <= spans.back().tiles.end) {
        spans.back().tiles.end = std::max(spans.back().tiles.end, tiles.end);
      } else {
        spans.push_back({tiles, {}});
      }
    }
    for (std::size_t i = 1; i < spans.size(); ++i) {
      const Span& last = spans[i - 1];
      const BufferRows rows = rows_of(rank, last.tiles.begin, last.tiles.end);
      spans[i].before = {last.before.received + rows.received, last.before.all + rows.all};
    }
  }
}

std::vector<TileRange> Needs::spans(int rank) const { return spans(rank, 0, axis_->tiles()); }

std::vector<TileRange> Needs::spans(int rank, std::int64_t first, std::int64_t last) const {
  const std::vector<Span>& all = spans_[static_cast<std::size_t>(rank)];
  std::vector<TileRange> inside;
  auto span = std::partition_point(all.begin(), all.end(), [&](const Span& s) { return s.tiles.end <= first; });
  for (; span != all.end() && span->tiles.begin < last; ++span) {
    inside.push_back({std::max(first, span->tiles.begin), std::min(last, span->tiles.end)});
  }
  return inside;
}

std::int64_t Needs::scattered(std::int64_t first, std::int64_t last) const {
  return scattered_tokens_[static_cast<std::size_t>(last)] - scattered_tokens_[static_cast<std::size_t>(first)];
}

std::int64_t Needs::most_buffer_rows(std::int64_t first, std::int64_t last) const {
  return axis_->token(last) - axis_->token(first) + scattered(first, last);
}

BufferRows Needs::rows_of(int rank, std::int64_t first, std::int64_t last) const {
  const std::int64_t begin = axis_->token(first);
  const std::int64_t end = axis_->token(last);
  const std::int64_t own = keys_->rows_before(rank, end) - keys_->rows_before(rank, begin);
  return {end - begin - own, end - begin - own + scattered(first, last)};
}

BufferRows Needs::rows_before(int rank, std::int64_t tile) const {
  const std::vector<Span>& all = spans_[static_cast<std::size_t>(rank)];
  const auto after = std::partition_point(all.begin(), all.end(), [&](const Span& s) { return s.tiles.begin < tile; });
  if (after == all.begin()) return {};
  const Span& span = *std::prev(after);
  const BufferRows rows = rows_of(rank, span.tiles.begin, std::min(tile, span.tiles.end));
  return {span.before.received + rows.received, span.before.all + rows.all};
}

BufferRows Needs::buffer_rows(int rank, std::int64_t first, std::int64_t last) const {
  const BufferRows begin = rows_before(rank, first);
  const BufferRows end = rows_before(rank, last);
  return {end.received - begin.received, end.all - begin.all};
}

BufferRows Needs::largest_buffer_rows(std::int64_t first, std::int64_t last) const {
  BufferRows largest;
  for (int rank = 0; rank < world(); ++rank) {
    const BufferRows rows = buffer_rows(rank, first, last);
    largest.received = std::max(largest.received, rows.received);
    largest.all = std::max(largest.all, rows.all);
  }
  return largest;
}

bool Needs::is_scattered(std::int64_t tile) const { return scattered(tile, tile + 1) > 0; }

}  // namespace ringattn
