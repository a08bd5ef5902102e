// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/block_mask_patterns.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "base/rank_liveness.hpp"

namespace ringattn {

namespace {

// Appends the key blocks that hold keys [begin, end) of the sequence.
void add_keys(const BlockMaskRow& mask_row, int key_block, std::int64_t begin, std::int64_t end,
              std::vector<std::int32_t>& blocks) {
  const TileRange range = tiles_of(KeyRange{std::max<std::int64_t>(0, begin), std::min(end, mask_row.keys)}, key_block);
  for (std::int64_t block = range.begin; block < range.end; ++block) {
    blocks.push_back(static_cast<std::int32_t>(block));
  }
}

void check_positive(const char* what, std::int64_t value) {
  if (value >= 0) return;
  fail(ErrorCode::kUsage, fmt::format("a block mask pattern with {} {}", what, value), "it is a number of tokens",
       "Use 0 or more.");
}

constexpr std::int64_t kUncountedBytes = std::int64_t{1} << 24;  // below it a mask is built without counting first

// Sorts and removes duplicates. Most patterns give one or two ascending runs.
void sort_unique(std::vector<std::int32_t>& blocks) {
  const auto second = std::is_sorted_until(blocks.begin(), blocks.end());
  if (second != blocks.end()) {
    if (std::is_sorted(second, blocks.end())) {
      std::inplace_merge(blocks.begin(), second, blocks.end());
    } else {
      std::sort(blocks.begin(), blocks.end());
    }
  }
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
}

// Calls visit() for each mask row in order.
template <class Visit>
void for_each_mask_row(const BlockMaskShape& shape, std::span<const MaskedSequence> sequences,
                       const BlockMaskPattern& make, Visit visit) {
  constexpr std::int64_t kRowsPerHeartbeat = 64;
  std::vector<std::int32_t> own;
  std::int64_t made = 0;
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const MaskedSequence& sequence = sequences[s];
    if (sequence.queries == 0) continue;
    const std::int64_t key_blocks = (sequence.keys + shape.key_block - 1) / shape.key_block;
    own.reserve(static_cast<std::size_t>(key_blocks));
    const std::int64_t end = sequence.position + sequence.queries;
    const std::int64_t last = query_block_of(end - 1, shape.query_block);
    for (int head = 0; head < shape.heads; ++head) {
      for (std::int64_t q = query_block_of(sequence.position, shape.query_block); q <= last; ++q) {
        if (++made % kRowsPerHeartbeat == 0) heartbeat();
        own.clear();
        const std::int64_t begin = q * shape.query_block;
        make({s,
              head,
              q,
              {std::max(begin, sequence.position), std::min(begin + shape.query_block, end)},
              sequence.keys,
              key_blocks},
             own);
        sort_unique(own);
        visit(std::span<const std::int32_t>(own));
      }
    }
  }
}

// Builds a block mask from a bitmap, one row of key blocks after the other.
template <class Listed>
BlockMask block_mask_from_rows(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences, std::size_t size,
                               std::int64_t entries_of_byte, Listed is_set) {
  std::int64_t at = 0;
  std::optional<BlockMaskRow> first;
  const auto too_small = [&](std::int64_t needed) {
    fail(ErrorCode::kUsage, fmt::format("a block mask of {} bytes", size),
         fmt::format("at least {} are needed", needed),
         "A mask is [heads, query blocks, key blocks], one sequence after the other.");
  };
  BlockMask block_mask = make_block_mask(
      shape, std::move(sequences), [&](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
        if (!first) first = mask_row;
        if (mask_row.sequence == first->sequence && mask_row.head == first->head && mask_row.block == first->block)
          at = 0;
        const std::int64_t row_bytes = (mask_row.blocks + entries_of_byte - 1) / entries_of_byte;
        if (at + row_bytes > static_cast<std::int64_t>(size)) too_small(at + row_bytes);
        for (std::int64_t block = 0; block < mask_row.blocks; ++block) {
          if (is_set(at, block)) blocks.push_back(static_cast<std::int32_t>(block));
        }
        at += row_bytes;
      });
  if (at != static_cast<std::int64_t>(size)) {
    fail(ErrorCode::kUsage, fmt::format("a block mask of {} bytes", size), fmt::format("{} are needed", at),
         "A mask is [heads, query blocks, key blocks], one sequence after the other.");
  }
  return block_mask;
}

}  // namespace

void check_budget(const BlockMaskShape& shape, std::int64_t bytes, const BlockMaskBudget& budget) {
  if (bytes <= budget.bytes) return;
  fail(ErrorCode::kMemory,
       fmt::format("a block mask of {}x{} blocks takes more than {} bytes", shape.query_block, shape.key_block,
                   budget.bytes),
       std::string(budget.why), "Use larger blocks, fewer mask heads, fewer blocks per row, or fewer tokens.");
}

std::int64_t count_mask_rows(const BlockMaskShape& shape, std::span<const MaskedSequence> sequences,
                             const BlockMaskBudget& budget) {
  std::int64_t mask_rows = 0;
  for (const MaskedSequence& sequence : sequences) {
    const std::int64_t blocks = (sequence.keys + shape.key_block - 1) / shape.key_block;
    if (blocks > kMaxMaskBlocks) {
      fail(ErrorCode::kMemory, fmt::format("a block mask of {} key blocks of {} keys", blocks, shape.key_block),
           fmt::format("a sequence has at most {}", kMaxMaskBlocks), "Use larger blocks.");
    }
    if (sequence.queries == 0) continue;
    mask_rows += (query_block_of(sequence.position + sequence.queries - 1, shape.query_block) + 1 -
                  query_block_of(sequence.position, shape.query_block)) *
                 shape.heads;
    check_budget(shape, block_mask_bytes(mask_rows, 0), budget);
  }
  return mask_rows;
}

BlockMask make_block_mask(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                          const BlockMaskPattern& make, const BlockMaskBudget& budget) {
  std::vector<std::int64_t> begins{0};
  std::vector<std::int32_t> blocks;
  if (shape.query_block > 0 && shape.key_block > 0) {  // otherwise BlockMask's constructor reports the error
    const std::int64_t mask_rows = count_mask_rows(shape, sequences, budget);
    const std::int64_t kept = budget.counted ? budget.bytes : kUncountedBytes;
    std::int64_t entries = 0;
    for_each_mask_row(shape, sequences, make, [&](std::span<const std::int32_t> own) {
      entries += static_cast<std::int64_t>(own.size());
      check_budget(shape, block_mask_bytes(mask_rows, entries), budget);
      if (block_mask_bytes(mask_rows, entries) > kept) return;
      blocks.insert(blocks.end(), own.begin(), own.end());
      begins.push_back(static_cast<std::int64_t>(blocks.size()));
    });
    if (block_mask_bytes(mask_rows, entries) > kept) {
      begins.resize(1);
      begins.reserve(static_cast<std::size_t>(mask_rows) + 1);
      blocks = {};
      blocks.reserve(static_cast<std::size_t>(entries));
      for_each_mask_row(shape, sequences, make, [&](std::span<const std::int32_t> own) {
        blocks.insert(blocks.end(), own.begin(), own.end());
        begins.push_back(static_cast<std::int64_t>(blocks.size()));
      });
    }
  }
  return {shape, std::move(sequences), std::move(begins), std::move(blocks)};
}

BlockMaskPattern all_blocks() {
  return [](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    for (std::int64_t block = 0; block < mask_row.blocks; ++block) blocks.push_back(static_cast<std::int32_t>(block));
  };
}

BlockMask block_mask_from_bytes(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                                std::span<const std::uint8_t> mask) {
  return block_mask_from_rows(
      shape, std::move(sequences), mask.size(), 1,
      [mask](std::int64_t row, std::int64_t block) { return mask[static_cast<std::size_t>(row + block)] != 0; });
}

BlockMask block_mask_from_bits(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                               std::span<const std::uint8_t> bits) {
  return block_mask_from_rows(shape, std::move(sequences), bits.size(), 8,
                              [bits](std::int64_t row, std::int64_t block) {
                                return (bits[static_cast<std::size_t>(row + block / 8)] >> (block % 8) & 1) != 0;
                              });
}

BlockMaskPattern window_blocks(const BlockMaskShape& shape, std::int64_t window) {
  check_positive("a window of", window);
  return [shape, window](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    add_keys(mask_row, shape.key_block, mask_row.positions.begin - window, mask_row.positions.end + window, blocks);
  };
}

BlockMaskPattern global_blocks(const BlockMaskShape& shape, std::int64_t tokens) {
  check_positive("global tokens", tokens);
  return [shape, tokens](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    add_keys(mask_row, shape.key_block, 0, mask_row.positions.begin < tokens ? mask_row.keys : tokens, blocks);
  };
}

BlockMaskPattern strided_blocks(const BlockMaskShape& shape, std::int64_t stride) {
  if (stride < 1) {
    fail(ErrorCode::kUsage, fmt::format("a block mask pattern with a stride of {}", stride), "it is a number of tokens",
         "Use 1 or more.");
  }
  return [shape, stride](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    add_keys(mask_row, shape.key_block, mask_row.positions.begin - stride, mask_row.positions.end, blocks);
    if (stride <= shape.key_block) {  // every key block between the first and the last of these keys has one
      return add_keys(mask_row, shape.key_block, stride - 1, mask_row.keys / stride * stride, blocks);
    }
    for (std::int64_t key = stride - 1; key < mask_row.keys; key += stride) {
      blocks.push_back(static_cast<std::int32_t>(key / shape.key_block));
    }
  };
}

BlockMaskPattern random_blocks(const BlockMaskShape& shape, const Mask& mask, int count, std::uint64_t seed) {
  constexpr int kMaxDraws = 1 << 16;
  if (count > kMaxDraws) {
    fail(ErrorCode::kUsage, fmt::format("a block mask pattern with {} random blocks", count),
         fmt::format("at most {} are drawn for a query block", kMaxDraws), "Draw fewer, or use larger blocks.");
  }
  return [shape, mask, count, seed](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    const TileRange seen = tiles_of(
        Visibility(mask, mask_row.keys).keys(mask_row.positions.begin, mask_row.positions.end - 1), shape.key_block);
    if (seen.empty()) return;
    const auto many = static_cast<std::uint64_t>(seen.end - seen.begin);
    for (int i = 0; i < count; ++i) {
      const PhiloxWords words =
          philox4x32_10({{static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(mask_row.block),
                          static_cast<std::uint32_t>(mask_row.head), static_cast<std::uint32_t>(mask_row.sequence)}},
                        seed);
      const std::uint64_t random = std::uint64_t{words.word[0]} << 32 | words.word[1];
      blocks.push_back(static_cast<std::int32_t>(seen.begin + static_cast<std::int64_t>(random % many)));
    }
  };
}

BlockMaskPattern vertical_slash_blocks(const BlockMaskShape& shape, std::vector<VerticalSlash> heads) {
  if (static_cast<int>(heads.size()) != shape.heads) {
    fail(ErrorCode::kUsage, fmt::format("vertical-slash patterns of {} heads", heads.size()),
         fmt::format("the block mask has {}", shape.heads), "Give one for each mask head.");
  }
  return [shape, heads = std::move(heads)](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    const VerticalSlash& own = heads[static_cast<std::size_t>(mask_row.head)];
    for (const std::int64_t key : own.verticals) add_keys(mask_row, shape.key_block, key, key + 1, blocks);
    for (const std::int64_t distance : own.slashes) {
      add_keys(mask_row, shape.key_block, mask_row.positions.begin - distance, mask_row.positions.end - distance,
               blocks);
    }
  };
}

BlockMaskPattern union_of_patterns(std::vector<BlockMaskPattern> patterns) {
  return [patterns = std::move(patterns)](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    for (const BlockMaskPattern& make : patterns) {
      make(mask_row, blocks);
      if (static_cast<std::int64_t>(blocks.size()) > 2 * mask_row.blocks) sort_unique(blocks);
    }
  };
}

}  // namespace ringattn
