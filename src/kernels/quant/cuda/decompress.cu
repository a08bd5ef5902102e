// SPDX-License-Identifier: Apache-2.0
// Dequantization on any GPU. A warp takes rows of one head and loads several of them before it processes the first.
#include "kernels/quant/cuda/row_check.cuh"
#include "kernels/quant/cuda/row_launch.hpp"
#include "kernels/quant/cuda/row_quads.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
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
__global__ void __launch_bounds__(kThreads, kEncoding == RowEncoding::kHybrid ? 2 : 3)
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
__global__ void __launch_bounds__(kThreads, 3) decompress_groups(const __grid_constant__ RowParams p) {
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
__global__ void __launch_bounds__(kThreads) check_factors(const __grid_constant__ RowParams p) {
  check_qparams<Element>(p, p.run[blockIdx.y]);
  if (blockIdx.y == 0) check_tables<Element>(p);
}

template <class Element>
void launch(const RowParams& p, dim3 grid, Stream stream) {
  const cudaStream_t queue = cuda_stream(stream);
  switch (p.format.encoding) {
    case RowEncoding::kInt4Channel:
      decompress_groups<Element><<<grid, kThreads, 0, queue>>>(p);
      break;
    case RowEncoding::kLowRank:
      if (p.invalid == nullptr) return;
      check_factors<Element><<<grid, kThreads, 0, queue>>>(p);
      break;
    default:
      with_token_encoding(p.format.encoding, [&]<RowEncoding kEncoding>() {
        decompress_rows<Element, kEncoding><<<grid, kThreads, 0, queue>>>(p);
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
      launch<__nv_bfloat16>(p, grid, stream);
    } else {
      launch<__half>(p, grid, stream);
    }
  });
}

}  // namespace ringattn::cuda
