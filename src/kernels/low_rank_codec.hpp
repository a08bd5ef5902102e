// SPDX-License-Identifier: Apache-2.0
// Rows of formats with a rank in a backend's memory: their products with a basis, either way, and what becomes codes
// beside the factors.
//
// What compresses sums in one order on every backend, a chain of fp32 multiply-adds over the numbers of a row, or over
// the factors, ascending: so factors and codes have the same bits wherever they are made. What decompresses may be any
// kernel of products.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/backend.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

// Rows [first, first + count) of a view.
template <class View>
View rows_of(View view, std::int64_t first, std::int64_t count) {
  view.data = view.at(first, 0);
  view.tokens = count;
  return view;
}

// The products that give rows of a rank their elements, of kLowRank and kHybrid: factors · basis, for each head.
BatchedGemmSpec expansion_of(const RowFormat& format, const RowShape& shape);
// Rows [row, row + plain.tokens) of the factors become elements, by a kernel of expansion_of(). Ordered on `stream`.
void expand_factors(BatchedGemmKernel& kernel, const RowFormat& format, const RowShape& shape,
                    const CompressedRows& rows, std::int64_t row, const MutableTensorView& plain, Stream stream,
                    const Progress& progress = {});

// Parts of what LowRankCodec tells as faults: they count as streams of a fault's place.
inline constexpr int kInvalidFactor = 0;
inline constexpr int kInvalidProduct = 1;

class LowRankCodec {
 public:
  // Takes up to `max_tokens` tokens at a time, for whose products it has room once they are needed. The backend
  // outlives it.
  LowRankCodec(const RowFormat& format, const RowShape& shape, Backend& backend, std::int64_t max_tokens);

  // The sums of gram.hpp of what has a basis (low_rank_shape()), of the rows of `runs`. Ordered on `stream`.
  void add_gram(const TensorView& plain, std::span<const CompressedRun> runs, double* sums, Stream stream);
  // Elements become factors and, of kHybrid, codes, scales and outliers; bases and outlier channels are there. Ordered
  // on `stream`. `fault`, where it isn't null: factors, and products of factors and basis, that are not finite are told
  // there, as rows of `plain`. Throws kMemory where the backend has no room for products.
  void compress(const TensorView& plain, std::span<const CompressedRun> runs, const CompressedRows& to,
                InvalidElementCell* fault, Stream stream);
  // The task, with products whose sums are of the same order.
  void decompress(const DecompressTask& task, Stream stream);

 private:
  // Tokens [first, first + count), with the heads of a group side by side as one head.
  TensorView grouped(const TensorView& plain, std::int64_t first, std::int64_t count, Stream stream);
  Buffer room() const;

  const RowFormat format_;
  const RowShape shape_;
  Backend& backend_;
  const std::int64_t max_tokens_;
  std::unique_ptr<BatchedGemmKernel> projection_, expansion_;
  Buffer products_, beside_;  // of max_tokens_ tokens: products, and rows whose heads were brought side by side
};

}  // namespace ringattn
