// SPDX-License-Identifier: Apache-2.0
// Parameters of a launch over a compressed cache, in addition to DecodeParams.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/decode/sm80/decode_params.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn::sm80 {

// Rows in pages, [pages, tokens, heads, row bytes]. Strides count bytes.
struct PagedBytes {
  const std::byte* data = nullptr;  // null: the format has no such rows
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

#ifdef __CUDACC__
  // The rows of one head.
  __device__ __forceinline__ PagedBytes of_head(int head) const {
    return {data + head * head_stride, page_stride, token_stride, head_stride};
  }
  __device__ __forceinline__ const std::byte* at(std::int64_t page, std::int64_t in_page) const {
    return data + page * page_stride + in_page * token_stride;
  }
#endif
};

// K or V, or a latent cache that is both.
struct QuantizedTensor {
  PagedBytes quantized;    // quantized values; elements for kPlain
  PagedBytes qparams;      // scales, or scales and zero points, of each row
  PagedBytes rotary;       // rotary keys of kLatent
  const std::byte* table;  // scales of a tensor or of heads, or a tail; null if there is none
  RowEncoding encoding;
  ScaleGrain scales;
  std::int32_t group;  // tokens per group of int4
};

struct CompressedParams {
  DecodeParams step;     // its k and v are unused
  QuantizedTensor k, v;  // v is unused with a latent cache
};

}  // namespace ringattn::sm80
