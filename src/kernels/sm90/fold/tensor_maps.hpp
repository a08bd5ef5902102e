// SPDX-License-Identifier: Apache-2.0
// Tensor maps: how the copy engine finds boxes of a tensor in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/dtype.hpp"

namespace ringattn::sm90 {

// A tensor [rows, heads, columns] of 16-bit elements with contiguous columns; strides count elements.
struct MappedTensor {
  const void* data;
  std::int64_t rows, heads, columns;
  std::int64_t token_stride, head_stride;
};

// Whether the copy engine can read and write it: 16-byte alignment of its start and strides, and sizes within bounds.
bool can_map(const MappedTensor& tensor);

// Boxes of box_rows rows and box_columns columns of one head, in panels of 64 columns, [panels][rows][64], with the
// 128-byte swizzle. box_columns is a multiple of 64, and, but for 64 itself, one that divides the columns. Throws
// kInternal where the driver refuses what can_map() allows.
CUtensorMap map_tensor(const MappedTensor& tensor, Dtype dtype, int box_rows, int box_columns);

// Pages of such a tensor, [pages, rows, heads, columns]: `rows` and the strides of `page` are those of a page. Without
// pages, as on a rank that has none, there is nothing to map, and the map is empty.
struct MappedPages {
  MappedTensor page;
  std::int64_t pages;
  std::int64_t page_stride;
};

bool can_map(const MappedPages& tensor);
// As above; a box lies in one page. 16 and 32 columns make panels of that width, with the swizzle of 32 or 64 bytes.
CUtensorMap map_pages(const MappedPages& tensor, Dtype dtype, int box_rows, int box_columns);
// Of 16 bits whatever they are, up to 64 columns: rows lie one behind the other, without a swizzle.
CUtensorMap map_plain_pages(const MappedPages& tensor, int box_rows, int box_columns);

}  // namespace ringattn::sm90
