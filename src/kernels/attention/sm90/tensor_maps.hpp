// SPDX-License-Identifier: Apache-2.0
// CUtensorMap descriptors, with which TMA addresses boxes of a tensor in global memory. All sm90 kernels use them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/dtype.hpp"

namespace ringattn::sm90 {

// A tensor [rows, heads, columns] of 16-bit elements with contiguous columns. Strides count elements.
struct MappedTensor {
  const void* data;
  std::int64_t rows, heads, columns;
  std::int64_t token_stride, head_stride;
};

// Whether TMA can read and write the tensor: its address and strides are multiples of 16 bytes, and its sizes within
// TMA's limits.
bool can_map(const MappedTensor& tensor);

// Boxes of box_rows rows and box_columns columns of one head, in panels of 64 columns, [panels][rows][64], with the
// 128-byte swizzle. box_columns is 64, or a multiple of 64 that divides the columns. Throws kInternal if the driver
// refuses what can_map() allows.
CUtensorMap map_tensor(const MappedTensor& tensor, Dtype dtype, int box_rows, int box_columns);

// The same for a tensor with one head and boxes of 64 columns, as a map of two dimensions (linear/sm90/matrix_tma.cuh).
CUtensorMap map_matrix(const MappedTensor& tensor, Dtype dtype, int box_rows);

// A paged tensor [pages, rows, heads, columns]: `rows` and the strides of `page` are those of one page. A rank with no
// pages gets an empty map.
struct MappedPages {
  MappedTensor page;
  std::int64_t pages;
  std::int64_t page_stride;
};

bool can_map(const MappedPages& tensor);
// As map_tensor(). A box lies in one page. 16 and 32 columns make panels of that width, with the 32- or 64-byte
// swizzle.
CUtensorMap map_pages(const MappedPages& tensor, Dtype dtype, int box_rows, int box_columns);
// Boxes of up to 64 columns of any 16-bit type, contiguous rows, no swizzle.
CUtensorMap map_plain_pages(const MappedPages& tensor, int box_rows, int box_columns);

}  // namespace ringattn::sm90
