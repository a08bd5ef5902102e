// SPDX-License-Identifier: Apache-2.0
// The arithmetic of `cpu_product`, one table of functions per SIMD target, as tile_ops.hpp has it for the fold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace ringattn::cpu {

// One head's matrix as it lies in memory, [outer, inner]. Strides count bytes; one of them is that of an element.
struct ProductMatrix {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  std::int64_t outer = 0;
  std::int64_t inner = 0;
  std::int64_t outer_stride = 0;
  std::int64_t inner_stride = 0;
};

// Rows of one head, and where their products go.
struct ProductRows {
  const float* rows = nullptr;  // [count, inner]
  std::int64_t count = 0;
  std::byte* out = nullptr;     // [count, outer] of `dtype`
  std::int64_t out_stride = 0;  // bytes from row to row
  Dtype dtype = Dtype::kBf16;
};

// `panels` are aligned to kVectorAlignment (tile_ops.hpp); dims are multiples of 8.
struct ProductOps {
  int panel_width;  // columns of a panel

  // A matrix in fp32, [⌈outer / panel_width⌉, inner, panel_width]; columns behind the last are zero.
  void (*pack)(const ProductMatrix& matrix, float* panels);
  // Each element: one chain of multiply-adds over inner in order, from zero, and one rounding.
  void (*multiply)(const ProductRows& rows, std::int64_t outer, std::int64_t inner, const float* panels);

  std::size_t panel_floats(std::int64_t outer, std::int64_t inner) const {
    return static_cast<std::size_t>((outer + panel_width - 1) / panel_width * panel_width * inner);
  }
};

// The table of the SIMD target that best_tile_ops() has.
const ProductOps& best_product_ops();

}  // namespace ringattn::cpu
