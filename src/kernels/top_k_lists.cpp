// SPDX-License-Identifier: Apache-2.0
#include "kernels/top_k_lists.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "kernels/block_score.hpp"
#include "kernels/list_makers.hpp"

namespace ringattn {

RowPool::RowPool(std::int64_t position, std::int64_t rows, int heads, int dim, int block)
    : position_(position), begin_(position), end_(position + rows), block_(block) {
  pooled_.heads = heads;
  pooled_.dim = dim;
  if (rows > 0) {
    pooled_.first = query_block_of(position, block);
    pooled_.blocks = query_block_of(end_ - 1, block) + 1 - pooled_.first;
  }
  pooled_.means.assign(static_cast<std::size_t>(pooled_.blocks * heads * dim), 0.0F);
}

void RowPool::add(const TensorView& rows) {
  if (rows.heads != pooled_.heads || rows.dim != pooled_.dim || position_ + rows.tokens > end_) {
    fail(ErrorCode::kInternal, "rows to be pooled have another shape", "the pool was made for fewer, or for others");
  }
  for (std::int64_t i = 0; i < rows.tokens; ++i, ++position_) {
    const std::int64_t block = query_block_of(position_, block_) - pooled_.first;
    float* sum = pooled_.means.data() + block * pooled_.heads * pooled_.dim;
    for (std::int64_t head = 0; head < pooled_.heads; ++head) {
      const std::byte* at = rows.at(i, head);
      for (std::int64_t d = 0; d < pooled_.dim; ++d, ++sum, at += size_of(rows.dtype)) {
        *sum += load_element(at, rows.dtype);
      }
    }
  }
}

PooledRows RowPool::finish() {
  const auto width = static_cast<std::int64_t>(pooled_.heads) * pooled_.dim;
  for (std::int64_t block = 0; block < pooled_.blocks; ++block) {
    const std::int64_t first = (pooled_.first + block) * block_;
    const std::int64_t rows = std::min(end_, first + block_) - std::max(begin_, first);
    const float factor = 1.0F / static_cast<float>(rows);
    float* const means = pooled_.means.data() + block * width;
    for (std::int64_t i = 0; i < width; ++i) means[i] *= factor;
  }
  return std::move(pooled_);
}

void score_means(const FoldSpec& spec, const PooledSequence& sequence, std::int64_t query_block, int head, int heads,
                 std::int64_t first, std::span<float> scores) {
  const MeanScore score{spec.softmax_scale};
  std::fill(scores.begin(), scores.end(), 0.0F);
  for (int h = head; h < head + heads; ++h) {
    const std::span<const float> q = sequence.q.row(query_block, h);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const std::span<const float> k =
          sequence.k.row(first + static_cast<std::int64_t>(i), h / (spec.heads / spec.kv_heads));
      scores[i] += score.of_head(mean_product(q.data(), k.data(), static_cast<std::int64_t>(q.size())));
    }
  }
}

namespace {

// The key blocks that the mask lets queries at these positions see.
TileRange seen_blocks(const Mask& mask, std::int64_t keys, const KeyRange& positions, int key_block) {
  return tiles_of(Visibility(mask, keys).keys(positions.begin, positions.end - 1), key_block);
}

void check_count(int count) {
  if (count >= 1) return;
  fail(ErrorCode::kUsage, fmt::format("lists of the best {} blocks", count), "a list names at least one",
       "Use 1 or more.");
}

}  // namespace

void check_top_k(const FoldSpec& spec, const ListShape& shape, std::span<const ListedSequence> sequences, int count,
                 const ListRoom& room) {
  check_count(count);
  const std::int64_t lists = count_lists(shape, sequences, room);
  std::int64_t entries = 0;
  for (const ListedSequence& of : sequences) {
    if (of.queries == 0) continue;
    const std::int64_t end = of.position + of.queries;
    for (std::int64_t q = query_block_of(of.position, shape.query_block); q * shape.query_block < end; ++q) {
      const std::int64_t begin = q * shape.query_block;
      const KeyRange positions{std::max(begin, of.position), std::min(begin + shape.query_block, end)};
      const TileRange seen = seen_blocks(spec.mask, of.keys, positions, shape.key_block);
      if (seen.empty()) continue;
      entries += std::min<std::int64_t>(std::max(count, 2), seen.end - seen.begin) * shape.heads;
    }
    check_room(shape, list_bytes(lists, entries), room);
  }
}

TileLists top_k_lists(const FoldSpec& spec, const ListShape& shape, std::vector<ListedSequence> sequences,
                      std::span<const PooledSequence> pooled, int count, BlockScorer score) {
  check_count(count);
  bool fits = pooled.size() == sequences.size() && shape.any() && shape.heads > 0 && spec.heads % shape.heads == 0;
  for (std::size_t s = 0; fits && s < pooled.size(); ++s) {
    const ListedSequence& of = sequences[s];
    const std::int64_t blocks = of.queries == 0 ? 0
                                                : query_block_of(of.position + of.queries - 1, shape.query_block) + 1 -
                                                      query_block_of(of.position, shape.query_block);
    fits = pooled[s].q.blocks == blocks && pooled[s].k.first == 0 &&
           pooled[s].k.blocks == (of.keys + shape.key_block - 1) / shape.key_block && pooled[s].q.heads == spec.heads &&
           pooled[s].k.heads == spec.kv_heads;
  }
  if (!fits) {
    fail(ErrorCode::kUsage, "the means of blocks are those of other sequences or blocks",
         "their number, heads or blocks differ", "Pool each sequence's rows by the blocks of the lists.");
  }
  const int heads = spec.heads / shape.heads;
  std::vector<float> scores;
  std::vector<std::int32_t> order;
  const auto best = [&](const ListPlace& place, std::vector<std::int32_t>& blocks) {
    const TileRange seen = seen_blocks(spec.mask, place.keys, place.positions, shape.key_block);
    if (seen.empty()) return;
    scores.resize(static_cast<std::size_t>(seen.end - seen.begin));
    score(spec, pooled[place.sequence], place.block, place.head * heads, heads, seen.begin, scores);
    const std::int64_t diagonal = std::clamp((place.positions.end - 1) / shape.key_block, seen.begin, seen.end - 1);
    blocks.push_back(static_cast<std::int32_t>(seen.begin));
    blocks.push_back(static_cast<std::int32_t>(diagonal));
    order.resize(scores.size());
    std::iota(order.begin(), order.end(), 0);
    const auto before = [&](std::int32_t a, std::int32_t b) {
      const std::uint32_t x = order_of_score(scores[static_cast<std::size_t>(a)]);
      const std::uint32_t y = order_of_score(scores[static_cast<std::size_t>(b)]);
      return x != y ? x > y : a < b;
    };
    const auto most = std::min<std::size_t>(order.size(), static_cast<std::size_t>(count));
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(most), order.end(), before);
    const std::size_t forced = diagonal == seen.begin ? 1 : 2;
    for (std::size_t i = 0; i < most && blocks.size() < std::max(most, forced); ++i) {
      const auto block = static_cast<std::int32_t>(seen.begin + order[i]);
      if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) blocks.push_back(block);
    }
  };
  ListRoom room;
  room.counted = true;  // check_top_k() does, and scores take a while
  return make_lists(shape, std::move(sequences), best, room);
}

}  // namespace ringattn
