// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/low_rank_codec.hpp"

#include <algorithm>
#include <string>

#include "kernels/common/registry.hpp"
#include "kernels/quant/gram.hpp"

namespace ringattn {

namespace {

// The kernel that sums in a chain, on a host or a device.
std::unique_ptr<BatchedGemmKernel> make_ordered_gemm(const BatchedGemmSpec& spec, std::int64_t heads,
                                                     Backend& backend) {
  const bool host = backend.memory() == MemoryKind::kHost;
  const KernelRequest request = host ? KernelRequest{"cpu", "cpu_gemm"} : KernelRequest{"cuda", "sm80_gemm_ordered"};
  auto kernel = choose_kernel(spec, request).row->make_kernel(spec, backend);
  kernel->reserve(heads);
  return kernel;
}

// The GEMM that projects elements to factors, with heads as in low_rank_shape(): rows · basisᵀ.
BatchedGemmSpec projection_of(const RowFormat& format, const RowShape& shape) {
  return {shape.dtype, static_cast<int>(low_rank_shape(format, shape).dim), format.rank};
}
GemmWeights projection_matrices(const RowFormat& format, const RowShape& shape, const void* basis) {
  const std::int64_t dim = low_rank_shape(format, shape).dim;
  return {basis, shape.dtype, low_rank_shape(format, shape).heads, format.rank, dim, format.rank * dim, dim, 1};
}
// View of rows [row, row + count) of the factors.
MutableTensorView factors_view(const CompressedRows& rows, const RowFormat& format, const RowShape& shape,
                               std::int64_t row, std::int64_t count) {
  const StreamView& stream = rows.streams[0];
  const auto element = static_cast<std::int64_t>(size_of(shape.dtype));
  return {stream.at(row, 0),
          shape.dtype,
          count,
          low_rank_shape(format, shape).heads,
          format.rank,
          stream.token_stride / element,
          stream.head_stride / element};
}

}  // namespace

BatchedGemmSpec expansion_of(const RowFormat& format, const RowShape& shape) {
  return {shape.dtype, format.rank, static_cast<int>(shape.dim)};
}

void expand_factors(BatchedGemmKernel& kernel, const RowFormat& format, const RowShape& shape,
                    const CompressedRows& rows, std::int64_t row, const MutableTensorView& plain, Stream stream,
                    const Progress& progress) {
  if (plain.tokens == 0) return;
  const MutableTensorView factors = factors_view(rows, format, shape, row, plain.tokens);
  const GemmWeights basis = projection_matrices(format, shape, rows.tables[0]);
  if (format.heads == 1) return kernel.multiply({factors, basis.transposed(), plain}, stream, progress);
  // The heads of a group share its factors, and each has some columns of its basis.
  for (std::int64_t group = 0; group < factors.heads; ++group) {
    MutableTensorView of_group = factors, heads = plain;
    of_group.data = factors.at(0, group);
    of_group.heads = 1;
    heads.data = plain.at(0, group * format.heads);
    heads.heads = format.heads;
    const GemmWeights matrices{basis.at(group), shape.dtype, format.heads,  shape.dim, format.rank,
                               shape.dim,       1,           basis.n_stride};
    kernel.multiply({of_group, matrices, heads}, stream, progress);
  }
}

LowRankCodec::LowRankCodec(const RowFormat& format, const RowShape& shape, Backend& backend, std::int64_t max_tokens)
    : format_(format),
      shape_(shape),
      backend_(backend),
      max_tokens_(std::max<std::int64_t>(1, max_tokens)),
      projection_(make_ordered_gemm(projection_of(format, shape), low_rank_shape(format, shape).heads, backend)),
      expansion_(make_ordered_gemm(expansion_of(format, shape), shape.heads, backend)) {}

Buffer LowRankCodec::allocate_tokens() const {
  return backend_.allocate(static_cast<std::size_t>(max_tokens_ * shape_.heads * shape_.dim) * size_of(shape_.dtype));
}

TensorView LowRankCodec::grouped(const TensorView& plain, std::int64_t first, std::int64_t count, Stream stream) {
  const TensorView rows = rows_of(plain, first, count);
  if (format_.heads == 1) return rows;
  const RowShape shape = low_rank_shape(format_, shape_);
  if (rows.head_stride == rows.dim) {
    return {rows.data, rows.dtype, count, shape.heads, shape.dim, rows.token_stride, shape.dim};
  }
  if (grouped_.data() == nullptr) grouped_ = allocate_tokens();
  const auto element = static_cast<std::int64_t>(size_of(rows.dtype));
  for (std::int64_t head = 0; head < rows.heads; ++head) {
    backend_.copy_rows(grouped_.data() + head * rows.dim * element, rows.heads * rows.dim * element, rows.at(0, head),
                       rows.token_stride * element, rows.dim * element, count, stream);
  }
  return dense_view(static_cast<const void*>(grouped_.data()), rows.dtype, count, shape.heads, shape.dim);
}

void LowRankCodec::add_gram(const TensorView& plain, std::span<const CompressedRun> runs, double* sums, Stream stream) {
  for (const CompressedRun& run : runs) {
    for (std::int64_t first = 0; first < run.rows; first += max_tokens_) {
      const std::int64_t count = std::min(max_tokens_, run.rows - first);
      backend_.add_gram({grouped(plain, run.to + first, count, stream), sums}, stream);
    }
  }
}

void LowRankCodec::compress(const TensorView& plain, std::span<const CompressedRun> runs, const CompressedRows& to,
                            InvalidElementCell* invalid, Stream stream) {
  for (const CompressedRun& run : runs) {
    for (std::int64_t first = 0; first < run.rows; first += max_tokens_) {
      const std::int64_t count = std::min(max_tokens_, run.rows - first);
      const std::int64_t token = run.to + first;
      const MutableTensorView factors = factors_view(to, format_, shape_, run.row + first, count);
      projection_->multiply(
          {grouped(plain, token, count, stream), projection_matrices(format_, shape_, to.tables[0]), factors}, stream,
          {});
      if (invalid != nullptr) backend_.check_finite({factors, kInvalidFactor, token, invalid}, stream);
      if (invalid == nullptr && format_.encoding == RowEncoding::kLowRank) continue;
      if (products_.data() == nullptr) products_ = allocate_tokens();
      const MutableTensorView products =
          dense_view(static_cast<void*>(products_.data()), shape_.dtype, count, shape_.heads, shape_.dim);
      expand_factors(*expansion_, format_, shape_, to, run.row + first, products, stream);
      if (invalid != nullptr) backend_.check_finite({products, kInvalidProduct, token, invalid}, stream);
      if (format_.encoding == RowEncoding::kLowRank) continue;
      const CompressedRun block_run{run.sequence, run.position + first, run.keys, run.row + first, count, 0};
      backend_.compress({format_, shape_, rows_of(plain, token, count), products, {&block_run, 1}, to}, stream);
    }
  }
}

void LowRankCodec::decompress(const DecompressTask& task, Stream stream) {
  for (const CompressedRun& run : task.runs) {
    expand_factors(*expansion_, format_, shape_, task.from, run.row, rows_of(task.plain, run.to, run.rows), stream);
  }
  if (format_.encoding != RowEncoding::kLowRank || task.invalid != nullptr) backend_.decompress(task, stream);
}

}  // namespace ringattn
