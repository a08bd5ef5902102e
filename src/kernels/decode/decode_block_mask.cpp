// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/decode_block_mask.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/error.hpp"

namespace ringattn {

namespace {

// The key blocks of a mask row before a given block, and from it on.
struct SplitRow {
  std::span<const std::int32_t> before, rest;
};

SplitRow split_row(std::span<const std::int32_t> mask_row, std::int64_t block) {
  const auto at = static_cast<std::size_t>(std::ranges::lower_bound(mask_row, block) - mask_row.begin());
  return {mask_row.first(at), mask_row.subspan(at)};
}

// The key blocks before the rows' own in the mask row of a sequence's last rows, which must also contain the rows' own
// key blocks; or the reason why there is no such mask row for a step.
struct MaskRowOfTokens {
  std::span<const std::int32_t> blocks;
  std::string why;  // empty: there is one
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
    const SplitRow mask_row = split_row(block_mask.row(s, head, q), own);
    if (q > first_block && !std::ranges::equal(mask_row.before, before)) {
      return {{},
              fmt::format("its {} rows are in blocks of {} queries, which have different mask rows", rows,
                          shape.query_block),
              "Decode fewer rows at a time."};
    }
    before = mask_row.before;
    const std::int64_t last = std::min(end, (q + 1) * shape.query_block) - 1;
    const KeyRange seen = Visibility(mask, end).keys(last);
    const std::int64_t blocks = seen.end <= own * shape.key_block ? own : (seen.end - 1) / shape.key_block + 1;
    for (std::int64_t block = own; block < blocks; ++block) {
      if (!std::ranges::binary_search(mask_row.rest, block)) {
        return {{},
                fmt::format("the mask row leaves out block {}, which contains its rows, and a step always reads that",
                            block),
                "Add it to the mask row."};
      }
    }
  }
  return {before, {}, {}};
}

std::string cannot_decode(const MaskedStep& step, int head) {
  return fmt::format("sequence {} can't be decoded with its mask row {}", step.sequence, head);
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
      const MaskRowOfTokens mask_row = mask_row_of_tokens(block_mask, mask, step, head, rows);
      if (!mask_row.why.empty()) fail(ErrorCode::kUsage, cannot_decode(step, head), mask_row.why, mask_row.suggestion);
      all.push_back(mask_row.blocks);
    }
  }
  DecodeBlockMaskArrays arrays;
  arrays.stride = stride;
  for (const auto& mask_row : all) arrays.stride = std::max(arrays.stride, static_cast<std::int64_t>(mask_row.size()));
  for (const auto& mask_row : all) {
    arrays.counts.push_back(static_cast<std::int32_t>(mask_row.size()));
    arrays.blocks.insert(arrays.blocks.end(), mask_row.begin(), mask_row.end());
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
      const MaskRowOfTokens mask_row = mask_row_of_tokens(block_mask, mask, step, head, rows);
      if (!mask_row.why.empty()) return fmt::format("{} ({})", cannot_decode(step, head), mask_row.why);
    }
  }
  return {};
}

std::vector<std::string> missing_for_decode_block_mask(const BlockMaskShape& shape, const TileSizes& tiles,
                                                       const Mask& mask, int kv_heads) {
  std::vector<std::string> missing;
  if (!shape.any()) return missing;
  // Skipping key blocks must not change the rows' offsets in their query tiles.
  if (shape.key_block % tiles.query != 0) {
    missing.push_back(fmt::format("decoding with a block mask of {} keys (supported: multiples of {} and {})",
                                  shape.key_block, tiles.key, tiles.query));
  }
  // The query heads of a KV head are rows of one GEMM.
  if (shape.heads > kv_heads)
    missing.push_back("decoding with a mask row for each query head (supported: each KV head)");
  // With a window, KV splits begin at the window's first tile, which differs between the rows of a step.
  if (mask.left >= 0) missing.push_back("decoding with a block mask under a sliding window (supported: without one)");
  return missing;
}

}  // namespace ringattn
