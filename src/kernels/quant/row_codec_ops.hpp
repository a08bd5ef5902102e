// SPDX-License-Identifier: Apache-2.0
// Dequantization of rows, vectorized, one function table per SIMD target like quant_ops.hpp. All targets have the same
// bits: those of the functions in row_quantization.hpp, and of float_to_bf16().
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringattn {

// `count` is a multiple of 8 for int4, and any number for others.
struct RowCodecOps {
  // wide[i] = values[i] · scale, of e4m3 and int8.
  void (*dequantize_fp8)(const std::byte* values, float scale, std::int64_t count, float* wide);
  void (*dequantize_int8)(const std::byte* values, float scale, std::int64_t count, float* wide);
  // wide[i] = dequantize_int4(value i, scales[i], zeros[i]). A byte holds two values. The second function has one scale
  // and zero point for all values.
  void (*dequantize_int4)(const std::byte* pairs, const float* scales, const float* zeros, std::int64_t count,
                          float* wide);
  void (*dequantize_int4_group)(const std::byte* pairs, float scale, float zero, std::int64_t count, float* wide);
  void (*narrow_to_bf16)(const float* wide, std::int64_t count, std::byte* row);
};

// The table of this processor's best target.
const RowCodecOps& best_row_codec_ops();

}  // namespace ringattn
