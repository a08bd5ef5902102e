// SPDX-License-Identifier: Apache-2.0
// Compression and decompression of low-rank formats in a backend's memory: projection to factors, expansion by the
// basis, and quantization of the remainder.
//
// Compression sums in one order on every backend: a chain of fp32 multiply-adds over the elements of a row, or over the
// factors, ascending. So factors and quantized values are bitwise equal on all backends. Decompression may use any
// batched GEMM kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/common/backend.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// Rows [first, first + count) of a view.
template <class View>
View rows_of(View view, std::int64_t first, std::int64_t count) {
  view.data = view.at(first, 0);
  view.tokens = count;
  return view;
}

// The GEMM that gives the elements of kLowRank and kHybrid rows: factors · basis, for each head.
BatchedGemmSpec expansion_of(const RowFormat& format, const RowShape& shape);
// Expands rows [row, row + plain.tokens) of the factors to elements, with a kernel of expansion_of(). Ordered on
// `stream`.
void expand_factors(BatchedGemmKernel& kernel, const RowFormat& format, const RowShape& shape,
                    const CompressedRows& rows, std::int64_t row, const MutableTensorView& plain, Stream stream,
                    const Progress& progress = {});

// InvalidElement::part as LowRankCodec reports it: it counts as a stream in a location.
inline constexpr int kInvalidFactor = 0;
inline constexpr int kInvalidProduct = 1;

class LowRankCodec {
 public:
  // Processes up to `max_tokens` tokens at a time, and allocates their products when they are first needed. The backend
  // must outlive it.
  LowRankCodec(const RowFormat& format, const RowShape& shape, Backend& backend, std::int64_t max_tokens);

  // Adds the rows of `runs` to the sums of quant/gram.hpp, with heads grouped as in low_rank_shape(). Ordered on
  // `stream`.
  void add_gram(const TensorView& plain, std::span<const CompressedRun> runs, double* sums, Stream stream);
  // Compresses elements to factors and, for kHybrid, quantized values, scales and outliers, with given bases and
  // outlier channels. Ordered on `stream`. A non-null `invalid` receives the first non-finite factor, or product of
  // factors and basis, by its row in `plain`. Throws kMemory if the backend has no memory for products.
  void compress(const TensorView& plain, std::span<const CompressedRun> runs, const CompressedRows& to,
                InvalidElementCell* invalid, Stream stream);
  // Runs the task, with products summed in the same order.
  void decompress(const DecompressTask& task, Stream stream);

 private:
  // Tokens [first, first + count), with the heads of a group concatenated to one head.
  TensorView grouped(const TensorView& plain, std::int64_t first, std::int64_t count, Stream stream);
  Buffer allocate_tokens() const;

  const RowFormat format_;
  const RowShape shape_;
  Backend& backend_;
  const std::int64_t max_tokens_;
  std::unique_ptr<BatchedGemmKernel> projection_, expansion_;
  Buffer products_, grouped_;  // [max_tokens_]: products, and rows with concatenated heads
};

}  // namespace ringattn
