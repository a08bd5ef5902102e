// SPDX-License-Identifier: Apache-2.0
// Dequantizes key tiles of a cache in bf16 with AVX-512, for 8-bit and 4-bit formats. Elements are those of
// quant/row_codec.hpp, except that subnormal ones are zero, as AMX tiles treat them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/cpu/tile_ops.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn::cpu {

// Addresses of one head's rows of a tile in a compressed cache.
struct QuantizedTile {
  TileRows values;
  TileRows scales;      // scales, or pairs of a scale and a zero point
  float one_scale = 0;  // kFp8 without a scale for each token and head
  int keys = 0;
};

// Whether load_quantized_rows() supports the format. The processor must have AVX512-BF16 and AVX512-VBMI.
bool dequantizes_tiles(const RowFormat& format, const RowShape& shape);

// kInt4Channel: scales and zero points of the group of tokens that was read last, of even channels and of odd ones.
struct ChannelScales {
  alignas(64) float scale[kMaxHeadDim / 32][2][16];
  alignas(64) float zero[kMaxHeadDim / 32][2][16];
  int first = -1024;  // the group's first key in the tile; negative: none was read
};

// Arguments of load_quantized_rows(): the tile to read, and the tile that will be read after it, whose rows are
// prefetched (null: not known).
struct QuantizedRows {
  const RowFormat* format = nullptr;
  int dim = 0;
  const QuantizedTile* tile = nullptr;
  const QuantizedTile* next = nullptr;
  ChannelScales* channels = nullptr;
};

// A RowLoader's function, of a QuantizedRows. `rows` is aligned to 64 bytes. Returns false if a scale or zero point is
// not finite, so great that an element may not be, or so small that an element may be subnormal. With kInt4Channel all
// keys of the groups are quantized.
bool load_quantized_rows(const void* quantized_rows, int first, int end, std::byte* rows);

// A PairLoader's function, as load_quantized_rows().
bool load_quantized_pairs(const void* quantized_rows, int first, int end, std::byte* pairs);

}  // namespace ringattn::cpu
