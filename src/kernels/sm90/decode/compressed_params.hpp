// SPDX-License-Identifier: Apache-2.0
// What a launch over a compressed cache is given, besides what every decode kernel is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/row_format.hpp"
#include "kernels/sm90/decode/decode_params.hpp"

namespace ringattn::sm90 {

// K or V.
struct QuantizedTensor {
  // Codes, in boxes of box_rows rows of one page and head, `row_bytes` of each row, which shared memory has swizzled as
  // tiles of elements are.
  CUtensorMap map;
  // Numbers, where qparams_mapped: 16 bytes of each of these rows, from column qparams_step · head on, the one that is
  // a multiple of 16 bytes, where that is not 0; else those of the head.
  CUtensorMap qparam_map;
  PagedBytes quantized;
  PagedBytes qparams;      // a scale a row, or scales and zeros; null: there is one scale, in a table
  const std::byte* table;  // scales in fp32, or a tail
  RowEncoding encoding;
  ScaleGrain scales;
  bool qparams_mapped;
  std::int32_t qparams_step;  // bytes
  std::int32_t group;         // of 4 bits
  std::int32_t row_bytes;     // of quantized: what the sliced kernel fetches of a row
  std::int32_t qparam_bytes;  // of a row's qparams; 0: none
  std::int32_t pairs_log;     // of 2: scales and zeros of a row, where the dim is a power of 2
  std::int32_t stages;        // of what has been fetched, in the sliced kernel
  std::int32_t stage_bytes;

  constexpr bool has_tail() const { return encoding == RowEncoding::kInt4Channel; }
  constexpr bool four_bits() const {
    return encoding == RowEncoding::kInt4Channel || encoding == RowEncoding::kInt4Token;
  }
  // Where in the 16 bytes that shared memory has of a row's qparams those of a head begin.
  constexpr std::int32_t qparam_offset(int head) const { return qparams_mapped ? head * qparams_step % 16 : 0; }
};

struct CompressedParams {
  DecodeParams step;
  QuantizedTensor k, v;
  std::int32_t box_log;  // of 2: rows of a box, where a tile has several
};

}  // namespace ringattn::sm90
