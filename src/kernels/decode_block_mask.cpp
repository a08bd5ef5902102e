// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode_block_mask.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/error.hpp"

namespace ringattn {

namespace {

// What a list names in front of a block, and behind.
struct Halves {
  std::span<const std::int32_t> before, behind;
};

Halves halves_of(std::span<const std::int32_t> list, std::int64_t block) {
  const auto at = static_cast<std::size_t>(std::ranges::lower_bound(list, block) - list.begin());
  return {list.first(at), list.subspan(at)};
}

// The list of a sequence's last rows, without the blocks that they stand in, which it names; or why they can't be a
// step by it.
struct MaskRowOfTokens {
  std::span<const std::int32_t> blocks;
  std::string why;  // empty: they can
  std::string suggestion;
};

MaskRowOfTokens mask_row_of_tokens(const BlockMask& block_mask, const Mask& mask, const MaskedStep& step, int head,
                                   int rows) {
  const BlockMaskShape& shape = block_mask.shape();
  const std::size_t s = step.sequence;
  const std::int64_t end = step.keys;
  const std::int64_t own = std::max<std::int64_t>(0, end - rows) / shape.key_block;
  std::span<const std::int32_t> before;
  const std::int64_t first_block = query_block_of(end - rows, shape.query_block);
  for (std::int64_t q = first_block; q <= query_block_of(end - 1, shape.query_block); ++q) {
    const Halves list = halves_of(block_mask.row(s, head, q), own);
    if (q > first_block && !std::ranges::equal(list.before, before)) {
      return {
          {},
          fmt::format("its {} rows stand in blocks of {} queries, which have different lists", rows, shape.query_block),
          "Decode fewer rows at a time."};
    }
    before = list.before;
    const std::int64_t last = std::min(end, (q + 1) * shape.query_block) - 1;
    const KeyRange seen = Visibility(mask, end).keys(last);
    const std::int64_t blocks = seen.end <= own * shape.key_block ? own : (seen.end - 1) / shape.key_block + 1;
    for (std::int64_t block = own; block < blocks; ++block) {
      if (!std::ranges::binary_search(list.behind, block)) {
        return {
            {},
            fmt::format("the list leaves out block {}, in which its rows stand, and a step always reads that", block),
            "List it, too."};
      }
    }
  }
  return {before, {}, {}};
}

std::string no_step(const MaskedStep& step, int head) {
  return fmt::format("sequence {} can't be decoded by its list {}", step.sequence, head);
}

std::vector<MaskedStep> whole_sequences(const BlockMask& block_mask) {
  std::vector<MaskedStep> steps;
  for (const MaskedSequence& of : block_mask.sequences()) steps.push_back({steps.size(), of.keys});
  return steps;
}

}  // namespace

DecodeBlockMaskArrays decode_block_mask(const BlockMask& block_mask, const Mask& mask, int rows,
                                        std::span<const MaskedStep> steps, std::int64_t stride) {
  std::vector<std::span<const std::int32_t>> all;
  for (const MaskedStep& step : steps) {
    for (int head = 0; head < block_mask.shape().heads; ++head) {
      const MaskRowOfTokens list = mask_row_of_tokens(block_mask, mask, step, head, rows);
      if (!list.why.empty()) fail(ErrorCode::kUsage, no_step(step, head), list.why, list.suggestion);
      all.push_back(list.blocks);
    }
  }
  DecodeBlockMaskArrays arrays;
  arrays.stride = stride;
  for (const auto& list : all) arrays.stride = std::max(arrays.stride, static_cast<std::int64_t>(list.size()));
  for (const auto& list : all) {
    arrays.counts.push_back(static_cast<std::int32_t>(list.size()));
    arrays.blocks.insert(arrays.blocks.end(), list.begin(), list.end());
    arrays.blocks.resize(arrays.counts.size() * static_cast<std::size_t>(arrays.stride), -1);
  }
  return arrays;
}

DecodeBlockMaskArrays decode_block_mask(const BlockMask& block_mask, const Mask& mask, int rows, std::int64_t stride) {
  return decode_block_mask(block_mask, mask, rows, whole_sequences(block_mask), stride);
}

std::string why_not_decodable(const BlockMask& block_mask, const Mask& mask, int rows) {
  for (const MaskedStep& step : whole_sequences(block_mask)) {
    for (int head = 0; head < block_mask.shape().heads; ++head) {
      const MaskRowOfTokens list = mask_row_of_tokens(block_mask, mask, step, head, rows);
      if (!list.why.empty()) return fmt::format("{} ({})", no_step(step, head), list.why);
    }
  }
  return {};
}

std::vector<std::string> missing_for_decode_block_mask(const BlockMaskShape& shape, const TileSizes& tiles,
                                                       const Mask& mask, int kv_heads) {
  std::vector<std::string> missing;
  if (!shape.any()) return missing;
  // Rows of a step lie in the same places of their query tiles, with the blocks that nobody lists and without.
  if (shape.key_block % tiles.query != 0) {
    missing.push_back(fmt::format("decoding by lists in blocks of {} keys (supported: multiples of {} and {})",
                                  shape.key_block, tiles.key, tiles.query));
  }
  // Query heads of a KV head are rows of one product.
  if (shape.heads > kv_heads) missing.push_back("decoding by a list for each query head (supported: each KV head)");
  // A window's groups of tiles begin at its first tile, which is not the same for all rows of a step.
  if (mask.left >= 0) missing.push_back("decoding by lists under a sliding window (supported: without one)");
  return missing;
}

}  // namespace ringattn
