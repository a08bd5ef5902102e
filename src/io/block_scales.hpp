// SPDX-License-Identifier: Apache-2.0
// An e4m3 matrix with an fp32 scale for each block of 128 x 128 elements, as DeepSeek-V3's checkpoints hold kv_b_proj
// beside its weight_scale_inv. An element is its quantized value times its block's scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/dtype.hpp"
#include "io/safetensors_file.hpp"
#include "io/tensor_roles.hpp"

namespace ringattn {

inline constexpr std::int64_t kScaleBlock = 128;

struct BlockScales {
  TensorSource source;
  std::int64_t columns = 0;   // blocks of a row
  std::vector<float> scales;  // [blocks of rows, columns], all finite
};

// The scales of a job's kv_b_proj. An F8_E4M3 matrix must have them. Matrices of other dtypes must not, because their
// elements may be the quantized values after a cast. The scales are `<name>_scale_inv` or, if the caller named no
// kv_b_proj, the only tensor whose name ends so. Throws kFile.
std::optional<BlockScales> find_block_scales(const SafetensorsFile& file, const InputNames& names,
                                             const TensorSource& matrix);

// Rows [first, first + target.size() / row) of the matrix, whose rows have shape[1] elements: each element the exact
// product of quantized value and scale, rounded once to `dtype`. Throws kFile for a NaN code and for a product beyond
// the dtype.
void read_scaled_rows(const TensorSource& matrix, const BlockScales& scales, std::int64_t first, Dtype dtype,
                      std::span<std::byte> target);

}  // namespace ringattn
