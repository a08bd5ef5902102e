// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/block_choice.hpp"

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "kernels/attention/block_score.hpp"

namespace ringattn {

namespace {

const std::byte* key_at(const BlockChoice& choice, std::int64_t sequence, std::int64_t key, int head) {
  if (choice.block_table.pages == nullptr) return choice.k.at(sequence, key, head);
  const std::int32_t page = choice.block_table.pages[sequence * choice.block_table.stride + key / choice.k.page_size];
  return choice.k.at(page, key % choice.k.page_size, head);
}

float* mean_of(const BlockChoice& choice, std::int64_t sequence, std::int64_t block, int head) {
  return choice.means + ((sequence * choice.blocks + block) * choice.spec.kv_heads + head) * choice.spec.head_dim;
}

void pool_block(const BlockChoice& choice, std::int64_t sequence, std::int64_t block) {
  const int key_block = choice.spec.block_mask.key_block;
  for (int head = 0; head < choice.spec.kv_heads; ++head) {
    float* const mean = mean_of(choice, sequence, block, head);
    std::fill_n(mean, choice.spec.head_dim, 0.0F);
    for (int i = 0; i < key_block; ++i) {
      add_row(mean, key_at(choice, sequence, block * key_block + i, head), choice.spec.dtype, choice.spec.head_dim);
    }
    end_mean(mean, choice.spec.head_dim, key_block);
  }
}

// The mean of a query head's rows in the step.
std::vector<float> mean_query(const BlockChoice& choice, std::int64_t sequence, int head) {
  std::vector<float> mean(static_cast<std::size_t>(choice.spec.head_dim), 0.0F);
  for (int i = 0; i < choice.rows; ++i) {
    add_row(mean.data(), choice.q.at(sequence * choice.rows + i, head), choice.spec.dtype, choice.spec.head_dim);
  }
  end_mean(mean.data(), choice.spec.head_dim, choice.rows);
  return mean;
}

}  // namespace

void check_block_choice(const BlockChoice& choice) {
  const AttentionSpec& spec = choice.spec;
  const bool fits = spec.block_mask.any() && choice.rows >= 1 && choice.q.tokens % choice.rows == 0 &&
                    choice.q.heads == spec.heads && choice.q.dim == spec.head_dim && choice.q.dtype == spec.dtype &&
                    choice.k.heads == spec.kv_heads && choice.k.dim == spec.head_dim && choice.k.dtype == spec.dtype &&
                    spec.block_mask.heads <= spec.kv_heads && choice.count >= 1;
  if (!fits)
    fail(ErrorCode::kInternal, "blocks are chosen for another job", "queries, keys or block masks don't fit it");
}

void pool_host_keys(const BlockChoice& choice) {
  check_block_choice(choice);
  for (std::int64_t s = 0; s < choice.sequences(); ++s) {
    for (int block = 0; block < blocks_before_rows(choice, choice.lengths[s]); ++block) pool_block(choice, s, block);
  }
}

void choose_host_blocks(const BlockChoice& choice) {
  check_block_choice(choice);
  const AttentionSpec& spec = choice.spec;
  const int mask_heads = spec.block_mask.heads;
  const int heads = spec.heads / mask_heads;
  const MeanScore score{spec.softmax_scale};
  std::vector<std::uint32_t> orders;
  for (std::int64_t s = 0; s < choice.sequences(); ++s) {
    const std::int32_t length = choice.lengths[s];
    const std::int64_t blocks = blocks_before_rows(choice, length);
    if (fills_block(choice, length)) pool_block(choice, s, blocks - 1);
    const std::int32_t count = chosen_blocks(choice, length);
    for (int mask_head = 0; mask_head < mask_heads; ++mask_head) {
      float* const scores = choice.scores + (s * mask_heads + mask_head) * choice.blocks;
      std::fill_n(scores, blocks, 0.0F);
      for (int head = mask_head * heads; head < (mask_head + 1) * heads; ++head) {
        const std::vector<float> q = mean_query(choice, s, head);
        const int kv_head = head / (spec.heads / spec.kv_heads);
        for (std::int64_t block = 0; block < blocks; ++block) {
          scores[block] += score.of_head(mean_product(q.data(), mean_of(choice, s, block, kv_head), spec.head_dim));
        }
      }
      orders.resize(static_cast<std::size_t>(blocks));
      std::transform(scores, scores + blocks, orders.begin(), order_of_score);
      if (blocks > 0) orders.front() = kAlwaysTaken;
      choose_best(orders, 0, count, choice.chosen + (s * mask_heads + mask_head) * choice.count);
      choice.counts[s * mask_heads + mask_head] = count;
    }
  }
}

}  // namespace ringattn
