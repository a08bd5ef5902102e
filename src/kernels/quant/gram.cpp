// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/gram.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"
#include "kernels/quant/quant_ops.hpp"
#include "kernels/quant/row_codec.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kBlockTokens = 64;              // widened to fp64: they fit into the L2 cache
constexpr std::int64_t kItemRows = 8 * kGramRows;      // rows of the Gram matrix per work item
constexpr std::int64_t kTokensPerHeartbeat = 1 << 12;  // between heartbeats

// Adds tokens [begin, end) of a head to rows of sums from `row` on.
void add_rows(const TensorView& rows, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t row,
              double* sums) {
  const GramOps& ops = best_gram_ops();
  const std::int64_t dim = rows.dim;
  std::vector<float> token(static_cast<std::size_t>(dim));
  std::vector<double> wide(static_cast<std::size_t>(kBlockTokens * dim));
  for (std::int64_t first = begin; first < end; first += kBlockTokens) {
    const std::int64_t count = std::min(kBlockTokens, end - first);
    for (std::int64_t t = 0; t < count; ++t) {
      widen_row(rows.at(first + t, head), rows.dtype, dim, token.data());
      std::copy(token.begin(), token.end(), wide.begin() + t * dim);
    }
    for (std::int64_t of_item = row; of_item < std::min(dim, row + kItemRows); of_item += kGramRows) {
      ops.add(wide.data(), count, dim, of_item, sums);
    }
  }
}

}  // namespace

void check_task(const GramTask& task) {
  const TensorView& rows = task.rows;
  if (rows.dtype != Dtype::kF32 && rows.dim % 8 == 0) return;
  fail(ErrorCode::kInternal, fmt::format("a Gram matrix of {} channels of {}", rows.dim, dtype_name(rows.dtype)),
       "channels must be bf16 or fp16, and a multiple of 8");
}

void add_gram_on_host(const GramTask& task, int threads) {
  check_task(task);
  const TensorView& rows = task.rows;
  const std::int64_t parts = (rows.dim + kItemRows - 1) / kItemRows;
  for (std::int64_t begin = 0; begin < rows.tokens; begin += kTokensPerHeartbeat) {
    heartbeat();
    const std::int64_t end = std::min(rows.tokens, begin + kTokensPerHeartbeat);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (std::int64_t item = 0; item < rows.heads * parts; ++item) {
      const std::int64_t head = item / parts;
      add_rows(rows, head, begin, end, item % parts * kItemRows, task.sums + head * rows.dim * rows.dim);
    }
  }
  static_cast<void>(threads);
}

}  // namespace ringattn
