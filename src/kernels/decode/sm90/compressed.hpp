// SPDX-License-Identifier: Apache-2.0
// Decode over quantized caches: kernel parameters, the compiled kernels, one for each element type and head dims
// (kernels/instances.cmake), and the host code that sets their caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/memory.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm90/decode_params.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn::sm90 {

// K or V.
struct QuantizedTensor {
  // Quantized values: boxes of box_rows rows of one page and head, `row_bytes` of each row, swizzled in shared memory
  // as tiles of elements are.
  CUtensorMap map;
  // Scales and zero points, if qparams_mapped: 16 bytes for each of these rows. They start at byte qparams_step · head,
  // rounded down to a multiple of 16, if qparams_step is not 0; else the map has a head dimension.
  CUtensorMap qparam_map;
  PagedBytes quantized;
  PagedBytes qparams;      // a scale for each row, or scales and zero points; null: one scale in a table
  const std::byte* table;  // fp32 scales, or the 16-bit tail
  RowEncoding encoding;
  ScaleGrain scales;
  bool qparams_mapped;
  std::int32_t qparams_step;  // bytes
  std::int32_t group;         // quantization group of int4, in elements
  std::int32_t row_bytes;     // bytes of quantized values that the sliced kernel loads for each row
  std::int32_t qparam_bytes;  // bytes of a row's scales and zero points; 0: none
  std::int32_t pairs_log;     // log2 of the (scale, zero point) pairs of a row, if the dim is a power of 2
  std::int32_t stages;        // stages of values and qparams in the sliced kernel
  std::int32_t stage_bytes;

  constexpr bool has_tail() const { return encoding == RowEncoding::kInt4Channel; }
  constexpr bool four_bits() const {
    return encoding == RowEncoding::kInt4Channel || encoding == RowEncoding::kInt4Token;
  }
  // Offset of a head in the 16 bytes that shared memory holds of a row's qparams.
  constexpr std::int32_t qparam_offset(int head) const { return qparams_mapped ? head * qparams_step % 16 : 0; }
};

// compressed.cuh.
struct CompressedParams : WorkTileParams {
  BlockMaskRows mask;
  SplitScratch scratch;
  std::int32_t slices;   // as in DecodeParams
  std::int32_t* failed;  // as in SlicedParams
  QuantizedTensor k, v;
  std::int32_t box_log;  // log2 of the rows of a box, if a tile has several boxes
};

// As DecodeLauncher. The cache fields of params are set already, except the stages.
struct CompressedLauncher {
  void (*prepare)();
  void (*launch)(const CompressedParams& params, int ctas, Stream stream);
  void (*launch_sliced)(const CompressedParams& params, int clusters, Stream stream);
  int (*clusters_at_a_time)(int slices);
};

extern const CompressedLauncher compressed_bf16_64;
extern const CompressedLauncher compressed_bf16_96;
extern const CompressedLauncher compressed_bf16_128;
extern const CompressedLauncher compressed_bf16_192;
extern const CompressedLauncher compressed_bf16_256;
extern const CompressedLauncher compressed_fp16_64;
extern const CompressedLauncher compressed_fp16_96;
extern const CompressedLauncher compressed_fp16_128;
extern const CompressedLauncher compressed_fp16_192;
extern const CompressedLauncher compressed_fp16_256;

const CompressedLauncher& compressed_launcher_of(const DecodeSpec& spec, bool configured);

// Formats of a spec that sm90_attention does not support; empty: none.
std::vector<std::string> formats_missing(const DecodeSpec& spec);

// Whether the sliced kernel decodes these formats: those that the compression methods make. Other 4-bit formats, keys
// quantized by token or values by channel, are decoded tile by tile.
bool slices_formats(const CacheFormat& format);

// Sets the cache fields of a step after all others. Throws kUnsupported if TMA can't read the caches.
void set_compressed(const DecodeStep& step, CompressedParams& p);

}  // namespace ringattn::sm90
