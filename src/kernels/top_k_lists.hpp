// SPDX-License-Identifier: Apache-2.0
// Lists of key tiles that follow from the data: for each query block the key blocks of the highest scores. A block's
// score is that of its mean query and its mean key. Sums have a fixed order, and of equal scores the block of the lower
// number is taken, so everyone who has the rows makes the same lists. Nothing is learned; how much of a row's weight
// its list keeps is measured (attention/check/kept_share.hpp).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/fold.hpp"
#include "kernels/list_makers.hpp"

namespace ringattn {

// Means of blocks of rows: [blocks, heads, dim] fp32.
struct PooledRows {
  std::int64_t first = 0;  // number of the first block
  std::int64_t blocks = 0;
  int heads = 0;
  int dim = 0;
  std::vector<float> means;

  std::span<const float> row(std::int64_t block, int head) const {
    const auto at = static_cast<std::size_t>(((block - first) * heads + head) * dim);
    return std::span(means).subspan(at, static_cast<std::size_t>(dim));
  }
};

// Takes the rows of one sequence, piece by piece in ascending order, in host memory, and gives the means of its blocks:
// row i stands at position + i, and blocks are counted from position 0. Each mean is a sum in fp32 in the order of the
// rows, times one over their number, wherever pieces end.
class RowPool {
 public:
  // `rows` rows [heads, dim] will come.
  RowPool(std::int64_t position, std::int64_t rows, int heads, int dim, int block);

  // rows: [rows, heads, dim]
  void add(const TensorView& rows);
  PooledRows finish();

 private:
  std::int64_t position_;  // of the next row
  std::int64_t begin_;
  std::int64_t end_;
  int block_;
  PooledRows pooled_;
};

// The means of a sequence's rows.
struct PooledSequence {
  PooledRows q;  // [query blocks, heads, head_dim]
  PooledRows k;  // [key blocks, kv_heads, head_dim]
};

// Scores of the key blocks [first, first + scores.size()) for a query block and the query heads [head, head + heads)
// that share a list. Another way to choose blocks is another function of this type.
using BlockScorer = void (*)(const FoldSpec& spec, const PooledSequence& sequence, std::int64_t query_block, int head,
                             int heads, std::int64_t first, std::span<float> scores);
// The scaled product of the means, summed over the heads in ascending order.
void score_means(const FoldSpec& spec, const PooledSequence& sequence, std::int64_t query_block, int head, int heads,
                 std::int64_t first, std::span<float> scores);

// For each query block `count` of the key blocks that the mask lets it see: the first of them, the one that its last
// query's position lies in, and of the others those of the highest scores; fewer where it sees fewer. NaN scores
// lowest. Throws kUsage for a count below 1 and for means of other blocks than the shape's. check_top_k() says before
// there are means whether the lists have room.
TileLists top_k_lists(const FoldSpec& spec, const ListShape& shape, std::vector<ListedSequence> sequences,
                      std::span<const PooledSequence> pooled, int count, BlockScorer score = score_means);

// Throws kMemory where such lists don't fit, and kUsage for a count below 1.
void check_top_k(const FoldSpec& spec, const ListShape& shape, std::span<const ListedSequence> sequences, int count,
                 const ListRoom& room);

}  // namespace ringattn
