// SPDX-License-Identifier: Apache-2.0
// Reads the rows and matrices of MLA from the tensors that mla_tensors.cpp has found.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/quant/latent_rows.hpp"
#include "ops/mla/mla_tensors.hpp"

namespace ringattn {

namespace {

using Rows = MlaTensors::Rows;

// Joined rows are read whole, into a staging buffer, and the requested part is copied out of them.
void read_joined(const MlaTensors& source, SyntheticTensor tensor, std::span<const PackedRun> runs,
                 const MutableTensorView& rows) {
  const bool codes = source.rows == Rows::kFp8;
  const std::size_t element = codes ? 1 : size_of(rows.dtype);
  const auto row_bytes = static_cast<std::size_t>(source.latent_grid.dim) * element;
  const bool latent = tensor == SyntheticTensor::kLatent;
  const int other_dim = latent ? source.rope_dim : source.latent_dim;
  std::vector<std::byte> staging;
  std::vector<std::byte> unwanted;
  for_each_segment(source.latent_grid, runs, element, kStagingBytes, [&](const RowSegment& segment) {
    staging.resize(static_cast<std::size_t>(segment.tokens) * row_bytes);
    source.latent.shard->read(*source.latent.info, segment.offset, staging);
    MutableTensorView part = rows;
    part.data = rows.at(segment.row, 0);
    part.tokens = segment.tokens;
    if (codes) {
      unwanted.resize(static_cast<std::size_t>(segment.tokens * other_dim) * size_of(rows.dtype));
      const MutableTensorView other =
          dense_view(static_cast<void*>(unwanted.data()), rows.dtype, segment.tokens, 1, other_dim);
      dequantize_latent_rows(staging.data(), static_cast<std::int64_t>(row_bytes), latent ? part : other,
                             latent ? other : part);
      return;
    }
    TensorView wanted = dense_view(static_cast<const void*>(staging.data()), rows.dtype, segment.tokens, 1, rows.dim);
    wanted.token_stride = source.latent_grid.dim;
    if (!latent) wanted.data = staging.data() + static_cast<std::size_t>(source.latent_dim) * element;
    for (std::int64_t token = 0; token < part.tokens; ++token) {
      std::copy_n(wanted.at(token, 0), static_cast<std::size_t>(rows.dim) * element, part.at(token, 0));
    }
  });
  source.latent.shard->check_unchanged();
}

// Reads matrices of consecutive heads from kv_b_proj.
void read_joined_weights(const MlaTensors& source, SyntheticTensor tensor, std::span<const PackedRun> heads,
                         const MutableTensorView& rows) {
  const std::int64_t row_bytes = source.latent_dim * static_cast<std::int64_t>(size_of(rows.dtype));
  const std::int64_t first = tensor == SyntheticTensor::kWeightValues ? source.head_dim : 0;
  std::int64_t to = 0;
  std::vector<std::byte> matrix(static_cast<std::size_t>(rows.heads * row_bytes));
  for (const PackedRun& run : heads) {
    for (std::int64_t head = run.begin; head < run.end; ++head, ++to) {
      const std::int64_t row = head * (source.head_dim + source.head_dim_v) + first;
      if (source.scales) {
        read_scaled_rows(source.w_uk, *source.scales, row, rows.dtype, matrix);
      } else {
        source.w_uk.shard->read(*source.w_uk.info, row * row_bytes, matrix);
      }
      scatter_rows(matrix, 0, rows.heads, rows, to);
    }
  }
  source.w_uk.shard->check_unchanged();
}

}  // namespace

void read_fp8_latents(const MlaTensors& source, std::span<const PackedRun> runs, std::span<std::byte> rows) {
  read_row_bytes(source.latent, source.latent_grid, runs, 1, rows);
}

void read_latents(const MlaTensors& source, SyntheticTensor tensor, std::span<const PackedRun> runs,
                  const MutableTensorView& rows) {
  const bool keys = tensor == SyntheticTensor::kWeightKeys;
  if (keys || tensor == SyntheticTensor::kWeightValues) {
    if (source.joined_weights) return read_joined_weights(source, tensor, runs, rows);
    return read_rows(keys ? source.w_uk : source.w_uv, row_grid(keys ? source.w_uk : source.w_uv, AxisOrder::kThd),
                     runs, rows);
  }
  if (source.rows != Rows::kSeparate) return read_joined(source, tensor, runs, rows);
  if (tensor == SyntheticTensor::kLatent) return read_rows(source.latent, source.latent_grid, runs, rows);
  read_rows(source.k_rope, source.k_rope_grid, runs, rows);
}

}  // namespace ringattn
