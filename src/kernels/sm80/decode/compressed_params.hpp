// SPDX-License-Identifier: Apache-2.0
// What a launch over a compressed cache is given, besides what every decode kernel is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/row_format.hpp"
#include "kernels/sm80/decode/decode_params.hpp"

namespace ringattn::sm80 {

// Rows in pages, strides in bytes.
struct PagedBytes {
  const std::byte* data = nullptr;  // null: the format has no such rows
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

#ifdef __CUDACC__
  // Those of a head.
  __device__ __forceinline__ PagedBytes of_head(int head) const {
    return {data + head * head_stride, page_stride, token_stride, head_stride};
  }
  __device__ __forceinline__ const std::byte* at(std::int64_t page, std::int64_t of_page) const {
    return data + page * page_stride + of_page * token_stride;
  }
#endif
};

// K or V, or latents that are both.
struct QuantizedTensor {
  PagedBytes quantized;    // of kPlain: elements
  PagedBytes qparams;      // scales, or scales and zeros, of each row
  PagedBytes rotary;       // of kLatent
  const std::byte* table;  // scales of a tensor or of heads, or a tail; null: there is none
  RowEncoding encoding;
  ScaleGrain scales;
  std::int32_t group;  // of 4 bits
};

struct CompressedParams {
  DecodeParams step;     // its caches say nothing
  QuantizedTensor k, v;  // of latents, v says nothing
};

}  // namespace ringattn::sm80
