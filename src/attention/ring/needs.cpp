// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/needs.hpp"

#include <algorithm>

namespace ringattn {

namespace {

BufferRows operator+(const BufferRows& a, const BufferRows& b) { return {a.received + b.received, a.all + b.all}; }

}  // namespace

Needs::Needs(const RingWork& work, const JobLayout& layout, const TileAxis& axis, int query_tile, int key_tile)
    : keys_(&layout.keys), axis_(&axis), spans_(static_cast<std::size_t>(layout.queries.world())) {
  find_scattered();
  find_spans(work, layout.queries, query_tile, key_tile);
}

void Needs::find_scattered() {
  scattered_tokens_.reserve(static_cast<std::size_t>(axis_->tiles()) + 1);
  scattered_tokens_.push_back(0);
  auto run = keys_->owners().begin();
  for (std::int64_t tile = 0; tile < axis_->tiles(); ++tile) {
    const std::int64_t begin = axis_->token(tile);
    const std::int64_t end = axis_->token(tile + 1);
    while (run->end() <= begin) ++run;
    scattered_tokens_.push_back(scattered_tokens_.back() + (run->end() < end ? end - begin : 0));
  }
}

template <class Need>
void Needs::for_each_mask_block(const RingWork& work, const TokenRun& queries, const TileSizes& sizes,
                                Need need) const {
  const BlockMask& block_mask = *work.block_mask;
  const int block_size = block_mask.shape().query_block;
  const auto sequence = static_cast<std::size_t>(queries.sequence);
  const Sequence& s = work.batch.sequences[sequence];
  const std::int64_t end = s.q_offset + queries.end;
  for (std::int64_t position = s.q_offset + queries.begin; position < end;) {
    const std::int64_t block = query_block_of(position, block_size);
    const std::int64_t rows = std::min(end, (block + 1) * block_size) - position;
    const TileRange seen = Visibility(work.mask, s.k_len).tiles(position, rows, sizes);
    for (int head = 0; head < block_mask.shape().heads; ++head) {
      for_each_masked_tile_run(block_mask, work.mask, sizes.key, sequence, head, block, [&](const MaskedTileRun& run) {
        const TileRange tiles{std::max(seen.begin, run.tiles.begin), std::min(seen.end, run.tiles.end)};
        if (!tiles.empty()) need(tiles);
      });
    }
    position += rows;
  }
}

void Needs::find_spans(const RingWork& work, const Layout& queries, int query_tile, int key_tile) {
  std::vector<bool> selected;  // [tiles] selected by the block mask for any of the rank's queries
  for (int rank = 0; rank < world(); ++rank) {
    std::vector<Span>& spans = spans_[static_cast<std::size_t>(rank)];
    const auto add = [&spans](const TileRange& tiles) {
      if (!spans.empty() && tiles.begin <= spans.back().tiles.end) {
        spans.back().tiles.end = std::max(spans.back().tiles.end, tiles.end);
      } else {
        spans.push_back({tiles, {}});
      }
    };
    if (work.block_mask != nullptr) selected.assign(static_cast<std::size_t>(axis_->tiles()), false);
    for (const TokenRun& run : queries.runs(rank)) {
      const std::int64_t origin = axis_->first(run.sequence);
      if (work.block_mask != nullptr) {
        for_each_mask_block(work, run, {query_tile, key_tile}, [&](const TileRange& tiles) {
          std::fill(selected.begin() + origin + tiles.begin, selected.begin() + origin + tiles.end, true);
        });
        continue;
      }
      const auto sequence = static_cast<std::size_t>(run.sequence);
      const Sequence& s = work.batch.sequences[sequence];
      const std::int64_t zero = work.tiles_by_query ? s.q_offset : 0;  // the position from which query tiles count
      const std::int64_t first = query_tile_begin(s.q_offset + run.begin - zero, query_tile);
      const std::int64_t last = query_tile_begin(s.q_offset + run.end - 1 - zero, query_tile) + query_tile;
      const TileRange tiles = work.visibility(sequence).tiles(first + zero, last - first, {1, key_tile});
      if (tiles.empty()) continue;
      // The positions before k_begin belong to the first tile, but hold no keys.
      const bool any_key =
          s.k_begin == 0 || work.visibility(sequence).pairs(first + zero, last - first, {s.k_begin, s.k_len}) > 0.0;
      if (any_key) add({origin + tiles.begin, origin + tiles.end});
    }
    for (std::size_t tile = 0; tile < selected.size(); ++tile) {
      const auto number = static_cast<std::int64_t>(tile);
      if (selected[tile]) add({number, number + 1});
    }
    for (std::size_t i = 1; i < spans.size(); ++i) {
      const Span& last = spans[i - 1];
      spans[i].before = last.before + rows_of_needed(rank, last.tiles.begin, last.tiles.end);
    }
  }
}

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

BufferRows Needs::rows_of_needed(int rank, std::int64_t first, std::int64_t last) const {
  const std::int64_t own = keys_->rows_before(rank, axis_->token(last)) - keys_->rows_before(rank, axis_->token(first));
  const std::int64_t received = axis_->token(last) - axis_->token(first) - own;
  return {received, received + scattered(first, last)};
}

BufferRows Needs::rows_before(int rank, std::int64_t tile) const {
  const std::vector<Span>& all = spans_[static_cast<std::size_t>(rank)];
  const auto after = std::partition_point(all.begin(), all.end(), [&](const Span& s) { return s.tiles.begin < tile; });
  if (after == all.begin()) return {};
  const Span& span = *std::prev(after);
  return span.before + rows_of_needed(rank, span.tiles.begin, std::min(tile, span.tiles.end));
}

BufferRows Needs::largest(std::int64_t first, std::int64_t last) const {
  BufferRows largest_rows;
  for (int rank = 0; rank < world(); ++rank) {
    const BufferRows begin = rows_before(rank, first);
    const BufferRows end = rows_before(rank, last);
    largest_rows.received = std::max(largest_rows.received, end.received - begin.received);
    largest_rows.all = std::max(largest_rows.all, end.all - begin.all);
  }
  return largest_rows;
}

BufferRows Needs::bound(std::int64_t first, std::int64_t last) const {
  const std::int64_t tokens = axis_->token(last) - axis_->token(first);
  return {tokens, tokens + scattered(first, last)};
}

}  // namespace ringattn
