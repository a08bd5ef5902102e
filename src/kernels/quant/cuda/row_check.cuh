// SPDX-License-Identifier: Apache-2.0
// Device-side validation of compressed tensors, by kernels that read them anyway. It finds the same invalid elements at
// the same locations as find_invalid_element() on the host.
#pragma once

#include "base/e4m3.hpp"
#include "kernels/quant/cuda/row_quads.cuh"

namespace ringattn::cuda {

// Returns true if a dequantized value is finite after rounding to Element.
template <class Element>
__device__ __forceinline__ bool is_finite_as(float value) {
  return is_finite<Element>(MmaTraits<Element>::pack(value, 0.0F));
}

template <class Element>
__device__ __forceinline__ bool is_bad_scale(float scale, float max_value) {
  return !(scale > 0.0F) || !is_finite_as<Element>(max_value * scale);
}

template <class Element>
__device__ __forceinline__ void check_pair(const RowParams& p, std::uint32_t qparams, int stream, std::int64_t token,
                                           int head, int pair) {
  const float scale = widen<Element>(qparams);
  const float zero = widen<Element>(qparams >> 16);
  const bool good_zero = is_finite<Element>(qparams >> 16);
  const bool good_scale = scale >= 0.0F && is_finite<Element>(qparams);
  const bool bad_scale = !good_scale || (good_zero && !is_finite_as<Element>(dequantize_int4(15, scale, zero)));
  if (good_zero && !bad_scale) return;
  note_invalid_element(p.invalid, location_of_element(stream, token, head, 2 * pair + (bad_scale ? 0 : 1)),
                       bad_scale ? scale : zero);
}

// Checks four quantized values, and the qparams whose group begins with them.
template <class Element>
__device__ __forceinline__ void check_quantized(const RowParams& p, std::uint32_t quantized, std::uint32_t qparams,
                                                std::int64_t token, int head, int channel) {
  const RowEncoding encoding = p.format.encoding;
  if (encoding == RowEncoding::kInt4Token || encoding == RowEncoding::kHybrid) {
    if (channel % p.format.group != 0) return;
    check_pair<Element>(p, qparams, encoding == RowEncoding::kHybrid ? 2 : 1, token, head, channel / p.format.group);
    return;
  }
  const bool latent = encoding == RowEncoding::kLatent;
  if (encoding != RowEncoding::kFp8 && encoding != RowEncoding::kInt8 && !latent) return;
  if (latent && channel >= p.dim - p.format.rope) return;  // check_qparams() checks these
  const bool fp8 = encoding == RowEncoding::kFp8 || latent;
  for (int i = 0; i < 4; ++i) {
    const auto code = static_cast<std::uint8_t>(quantized >> 8 * i);
    if (fp8 ? (code & 0x7fU) != 0x7fU : code != 0x80U) continue;
    note_invalid_element(p.invalid, location_of_element(0, token, head, channel + i),
                         fp8 ? e4m3_to_float(code) : -128.0F);
    break;
  }
  const int first = latent ? channel % kLatentScaleBlock : channel;  // offset within the channels that share a scale
  if (first > 0 || (fp8 && p.format.scales != ScaleGrain::kTokenHead)) return;
  const float scale = __uint_as_float(qparams);
  if (is_bad_scale<Element>(scale, fp8 ? kMaxE4m3 : kMaxInt8)) {
    note_invalid_element(p.invalid, location_of_element(1, token, head, latent ? channel / kLatentScaleBlock : 0),
                         scale);
  }
}

// Checks rows of the tail. `row` counts tail rows over all sequences.
template <class Element>
__device__ __forceinline__ void check_tail(const RowParams& p, uint2 raw, std::int64_t row, int head, int channel) {
  const std::int64_t first = (row * p.heads + head) * p.dim + channel;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t bits = (i < 2 ? raw.x : raw.y) >> i % 2 * 16;
    if (is_finite<Element>(bits)) continue;
    note_invalid_element(p.invalid, location_of_table_element(0, first + i), widen<Element>(bits));
    return;
  }
}

// Checks a stream of 16-bit elements other than scales (factors or outliers), [tokens, heads, width]. Called by all
// threads of the run.
template <class Element>
__device__ __forceinline__ void check_stream(const RowParams& p, const CompressedRun& run, int stream, int heads,
                                             int width) {
  const std::int64_t count = run.rows * heads * width;
  for (std::int64_t at = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; at < count;
       at += gridDim.x * std::int64_t{blockDim.x}) {
    const auto element = static_cast<int>(at % width);
    const auto head = static_cast<int>(at / width % heads);
    const std::int64_t row = at / width / heads;
    const std::uint32_t bits = load_any_half(p.streams[stream].at(run.row + row, head) + 2 * element);
    if (is_finite<Element>(bits)) continue;
    note_invalid_element(p.invalid, location_of_element(stream, run.to + row, head, element), widen<Element>(bits));
  }
}
template <class Element>
__device__ __forceinline__ void check_qparams(const RowParams& p, const CompressedRun& run) {
  if (p.format.encoding == RowEncoding::kLatent) check_stream<Element>(p, run, 2, p.heads, p.format.rope);
  if (p.format.encoding != RowEncoding::kLowRank && p.format.encoding != RowEncoding::kHybrid) return;
  check_stream<Element>(p, run, 0, p.heads / p.format.heads, p.format.rank);
  if (p.format.encoding == RowEncoding::kHybrid) check_stream<Element>(p, run, 3, p.heads, p.format.outliers);
}

// Checks the tables. Called by all thread blocks of one row of the grid.
template <class Element>
__device__ __forceinline__ void check_tables(const RowParams& p) {
  const std::int64_t first = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  const std::int64_t step = gridDim.x * std::int64_t{blockDim.x};
  const auto* const elements = reinterpret_cast<const std::uint16_t*>(p.tables[0]);
  std::int64_t count = 0;  // number of elements
  switch (p.format.encoding) {
    case RowEncoding::kFp8: {
      if (p.format.scales == ScaleGrain::kTokenHead) return;
      const std::int64_t scales = p.format.scales == ScaleGrain::kHead ? p.heads : 1;
      for (std::int64_t at = first; at < scales; at += step) {
        const float scale = reinterpret_cast<const float*>(p.tables[0])[at];
        if (is_bad_scale<Element>(scale, kMaxE4m3))
          note_invalid_element(p.invalid, location_of_table_element(0, at), scale);
      }
      return;
    }
    case RowEncoding::kVector:
      count = std::int64_t{p.heads} * p.dim * kCodebookVectors;
      break;
    case RowEncoding::kLowRank:
    case RowEncoding::kHybrid:
      count = std::int64_t{p.heads} * p.format.rank * p.dim;
      break;
    default:
      return;
  }
  for (std::int64_t at = first; at < count; at += step) {
    if (is_finite<Element>(elements[at])) continue;
    note_invalid_element(p.invalid, location_of_table_element(0, at), widen<Element>(elements[at]));
  }
  if (p.format.encoding != RowEncoding::kHybrid) return;
  const auto* const channels = reinterpret_cast<const std::int32_t*>(p.tables[1]);
  for (std::int64_t at = first; at < std::int64_t{p.heads} * p.format.outliers; at += step) {
    const std::int32_t channel = channels[at];
    const bool ascends = at % p.format.outliers == 0 || channel > channels[at - 1];
    if (channel >= 0 && channel < p.dim && ascends) continue;
    note_invalid_element(p.invalid, location_of_table_element(1, at), static_cast<float>(channel));
  }
}

}  // namespace ringattn::cuda
