// SPDX-License-Identifier: Apache-2.0
// What a launch over a compressed cache is given, besides what every decode kernel is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/row_format.hpp"
#include "kernels/sm90/decode/decode_params.hpp"

namespace ringattn::sm90 {

// K or V.
struct PackedTensor {
  // Codes, in boxes of box_rows rows of one page and head, `row_bytes` of each row, which shared memory has swizzled as
  // tiles of elements are.
  CUtensorMap map;
  // Numbers, where numbers_mapped: 16 bytes of each of these rows, from column numbers_step · head on, the one that is
  // a multiple of 16 bytes, where that is not 0; else those of the head.
  CUtensorMap number_map;
  PagedBytes codes;
  PagedBytes numbers;      // a scale a row, or scales and zeros; null: there is one scale, in a table
  const std::byte* table;  // scales in fp32, or a tail
  RowCoding coding;
  ScaleGrain scales;
  bool numbers_mapped;
  std::int32_t numbers_step;  // bytes
  std::int32_t group;         // of 4 bits
  std::int32_t row_bytes;     // of codes: what the sliced kernel fetches of a row
  std::int32_t number_bytes;  // of a row's numbers; 0: none
  std::int32_t pairs_log;     // of 2: scales and zeros of a row, where the dim is a power of 2
  std::int32_t stages;        // of what has been fetched, in the sliced kernel
  std::int32_t stage_bytes;

  constexpr bool has_tail() const { return coding == RowCoding::kInt4Channel; }
  constexpr bool four_bits() const { return coding == RowCoding::kInt4Channel || coding == RowCoding::kInt4Token; }
  // Where in the 16 bytes that shared memory has of a row's numbers those of a head begin.
  constexpr std::int32_t number_offset(int head) const { return numbers_mapped ? head * numbers_step % 16 : 0; }
};

struct CompressedParams {
  DecodeParams step;
  PackedTensor k, v;
  std::int32_t box_log;  // of 2: rows of a box, where a tile has several
};

}  // namespace ringattn::sm90
