// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/block_mask.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/error.hpp"

namespace ringattn {

namespace {

std::int64_t next_id() {
  static std::atomic<std::int64_t> id{0};
  return ++id;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

BlockMask::BlockMask(const BlockMaskShape& shape, std::vector<MaskedSequence> sequences,
                     std::vector<std::int64_t> begins, std::vector<std::int32_t> blocks)
    : shape_(shape),
      sequences_(std::move(sequences)),
      indptr_(std::move(begins)),
      indices_(std::move(blocks)),
      id_(next_id()) {
  if (shape.query_block < 1 || shape.key_block < 1 || shape.heads < 1) {
    fail(ErrorCode::kUsage,
         fmt::format("a block mask of {} heads in blocks of {} queries and {} keys", shape.heads, shape.query_block,
                     shape.key_block),
         "each is at least 1", "Give blocks of 128, for example.");
  }
  std::int64_t mask_rows = 0;
  for (const MaskedSequence& s : sequences_) {
    const TileRange range = s.queries == 0
                                ? TileRange{0, 0}
                                : TileRange{query_block_of(s.position, shape.query_block),
                                            query_block_of(s.position + s.queries - 1, shape.query_block) + 1};
    query_blocks_.push_back(range);
    first_row_.push_back(mask_rows);
    mask_rows += shape.heads * (range.end - range.begin);
  }
  if (indptr_.size() != static_cast<std::size_t>(mask_rows) + 1) {
    fail(ErrorCode::kUsage, fmt::format("a block mask has {} rows", static_cast<std::int64_t>(indptr_.size()) - 1),
         fmt::format("{} sequences have {} query blocks of {} queries, each head of {} counted", sequences_.size(),
                     mask_rows, shape.query_block, shape.heads),
         "Give a row for every sequence, head and query block, even if it is empty.");
  }
  check();
}

void BlockMask::check() const {
  for (std::size_t s = 0; s < sequences_.size(); ++s) {
    const std::int64_t blocks = ceil_div(sequences_[s].keys, shape_.key_block);
    for (int head = 0; head < shape_.heads; ++head) {
      for (std::int64_t q = query_blocks_[s].begin; q < query_blocks_[s].end; ++q) {
        const auto refuse = [&](const std::string& problem, const std::string& why) {
          fail(ErrorCode::kUsage,
               fmt::format("{} in the mask row of sequence {}, head {}, query block {}", problem, s, head, q), why,
               "Give key blocks in ascending order, each once.");
        };
        const auto n = static_cast<std::size_t>(first_row_[s] + head * (query_blocks_[s].end - query_blocks_[s].begin) +
                                                q - query_blocks_[s].begin);
        const std::int64_t begin = indptr_[n];
        const std::int64_t end = indptr_[n + 1];
        if ((n == 0 && begin != 0) || end < begin || end > static_cast<std::int64_t>(indices_.size())) {
          refuse(fmt::format("entries {} to {}", begin, end), fmt::format("there are {} in all", indices_.size()));
        }
        std::int64_t last = -1;
        for (const std::int32_t block : row(s, head, q)) {
          if (block < 0 || block >= blocks) {
            refuse(fmt::format("key block {}", block), fmt::format("the sequence has {} keys, which is {} blocks of {}",
                                                                   sequences_[s].keys, blocks, shape_.key_block));
          }
          if (block <= last) refuse(fmt::format("key block {} after {}", block, last), "a mask row ascends");
          last = block;
        }
      }
    }
  }
  if (indptr_.back() != static_cast<std::int64_t>(indices_.size())) {
    fail(ErrorCode::kUsage, fmt::format("the mask rows end at entry {}", indptr_.back()),
         fmt::format("there are {} entries", indices_.size()), "The last row must end where the entries do.");
  }
}

std::span<const std::int32_t> BlockMask::row(std::size_t sequence, int head, std::int64_t query_block) const {
  const TileRange& range = query_blocks_[sequence];
  const auto n =
      static_cast<std::size_t>(first_row_[sequence] + head * (range.end - range.begin) + query_block - range.begin);
  return std::span(indices_).subspan(static_cast<std::size_t>(indptr_[n]),
                                     static_cast<std::size_t>(indptr_[n + 1] - indptr_[n]));
}

std::int64_t BlockMask::runs(std::size_t sequence, std::int64_t position, std::int64_t rows) const {
  if (rows <= 0) return 0;
  std::int64_t runs = 0;
  const std::int64_t last_block = query_block_of(position + rows - 1, shape_.query_block);
  for (std::int64_t q = query_block_of(position, shape_.query_block); q <= last_block; ++q) {
    for (int head = 0; head < shape_.heads; ++head) {
      std::int64_t last = -2;
      for (const std::int32_t block : row(sequence, head, q)) {
        runs += block == last + 1 ? 0 : 1;
        last = block;
      }
    }
  }
  return runs;
}

double masked_pairs(const BlockMask& block_mask, const Mask& mask, std::size_t sequence, std::int64_t position,
                    std::int64_t rows, const KeyRange& keys) {
  const BlockMaskShape& shape = block_mask.shape();
  const Visibility visibility(mask, block_mask.sequences()[sequence].keys);
  double pairs = 0.0;
  while (rows > 0) {
    const std::int64_t block = query_block_of(position, shape.query_block);
    const std::int64_t count = std::min(rows, (block + 1) * shape.query_block - position);
    for (int head = 0; head < shape.heads; ++head) {
      // With key_tile = key_block, a run of tiles is a run of key blocks.
      for_each_masked_tile_run(block_mask, mask, shape.key_block, sequence, head, block, [&](const MaskedTileRun& run) {
        const KeyRange masked{std::max(keys.begin, run.tiles.begin * shape.key_block),
                              std::min(keys.end, run.tiles.end * shape.key_block)};
        pairs += visibility.pairs(position, count, masked);
      });
    }
    position += count;
    rows -= count;
  }
  return pairs / shape.heads;
}

std::string missing_for_block_mask(const BlockMaskShape& shape, const TileSizes& tiles) {
  if (!shape.any()) return {};
  if (shape.query_block % tiles.query == 0 && shape.key_block % tiles.key == 0) return {};
  return fmt::format("block mask of {} queries and {} keys (supported: multiples of {} and {})", shape.query_block,
                     shape.key_block, tiles.query, tiles.key);
}

std::string describe(const BlockMaskShape& shape, int heads) {
  if (!shape.any()) return {};
  std::string text = fmt::format("block mask of {}x{} blocks", shape.query_block, shape.key_block);
  if (shape.heads > 1) text += shape.heads == heads ? ", one per head" : ", one per KV head";
  return text;
}

}  // namespace ringattn
