// SPDX-License-Identifier: Apache-2.0
// Dequantization on any GPU. A warp takes rows of one head and loads several of them before it processes the first.
#include "base/e4m3.hpp"
#include "kernels/quant/cuda/row_launch.hpp"
#include "kernels/quant/cuda/row_quads.cuh"

namespace ringattn::cuda {

// Device-side validation of compressed tensors, by kernels that read them anyway. It finds the same invalid elements at
// the same locations as find_invalid_element() on the host.

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

namespace {

constexpr int kDecompressThreads = 256;
constexpr int kWarps = kDecompressThreads / 32;
constexpr int kRowsAhead = 4;  // per warp

// A quad of a row as loaded.
struct RawQuad {
  std::uint32_t quantized = 0;
  std::uint32_t qparams = 0;  // an 8-bit format's scale, or a 4-bit format's scale and zero point
  uint2 plain{0, 0};          // kHybrid: products; kPlain: elements
};

// Addresses of a row.
struct RowAt {
  const std::byte* streams[kMaxStreams];
  std::byte* plain;
};

template <RowEncoding kEncoding>
__device__ __forceinline__ RawQuad load_quad(const RowParams& p, const RowAt& row, int head, int channel) {
  RawQuad raw;
  if constexpr (kEncoding == RowEncoding::kFp8) {
    raw.quantized = load_quantized(p, row.streams[0], channel);
    raw.qparams = p.format.scales == ScaleGrain::kTokenHead
                      ? load_word(p, row.streams[1])
                      : load_word(p, p.tables[0] + (p.format.scales == ScaleGrain::kHead ? 4 * head : 0));
  } else if constexpr (kEncoding == RowEncoding::kInt8) {
    raw.quantized = load_quantized(p, row.streams[0], channel);
    raw.qparams = load_word(p, row.streams[1]);
  } else if constexpr (kEncoding == RowEncoding::kInt4Token) {
    raw.quantized = load_nibbles(p, row.streams[0], channel);
    raw.qparams = load_pair(p, row.streams[1], channel / kPairChannels);
  } else if constexpr (kEncoding == RowEncoding::kHybrid) {
    raw.quantized = load_nibbles(p, row.streams[1], channel);
    raw.qparams = load_pair(p, row.streams[2], channel / kPairChannels);
    raw.plain = load_elements(p, row.plain, channel);
  } else if constexpr (kEncoding == RowEncoding::kPlain) {
    raw.plain = load_elements(p, row.streams[0], channel);
  } else if constexpr (kEncoding == RowEncoding::kLatent) {
    const int quantized_dims = p.dim - p.format.rope;
    if (channel < quantized_dims) {
      raw.quantized = load_quantized(p, row.streams[0], channel);
      raw.qparams = load_word(p, row.streams[1] + channel / kLatentScaleBlock * 4);
    } else {
      raw.plain = load_elements(p, row.streams[2], channel - quantized_dims);
    }
  } else {
    static_assert(kEncoding == RowEncoding::kVector);
    const std::byte* const quantized = row.streams[0] + channel / p.format.width;
    raw.quantized = static_cast<std::uint32_t>(quantized[0]);
    if (p.format.width == 2 && channel + 2 < p.dim) raw.quantized |= static_cast<std::uint32_t>(quantized[1]) << 8;
  }
  return raw;
}

template <class Element, RowEncoding kEncoding>
__device__ __forceinline__ uint2 dequantized(const RowParams& p, const RawQuad& raw, int head, int channel) {
  Quad quad;
  if constexpr (kEncoding == RowEncoding::kFp8 || kEncoding == RowEncoding::kLatent) {
    if (kEncoding == RowEncoding::kLatent && channel >= p.dim - p.format.rope) return raw.plain;
    quad = fp8_quad(raw.quantized, __uint_as_float(raw.qparams));
  } else if constexpr (kEncoding == RowEncoding::kInt8) {
    quad = int8_quad(raw.quantized, __uint_as_float(raw.qparams));
  } else if constexpr (kEncoding == RowEncoding::kHybrid) {
    const Quad product = widen<Element>(raw.plain);
    const Quad remainder = int4_quad<Element>(raw.quantized, raw.qparams);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      quad.x[i] = hybrid_element(product.x[i], remainder.x[i], max_finite<Element>());
    }
  } else if constexpr (kEncoding == RowEncoding::kVector) {
    const int width = p.format.width;
    const auto* const book = reinterpret_cast<const std::uint16_t*>(p.tables[0]) +
                             static_cast<std::int64_t>(head) * kCodebookVectors * p.dim;
    std::uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = channel + i;
      const int run = c / width;
      const auto vector = static_cast<int>(raw.quantized >> (width == 2 ? i / 2 * 8 : 0) & 0xffU);
      bits[i] = c < p.dim ? book[(run * kCodebookVectors + vector) * width + c % width] : 0U;
    }
    return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
  } else if constexpr (kEncoding == RowEncoding::kPlain) {
    return raw.plain;
  } else {
    quad = int4_quad<Element>(raw.quantized, raw.qparams);
  }
  return narrow<Element>(quad);
}

// Dequantizes rows of encodings that quantize each token's row separately. The encoding is a template parameter, so
// that the loads of several rows are issued one after another.
template <class Element, RowEncoding kEncoding>
__global__ void __launch_bounds__(kDecompressThreads, kEncoding == RowEncoding::kHybrid ? 2 : 3)
    decompress_rows(const __grid_constant__ RowParams p) {
  const CompressedRun& run = p.run[blockIdx.y];
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto heads = static_cast<std::uint32_t>(p.heads);
  const auto run_rows = static_cast<std::uint32_t>(run.rows) * heads;
  const std::uint32_t step = gridDim.x * kWarps * kRowsAhead;
  const DeviceRows plain = p.plain.from(run.to);
  DeviceRows streams[kMaxStreams];
#pragma unroll
  for (int s = 0; s < kMaxStreams; ++s) streams[s] = p.streams[s].from(run.row);
  for (std::uint32_t first = (blockIdx.x * kWarps + threadIdx.x / 32) * kRowsAhead; first < run_rows; first += step) {
    const RowsOfRun<kRowsAhead> rows(first, run_rows, heads);
    RowAt at[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      at[i].plain = plain.near(rows.token[i], rows.head[i]);
#pragma unroll
      for (int s = 0; s < kMaxStreams; ++s) at[i].streams[s] = streams[s].near(rows.token[i], rows.head[i]);
    }
    for (int channel = lane * kQuadChannels; channel < p.dim; channel += kLaneStep) {
      RawQuad raw[kRowsAhead];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        raw[i] = load_quad<kEncoding>(p, at[i], static_cast<int>(rows.head[i]), channel);
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kRowsAhead; ++i) {
        if (first + i >= run_rows) break;
        const auto head = static_cast<int>(rows.head[i]);
        if (p.invalid != nullptr) {
          check_quantized<Element>(p, raw[i].quantized, raw[i].qparams, run.to + rows.token[i], head, channel);
        }
        store_elements(p, at[i].plain, channel, dequantized<Element, kEncoding>(p, raw[i], head, channel));
      }
    }
    if constexpr (kEncoding != RowEncoding::kHybrid) continue;
    __syncwarp();
#pragma unroll
    for (std::uint32_t i = 0; i < kRowsAhead; ++i) {
      if (first + i >= run_rows) break;
      const auto* const channels =
          reinterpret_cast<const std::int32_t*>(p.tables[1]) + static_cast<int>(rows.head[i]) * p.format.outliers;
      auto* const to = reinterpret_cast<std::uint16_t*>(at[i].plain);
      for (int n = lane; n < p.format.outliers; n += 32) {
        const std::int32_t channel = channels[n];
        if (channel < 0 || channel >= p.dim) continue;
        to[channel] = static_cast<std::uint16_t>(load_any_half(at[i].streams[3] + 2 * n));
      }
    }
  }
  if (p.invalid != nullptr) {
    check_qparams<Element>(p, run);
    if (blockIdx.y == 0) check_tables<Element>(p);
  }
}

// Dequantizes groups of tokens of kInt4Channel, 128 channels of a head at a time. A warp keeps their scales in
// registers.
template <class Element>
__global__ void __launch_bounds__(kDecompressThreads, 3) decompress_groups(const __grid_constant__ RowParams p) {
  constexpr int kRows = 8;  // rows loaded at a time
  const CompressedRun& run = p.run[blockIdx.y];
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int group = p.format.group;
  const auto groups = static_cast<std::uint32_t>((run.rows + group - 1) / group);
  const auto heads = static_cast<std::uint32_t>(p.heads);
  const std::int64_t full_tokens = full_group_tokens(run.keys, group);
  for (std::uint32_t group_index = blockIdx.x * kWarps + threadIdx.x / 32; group_index < groups * heads;
       group_index += gridDim.x * kWarps) {
    const auto head = static_cast<int>(group_index % heads);
    const std::int64_t first = static_cast<std::int64_t>(group_index / heads) * group;  // row of the run
    const std::int64_t position = run.position + first;
    const std::int64_t left = run.rows - first;
    const int rows = left < group ? static_cast<int>(left) : group;
    for (int channel = lane * kQuadChannels; channel < p.dim; channel += kLaneStep) {
      if (position >= full_tokens) {
        for (int t = 0; t < rows; ++t) {
          const std::byte* const tail =
              p.tables[0] + ((run.sequence * group + t) * p.heads + head) * static_cast<std::int64_t>(2 * p.dim);
          const uint2 raw = load_elements(p, tail, channel);
          if (p.invalid != nullptr) check_tail<Element>(p, raw, run.sequence * group + t, head, channel);
          store_elements(p, p.plain.at(run.to + first + t, head), channel, raw);
        }
        continue;
      }
      std::uint32_t qparams[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const ScaleOffset offset = scale_offset_of(channel + i, p.dim, group);
        qparams[i] = load_pair(p, p.streams[1].at(run.row + first + offset.token, head), static_cast<int>(offset.pair));
        if (p.invalid != nullptr) {
          check_pair<Element>(p, qparams[i], 1, run.to + first + offset.token, head, static_cast<int>(offset.pair));
        }
      }
      for (int begin = 0; begin < rows; begin += kRows) {  // groups have 32 or 64 tokens
        std::uint32_t quantized[kRows];
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
          quantized[t] = load_nibbles(p, p.streams[0].at(run.row + first + begin + t, head), channel);
        }
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
          store_elements(p, p.plain.at(run.to + first + begin + t, head), channel,
                         narrow<Element>(int4_quad<Element>(quantized[t], qparams)));
        }
      }
    }
  }
}

// kLowRank has nothing to dequantize, so it is only checked.
template <class Element>
__global__ void __launch_bounds__(kDecompressThreads) check_factors(const __grid_constant__ RowParams p) {
  check_qparams<Element>(p, p.run[blockIdx.y]);
  if (blockIdx.y == 0) check_tables<Element>(p);
}

template <class Element>
void launch_decompress(const RowParams& p, dim3 grid, Stream stream) {
  const cudaStream_t queue = cuda_stream(stream);
  switch (p.format.encoding) {
    case RowEncoding::kInt4Channel:
      decompress_groups<Element><<<grid, kDecompressThreads, 0, queue>>>(p);
      break;
    case RowEncoding::kLowRank:
      if (p.invalid == nullptr) return;
      check_factors<Element><<<grid, kDecompressThreads, 0, queue>>>(p);
      break;
    default:
      with_token_encoding(p.format.encoding, [&]<RowEncoding kEncoding>() {
        decompress_rows<Element, kEncoding><<<grid, kDecompressThreads, 0, queue>>>(p);
      });
      break;
  }
  check_cuda(cudaGetLastError(), "decompress");
}

template <class Element>
void load() {
  for (const RowEncodingEntry& entry : row_encodings()) {
    with_token_encoding(entry.encoding,
                        [&]<RowEncoding kEncoding>() { load_kernel(decompress_rows<Element, kEncoding>); });
  }
  load_kernel(decompress_groups<Element>);
  load_kernel(check_factors<Element>);
}

}  // namespace

void decompress(const DecompressTask& task, Stream stream) {
  if (task.runs.empty()) {
    task.shape.dtype == Dtype::kBf16 ? load<__nv_bfloat16>() : load<__half>();
    return;
  }
  check_task(task);
  RowParams p = row_params(task.format, task.shape, task.from, task.plain, {}, task.invalid);
  for_launches(p, task.runs, kWarps, [&](dim3 grid) {
    if (p.bf16) {
      launch_decompress<__nv_bfloat16>(p, grid, stream);
    } else {
      launch_decompress<__half>(p, grid, stream);
    }
  });
}

}  // namespace ringattn::cuda
