// SPDX-License-Identifier: Apache-2.0
#include "kernels/rank_rows.hpp"

#include <algorithm>
#include <string>

#include "kernels/registry.hpp"

namespace ringattn {

namespace {

// The kernel whose sums are chains.
std::unique_ptr<HeadProductKernel> make_chain(const HeadProductSpec& spec, std::int64_t heads, Backend& backend) {
  const bool host = backend.memory() == MemoryKind::kHost;
  const KernelRequest request = host ? KernelRequest{"cpu", "cpu_product"} : KernelRequest{"cuda", "sm80_chain"};
  auto kernel = choose_kernel(spec, request).row->make_kernel(spec, backend);
  kernel->reserve(heads);
  return kernel;
}

template <class View>
View rows_of(View view, std::int64_t first, std::int64_t count) {
  view.data = view.at(first, 0);
  view.tokens = count;
  return view;
}

}  // namespace

HeadProductSpec expansion_of(const RowFormat& format, const RowShape& shape) {
  return {shape.dtype, format.rank, static_cast<int>(shape.dim)};
}
HeadProductSpec projection_of(const RowFormat& format, const RowShape& shape) {
  return {shape.dtype, static_cast<int>(shape.dim), format.rank};
}
HeadMatrices projection_matrices(const RowFormat& format, const RowShape& shape, const void* basis) {
  return {basis, shape.dtype, shape.heads, format.rank, shape.dim, format.rank * shape.dim, shape.dim, 1};
}
HeadMatrices expansion_matrices(const RowFormat& format, const RowShape& shape, const void* basis) {
  return projection_matrices(format, shape, basis).transposed();
}
MutableTensorView factors_view(const CompressedRows& rows, const RowFormat& format, const RowShape& shape,
                               std::int64_t row, std::int64_t count) {
  const StreamView& stream = rows.streams[0];
  const auto element = static_cast<std::int64_t>(size_of(shape.dtype));
  return {stream.at(row, 0),           shape.dtype, count, shape.heads, format.rank, stream.token_stride / element,
          stream.head_stride / element};
}

RankCoder::RankCoder(const RowFormat& format, const RowShape& shape, Backend& backend, std::int64_t most_tokens)
    : format_(format),
      shape_(shape),
      backend_(backend),
      most_tokens_(std::max<std::int64_t>(1, most_tokens)),
      projection_(make_chain(projection_of(format, shape), shape.heads, backend)),
      expansion_(make_chain(expansion_of(format, shape), shape.heads, backend)) {}

void RankCoder::compress(const TensorView& plain, std::span<const CompressedRun> runs, const CompressedRows& to,
                         RowFaultCell* fault, Stream stream) {
  for (const CompressedRun& run : runs) {
    for (std::int64_t first = 0; first < run.rows; first += most_tokens_) {
      const std::int64_t count = std::min(most_tokens_, run.rows - first);
      const std::int64_t token = run.to + first;
      const TensorView rows = rows_of(plain, token, count);
      const MutableTensorView factors = factors_view(to, format_, shape_, run.row + first, count);
      projection_->multiply({rows, projection_matrices(format_, shape_, to.tables[0]), factors}, stream, {});
      if (fault != nullptr) backend_.check_finite({factors, kFactorFault, token, fault}, stream);
      if (fault == nullptr && format_.coding == RowCoding::kLowRank) continue;
      if (products_.data() == nullptr) {
        products_ = backend_.allocate(static_cast<std::size_t>(most_tokens_ * shape_.heads * shape_.dim) *
                                      size_of(shape_.dtype));
      }
      const MutableTensorView products =
          dense_view(static_cast<void*>(products_.data()), shape_.dtype, count, shape_.heads, shape_.dim);
      expansion_->multiply({factors, expansion_matrices(format_, shape_, to.tables[0]), products}, stream, {});
      if (fault != nullptr) backend_.check_finite({products, kProductFault, token, fault}, stream);
      if (format_.coding == RowCoding::kLowRank) continue;
      const CompressedRun piece{run.sequence, run.position + first, run.keys, run.row + first, count, 0};
      backend_.compress({format_, shape_, rows, products, {&piece, 1}, to}, stream);
    }
  }
}

void RankCoder::decompress(const DecompressTask& task, Stream stream) {
  const HeadMatrices matrices = expansion_matrices(format_, shape_, task.from.tables[0]);
  for (const CompressedRun& run : task.runs) {
    if (run.rows == 0) continue;
    const MutableTensorView factors = factors_view(task.from, format_, shape_, run.row, run.rows);
    expansion_->multiply({factors, matrices, rows_of(task.plain, run.to, run.rows)}, stream, {});
  }
  if (format_.coding != RowCoding::kLowRank || task.fault != nullptr) backend_.decompress(task, stream);
}

}  // namespace ringattn
