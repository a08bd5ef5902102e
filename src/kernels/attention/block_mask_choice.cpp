// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/block_mask_choice.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"
#include "kernels/attention/block_score.hpp"

namespace ringattn {

namespace {

// Scores the candidate key blocks for the query heads [head, head + heads) of a query block.
void score_blocks(const BlockMaskChoice& choice, std::int64_t query_block, int head, int heads, std::int64_t first,
                  std::span<float> scores) {
  const AttentionSpec& spec = choice.spec;
  const MeanScore score{spec.softmax_scale};
  std::fill(scores.begin(), scores.end(), 0.0F);
  for (int h = head; h < head + heads; ++h) {
    const float* const q = choice.q + (query_block * spec.heads + h) * spec.head_dim;
    const int kv_head = h / (spec.heads / spec.kv_heads);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const std::int64_t block = first + static_cast<std::int64_t>(i);
      const float* const k = choice.k + (block * spec.kv_heads + kv_head) * spec.head_dim;
      scores[i] += score.of_head(mean_product(q, k, spec.head_dim));
    }
  }
}

}  // namespace

void check_row_pooling(const RowPooling& pooling) {
  const std::int64_t end = pooling.position + pooling.rows.tokens;
  const bool fits = pooling.block >= 1 && pooling.positions.begin <= pooling.position && end <= pooling.positions.end;
  if (!fits) fail(ErrorCode::kInternal, "rows are pooled for another sequence", "it ends before them, or begins later");
}

void pool_host_rows(const RowPooling& pooling) {
  check_row_pooling(pooling);
  const TensorView& rows = pooling.rows;
  const std::int64_t width = rows.heads * rows.dim;
  for (std::int64_t i = 0; i < rows.tokens; ++i) {
    const std::int64_t position = pooling.position + i;
    const std::int64_t begin = query_tile_begin(position, pooling.block);
    const KeyRange own{std::max(begin, pooling.positions.begin),
                       std::min(begin + pooling.block, pooling.positions.end)};
    float* const sums = pooling.means + (begin / pooling.block - pooling.first) * width;
    if (position == own.begin) std::fill_n(sums, width, 0.0F);
    for (std::int64_t head = 0; head < rows.heads; ++head) {
      add_row(sums + head * rows.dim, rows.at(i, head), rows.dtype, rows.dim);
    }
    if (position + 1 == own.end) end_mean(sums, width, own.end - own.begin);
  }
}

void check_block_mask_choice(const BlockMaskChoice& choice) {
  const AttentionSpec& spec = choice.spec;
  const BlockMaskShape& shape = spec.block_mask;
  const bool fits = shape.any() && shape.heads >= 1 && spec.kv_heads >= 1 && spec.heads % spec.kv_heads == 0 &&
                    spec.heads % shape.heads == 0;
  if (!fits)
    fail(ErrorCode::kInternal, "blocks are chosen for another job", "its heads and those of the block mask don't fit");
}

void choose_host_block_mask(const BlockMaskChoice& choice) {
  check_block_mask_choice(choice);
  constexpr std::int64_t kRowsPerHeartbeat = 64;
  const int mask_heads = choice.spec.block_mask.heads;
  const int heads = choice.spec.heads / mask_heads;
  std::vector<std::uint32_t> orders;
  for (std::int64_t n = 0; n < mask_heads * choice.query_blocks; ++n) {
    if (n % kRowsPerHeartbeat == 0) heartbeat();
    const std::int64_t mask_head = n / choice.query_blocks;
    const std::int64_t query_block = n % choice.query_blocks;
    const BlockCandidates& of = choice.candidates[query_block];
    if (of.count == 0) continue;
    const std::span<float> scores(choice.scores + n * choice.key_blocks + of.begin,
                                  static_cast<std::size_t>(of.end - of.begin));
    score_blocks(choice, query_block, static_cast<int>(mask_head) * heads, heads, of.begin, scores);
    orders.resize(scores.size());
    std::transform(scores.begin(), scores.end(), orders.begin(), order_of_score);
    orders.front() = orders[static_cast<std::size_t>(of.diagonal - of.begin)] = kAlwaysTaken;
    choose_best(orders, of.begin, of.count, choice.listed + mask_head * choice.entries + of.first);
  }
}

}  // namespace ringattn
