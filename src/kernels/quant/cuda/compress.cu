// SPDX-License-Identifier: Apache-2.0
// Quantization of rows on any GPU.
#include "kernels/quant/cuda/row_launch.hpp"
#include "kernels/quant/cuda/row_writer.cuh"

namespace ringattn::cuda {

// Quantization of whole tensors whose alignment allows wide accesses. For encodings per token a lane has 16 channels of
// a row, so that few lanes share a row and work per row or channel group is amortized. For kInt4Channel a lane has some
// channels of all tokens of a group and loads them once. The arithmetic is that of row_writer.cuh without the cases
// that can't occur here.

inline constexpr int kLaneChannels = 16;

struct LaneChannels {
  uint4 raw[2];

  __device__ __forceinline__ void load(const std::byte* row, int channel) {
    const auto* const from = reinterpret_cast<const uint4*>(row + 2 * channel);
    raw[0] = __ldcs(from);
    raw[1] = __ldcs(from + 1);
  }
  __device__ __forceinline__ uint2 quad(int n) const {
    const uint4& of = raw[n / 2];
    return n % 2 == 0 ? uint2{of.x, of.y} : uint2{of.z, of.w};
  }
};

// Maximum magnitude of all elements; NaN if one is NaN.
template <class Element>
__device__ __forceinline__ float max_magnitude(const LaneChannels& row) {
  float max_value = 0.0F;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Quad quad = widen<Element>(row.quad(n));
#pragma unroll
    for (int i = 0; i < 4; ++i) max_value = greater_or_nan(max_value, fabsf(quad.x[i]));
  }
  return max_value;
}

// Divisor::quotient() of a number of either sign whose quotient is at most kMax. Each step rounds a number and its
// negative alike, except that the quotient of -0 is 0.
__device__ __forceinline__ float signed_quotient(const Divisor& by, float x) {
  const float near = fmaf(x, by.reciprocal, x * by.rest);
  return fmaf(fmaf(-near, by.scale, x), by.reciprocal, near);
}

// The lowest bytes of four words, the first one lowest.
__device__ __forceinline__ std::uint32_t lowest_bytes(const std::uint32_t (&x)[4]) {
  return __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
}

// Quantizes 16 elements to e4m3. `own`: the scale was computed from this row, so that no quotient exceeds kMax.
template <class Element>
__device__ __forceinline__ uint4 quantize_fp8(const LaneChannels& row, const Divisor& by, bool own) {
  std::uint32_t quantized[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    Quad quad = widen<Element>(row.quad(n));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = quad.x[i];
      quad.x[i] = by.quick ? copysignf(own ? signed_quotient(by, x) : by.quotient(fabsf(x)), x) : x / by.scale;
    }
    quantized[n] = quantize_e4m3(quad);
  }
  return {quantized[0], quantized[1], quantized[2], quantized[3]};
}

template <class Element>
__device__ __forceinline__ uint4 quantize_int8(const LaneChannels& row, const Divisor& by) {
  std::uint32_t quantized[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Quad quad = widen<Element>(row.quad(n));
    std::uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = by.quick ? __float_as_uint(signed_quotient(by, quad.x[i]) + 0x1.8p23F)  // nearest in the low byte
                      : static_cast<std::uint32_t>(quantize_to_int8(quad.x[i], by.scale));
    }
    quantized[n] = lowest_bytes(x);
  }
  return {quantized[0], quantized[1], quantized[2], quantized[3]};
}

// Quantizes an element of a group with minimum `zero` to the lowest four bits. The next four bits are zeros. `by`:
// int4_divisor() of the group's scale, with `quick` set. Halving is exact, so only the difference of the halves is
// rounded.
__device__ __forceinline__ std::uint32_t quantize_int4_fast(float x, float zero, const Divisor& by) {
  const float ratio = signed_quotient(by, fmaf(0.5F, x, -0.5F * zero));
  return __float_as_uint(fminf(ratio, kMaxInt4) + 0x1.8p23F);
}
// Packs the lowest four bits of two words into the lowest byte.
__device__ __forceinline__ std::uint32_t pack_int4_pair(std::uint32_t even, std::uint32_t odd) {
  return even + (odd << 4);
}

// Quantizes 16 elements to int4 with one scale and zero point.
template <class Element>
__device__ __forceinline__ uint2 quantize_int4(const LaneChannels& row, float scale, float zero) {
  const Divisor by = int4_divisor(scale);
  std::uint32_t quantized[4];  // of four channels each
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Quad quad = widen<Element>(row.quad(n));
    std::uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] =
          by.quick ? quantize_int4_fast(quad.x[i], zero, by) : std::uint32_t{quantize_to_int4(quad.x[i], scale, zero)};
    }
    quantized[n] = __byte_perm(pack_int4_pair(x[0], x[1]), pack_int4_pair(x[2], x[3]), 0x0040);
  }
  return {__byte_perm(quantized[0], quantized[1], 0x5410), __byte_perm(quantized[2], quantized[3], 0x5410)};
}

// Quantizes a row of one head. This lane has the 16 channels from `channel` on, and kLanes lanes have the row. Writes
// nothing if not `present`. Called by all lanes of the warp.
template <class Element, RowEncoding kEncoding, int kLanes>
__device__ __forceinline__ void write_16_channels(const RowParams& p, const LaneChannels& row, int channel, int head,
                                                  std::byte* quantized, std::byte* qparams, bool present) {
  if constexpr (kEncoding == RowEncoding::kInt4Token) {
    float min_value = 0.0F, max_value = 0.0F;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Quad quad = widen<Element>(row.quad(n));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool first = n == 0 && i == 0;
        min_value = first ? quad.x[i] : fminf(min_value, quad.x[i]);
        max_value = first ? quad.x[i] : fmaxf(max_value, quad.x[i]);
      }
    }
    constexpr int kScaleLanes = kPairChannels / kLaneChannels;  // lanes that share a scale
    const float zero = int4_zero_point(rounded<Element>(min_of<kScaleLanes>(min_value)));
    const float scale = truncated<Element>(int4_scale(zero, max_of<kScaleLanes>(max_value)));
    if (!present) return;
    *reinterpret_cast<uint2*>(quantized + channel / 2) = quantize_int4<Element>(row, scale, zero);
    if (channel % kPairChannels == 0) {
      *reinterpret_cast<std::uint32_t*>(qparams + channel / kPairChannels * 4) = MmaTraits<Element>::pack(scale, zero);
    }
  } else {
    constexpr bool kFp8 = kEncoding == RowEncoding::kFp8;
    const bool own = !kFp8 || p.format.scales == ScaleGrain::kTokenHead;
    float scale = 0.0F;
    if (own) {
      scale = row_scale_of(max_or_nan_of<kLanes>(max_magnitude<Element>(row)), kFp8 ? kMaxE4m3 : kMaxInt8,
                           max_finite<Element>());
    } else {
      scale = reinterpret_cast<const float*>(p.tables[0])[p.format.scales == ScaleGrain::kHead ? head : 0];
    }
    if (!present) return;
    const Divisor by = divisor_of(scale);
    const uint4 all = kFp8 ? quantize_fp8<Element>(row, by, own) : quantize_int8<Element>(row, by);
    *reinterpret_cast<uint4*>(quantized + channel) = all;
    if (own && channel == 0) *reinterpret_cast<float*>(qparams) = scale;
  }
}

// A group of kInt4Channel. This lane has channels [channel, channel + kChannels) of each token. `plain` begins at the
// group's first token. check(raw, t) is called with each token's kChannels / 2 words of two elements.
template <class Element, int kGroup, int kChannels>
class GroupOfChannels {
 public:
  __device__ __forceinline__ GroupOfChannels(const RowParams& p, const DeviceRows& plain, int head, int channel)
      : p_(p), plain_(plain), head_(static_cast<std::uint32_t>(head)), channel_(channel) {
#pragma unroll
    for (int t = 0; t < kGroup; ++t) words_[t] = load(t);
  }

  template <class Check>
  __device__ __forceinline__ void check(const Check& check) const {
#pragma unroll 1
    for (int t = 0; t < kGroup; ++t) check(load(t), t);
  }

  __device__ __forceinline__ void write(const DeviceRows& quantized, const DeviceRows& qparams) {
    float zero[kChannels], scale[kChannels];
    Divisor by[kChannels];
    bool quick = true;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      float min_value = element(words_[0], i), max_value = min_value;
#pragma unroll
      for (int t = 1; t < kGroup; ++t) {
        min_value = fminf(min_value, element(words_[t], i));
        max_value = fmaxf(max_value, element(words_[t], i));
      }
      zero[i] = int4_zero_point(min_value);
      scale[i] = truncated<Element>(int4_scale(zero[i], max_value));
      by[i] = int4_divisor(scale[i]);
      quick = quick && by[i].quick;
      const ScaleOffset offset = scale_offset_of(channel_ + i, p_.dim, kGroup);
      auto* const to = reinterpret_cast<std::uint32_t*>(qparams.near(static_cast<std::uint32_t>(offset.token), head_));
      to[offset.pair] = MmaTraits<Element>::pack(scale[i], zero[i]);
    }
    // The asm prevents reuse of the fp32 conversions: they would take twice as many registers, so they are repeated
    // below.
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
#pragma unroll
      for (int i = 0; i < kChannels / 2; ++i) asm volatile("" : "+r"(words_[t].of[i]));
    }
    if (!quick) [[unlikely]] {  // loads the elements again, from the cache
#pragma unroll 1
      for (int t = 0; t < kGroup; ++t) {
        const Words words = load(t);
        std::uint32_t x[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; ++i) x[i] = quantize_to_int4(element(words, i), scale[i], zero[i]);
        store(quantized, t, x);
      }
      return;
    }
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      std::uint32_t x[kChannels];
#pragma unroll
      for (int i = 0; i < kChannels; ++i) x[i] = quantize_int4_fast(element(words_[t], i), zero[i], by[i]);
      store(quantized, t, x);
    }
  }

 private:
  static_assert(kChannels == 2 || kChannels == 4);
  struct Words {
    std::uint32_t of[kChannels / 2];
  };

  __device__ __forceinline__ Words load(int t) const {
    const std::byte* const from = plain_.near(static_cast<std::uint32_t>(t), head_) + 2 * channel_;
    Words words;
    if constexpr (kChannels == 4) {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      words.of[0] = both.x;
      words.of[1] = both.y;
    } else {
      words.of[0] = *reinterpret_cast<const std::uint32_t*>(from);
    }
    return words;
  }
  __device__ __forceinline__ static float element(const Words& words, int i) {
    return widen<Element>(i % 2 == 0 ? words.of[i / 2] : words.of[i / 2] >> 16);
  }
  __device__ __forceinline__ void store(const DeviceRows& quantized, int t, const std::uint32_t (&x)[kChannels]) const {
    std::byte* const to = quantized.near(static_cast<std::uint32_t>(t), head_) + channel_ / 2;
    const std::uint32_t low = pack_int4_pair(x[0], x[1]);
    if constexpr (kChannels == 4) {
      *reinterpret_cast<std::uint16_t*>(to) =
          static_cast<std::uint16_t>(__byte_perm(low, pack_int4_pair(x[2], x[3]), 0x0040));
    } else {
      *to = static_cast<std::byte>(low);
    }
  }

  const RowParams& p_;
  const DeviceRows& plain_;
  const std::uint32_t head_;
  const int channel_;
  Words words_[kGroup];
};

namespace {

constexpr int kCompressThreads = 256;
constexpr int kWarps = kCompressThreads / 32;
constexpr int kGroupThreads = 128;  // fewer threads, because a lane needs many registers

// Quantizes rows for encodings that quantize each token's row separately.
template <class Element, int kQuads, RowEncoding kEncoding>
__global__ void __launch_bounds__(kCompressThreads, 3) compress_rows(const __grid_constant__ RowParams p) {
  constexpr int kRowsAhead = kQuads == 1 ? 4 : 1;  // rows per warp, loaded before the first is processed
  const CompressedRun& run = p.run[blockIdx.y];
  const auto heads = static_cast<std::uint32_t>(p.heads);
  const auto run_rows = static_cast<std::uint32_t>(run.rows) * heads;
  const std::uint32_t step = gridDim.x * kWarps * kRowsAhead;
  const DeviceRows plain = p.plain.from(run.to), products = p.products.from(run.to);
  DeviceRows streams[kMaxStreams];
#pragma unroll
  for (int s = 0; s < kMaxStreams; ++s) streams[s] = p.streams[s].from(run.row);
  for (std::uint32_t first = (blockIdx.x * kWarps + threadIdx.x / 32) * kRowsAhead; first < run_rows; first += step) {
    const RowsOfRun<kRowsAhead> of_run(first, run_rows, heads);
    RowQuads<kQuads> rows[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) rows[i].load(p, plain.near(of_run.token[i], of_run.head[i]));
#pragma unroll
    for (std::uint32_t i = 0; i < kRowsAhead; ++i) {
      if (first + i >= run_rows) break;
      const std::uint32_t token = of_run.token[i], head = of_run.head[i];
      if (p.invalid != nullptr) rows[i].template check<Element>(p, run.to + token, static_cast<int>(head));
      std::byte* to[kMaxStreams];
#pragma unroll
      for (int s = 0; s < kMaxStreams; ++s) to[s] = streams[s].near(token, head);
      RowWriter<Element, kQuads>(p, rows[i])
          .template write<kEncoding>(to, static_cast<int>(head), plain.near(token, head), products.near(token, head));
    }
  }
}

// The same with 16 channels per lane and 2ⁿ lanes per row. No lane returns early, because all lanes of a warp take part
// in the reductions.
template <class Element, RowEncoding kEncoding, int kLanes>
__global__ void __launch_bounds__(kCompressThreads) compress_16_channels(const __grid_constant__ RowParams p) {
  constexpr std::uint32_t kRows = kCompressThreads / kLanes;
  constexpr std::uint32_t kAhead = 2;  // rows per lane, loaded before the first is processed
  const CompressedRun& run = p.run[blockIdx.y];
  const auto heads = static_cast<std::uint32_t>(p.heads);
  const auto run_rows = static_cast<std::uint32_t>(run.rows) * heads;
  const DeviceRows plain = p.plain.from(run.to);
  const DeviceRows quantized = p.streams[0].from(run.row), qparams = p.streams[1].from(run.row);
  const int channel = static_cast<int>(threadIdx.x % kLanes) * kLaneChannels;
  for (std::uint32_t begin = blockIdx.x * kRows * kAhead; begin < run_rows; begin += gridDim.x * kRows * kAhead) {
    std::uint32_t token[kAhead], head[kAhead];
    LaneChannels rows[kAhead];
#pragma unroll
    for (std::uint32_t i = 0; i < kAhead; ++i) {
      const std::uint32_t work_index = begin + i * kRows + threadIdx.x / kLanes;
      const std::uint32_t present = work_index < run_rows ? work_index : run_rows - 1;
      token[i] = present / heads;
      head[i] = present - token[i] * heads;
      rows[i].load(plain.near(token[i], head[i]), channel);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kAhead; ++i) {
      if (p.invalid != nullptr) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          check_elements<Element>(p, rows[i].quad(n), 0, run.to + token[i], static_cast<int>(head[i]), channel + 4 * n);
        }
      }
      write_16_channels<Element, kEncoding, kLanes>(p, rows[i], channel, static_cast<int>(head[i]),
                                                    quantized.near(token[i], head[i]), qparams.near(token[i], head[i]),
                                                    begin + i * kRows + threadIdx.x / kLanes < run_rows);
    }
  }
}

template <class Element, RowEncoding kEncoding>
void launch_16_channels(const RowParams& p, dim3 grid, cudaStream_t queue) {
  if (p.dim == 64) compress_16_channels<Element, kEncoding, 4><<<grid, kCompressThreads, 0, queue>>>(p);
  if (p.dim == 128) compress_16_channels<Element, kEncoding, 8><<<grid, kCompressThreads, 0, queue>>>(p);
  if (p.dim == 256) compress_16_channels<Element, kEncoding, 16><<<grid, kCompressThreads, 0, queue>>>(p);
}

// A warp's part of a group of tokens of one head: 32 · kChannels channels. A lane keeps its elements of all tokens.
template <class Element, int kGroup, int kChannels>
__device__ __forceinline__ void compress_part(const RowParams& p, const CompressedRun& run, std::int64_t first,
                                              int head, int part) {
  const int channel = (part * 32 + static_cast<int>(threadIdx.x % 32)) * kChannels;
  if (channel >= p.dim) return;
  const DeviceRows plain = p.plain.from(run.to + first);
  GroupOfChannels<Element, kGroup, kChannels> group(p, plain, head, channel);
  if (p.invalid != nullptr) {
    group.check([&](const auto& words, int t) {
#pragma unroll
      for (int i = 0; i < kChannels / 2; ++i) {
        check_elements<Element>(p, uint2{words.of[i], 0}, 0, run.to + first + t, head, channel + 2 * i);
      }
    });
  }
  group.write(p.streams[0].from(run.row + first), p.streams[1].from(run.row + first));
}

// Quantizes groups of tokens. Those after the last full group go to the tail. kVectorized: all of a lane's accesses are
// aligned.
template <class Element, int kGroup, bool kVectorized>
__global__ void __launch_bounds__(kGroupThreads, 4) compress_groups(const __grid_constant__ RowParams p) {
  constexpr std::uint32_t kGroupWarps = kGroupThreads / 32;
  constexpr int kChannels = kVectorized ? 128 / kGroup : 1;
  const CompressedRun& run = p.run[blockIdx.y];
  const auto heads = static_cast<std::uint32_t>(p.heads);
  const auto groups = static_cast<std::uint32_t>((run.rows + kGroup - 1) / kGroup);
  const std::uint32_t parts = kVectorized ? static_cast<std::uint32_t>((p.dim - 1) / (32 * kChannels)) + 1 : 1;
  const std::int64_t full_tokens = full_group_tokens(run.keys, kGroup);
  for (std::uint32_t work_index = blockIdx.x * kGroupWarps + threadIdx.x / 32; work_index < groups * heads * parts;
       work_index += gridDim.x * kGroupWarps) {
    const std::uint32_t of_head = work_index / parts;
    const auto head = static_cast<int>(of_head % heads);
    const std::int64_t first = static_cast<std::int64_t>(of_head / heads) * kGroup;  // row of the run
    const auto check = [&](uint2 raw, int t, int channel) {
      if (p.invalid != nullptr) check_elements<Element>(p, raw, 0, run.to + first + t, head, channel);
    };
    if (run.position + first < full_tokens) {
      if constexpr (kVectorized) {
        compress_part<Element, kGroup, kChannels>(p, run, first, head, static_cast<int>(work_index % parts));
      } else {
        write_group<Element>(
            p, [&](int t) { return p.plain.at(run.to + first + t, head); },
            [&](int stream, int t) { return p.streams[stream].at(run.row + first + t, head); }, check);
      }
      continue;
    }
    if (work_index % parts != 0) continue;
    for (int t = 0; t < kGroup && first + t < run.rows; ++t) {
      std::byte* const tail =
          p.tables[0] + ((run.sequence * kGroup + t) * p.heads + head) * static_cast<std::int64_t>(2 * p.dim);
      write_tail(p, p.plain.at(run.to + first + t, head), tail, p.streams[0].at(run.row + first + t, head),
                 p.streams[1].at(run.row + first + t, head), [&](uint2 raw, int channel) { check(raw, t, channel); });
    }
  }
}

template <class Element, int kGroup>
void launch_groups(const RowParams& p, dim3 grid, cudaStream_t queue) {
  grid.x *= kCompressThreads / kGroupThreads;
  if (p.by_four) {
    compress_groups<Element, kGroup, true><<<grid, kGroupThreads, 0, queue>>>(p);
  } else {
    compress_groups<Element, kGroup, false><<<grid, kGroupThreads, 0, queue>>>(p);
  }
}

template <class Element>
void launch_compress(const RowParams& p, dim3 grid, Stream stream) {
  const cudaStream_t queue = cuda_stream(stream);
  if (p.format.encoding == RowEncoding::kInt4Channel) {
    p.format.group == 32 ? launch_groups<Element, 32>(p, grid, queue) : launch_groups<Element, 64>(p, grid, queue);
  }
  with_token_encoding(p.format.encoding, [&]<RowEncoding kEncoding>() {
    if constexpr (kEncoding == RowEncoding::kVector) {
      compress_vectors(p, stream);
    } else {
      if constexpr (kEncoding == RowEncoding::kFp8 || kEncoding == RowEncoding::kInt8 ||
                    kEncoding == RowEncoding::kInt4Token) {
        if (allows_16_channels(p)) return launch_16_channels<Element, kEncoding>(p, grid, queue);
      }
      if (p.dim <= kLaneStep) {
        compress_rows<Element, 1, kEncoding><<<grid, kCompressThreads, 0, queue>>>(p);
      } else if (p.dim <= 2 * kLaneStep) {
        compress_rows<Element, 2, kEncoding><<<grid, kCompressThreads, 0, queue>>>(p);
      } else {
        static_assert(kMaxRowDim == 5 * kLaneStep);
        compress_rows<Element, 5, kEncoding><<<grid, kCompressThreads, 0, queue>>>(p);
      }
    }
  });
  check_cuda(cudaGetLastError(), "compress");
}

// Bits of non-negative floats are ordered as their values.
template <class Element>
__global__ void __launch_bounds__(kCompressThreads)
    magnitude_kernel(const __grid_constant__ RowParams p, std::int64_t tokens, float* greatest) {
  const auto head = static_cast<int>(blockIdx.y);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWarps;
  float max_magnitude = 0.0F;
  for (std::int64_t token = blockIdx.x * kWarps + threadIdx.x / 32; token < tokens; token += step) {
    for (int channel = static_cast<int>(threadIdx.x % 32) * kQuadChannels; channel < p.dim; channel += kLaneStep) {
      const Quad quad = widen<Element>(load_elements(p, p.plain.at(token, head), channel));
#pragma unroll
      for (int i = 0; i < 4; ++i) max_magnitude = fmaxf(max_magnitude, fabsf(quad.x[i]));
    }
  }
  max_magnitude = max_of<32>(max_magnitude);
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(greatest + head), __float_as_int(max_magnitude));
}

template <class Element>
__global__ void __launch_bounds__(kCompressThreads)
    check_rows(const __grid_constant__ RowParams p, std::int64_t tokens, int part, std::int64_t first) {
  const std::int64_t rows = tokens * p.heads, step = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows; row += step) {
    const std::int64_t token = row / p.heads;
    const auto head = static_cast<int>(row - token * p.heads);
    for (int channel = static_cast<int>(threadIdx.x % 32) * kQuadChannels; channel < p.dim; channel += kLaneStep) {
      const uint2 raw = load_elements(p, p.plain.at(token, head), channel);
      check_elements<Element>(p, raw, part, first + token, head, channel);
    }
  }
}

}  // namespace

void compress(const CompressTask& task, Stream stream) {
  check_task(task);
  check_quantizable(task.shape);
  RowParams p = row_params(task.format, task.shape, task.to, task.plain, task.products, task.invalid);
  for_launches(p, task.runs, kWarps, [&](dim3 grid) {
    if (p.bf16) {
      launch_compress<__nv_bfloat16>(p, grid, stream);
    } else {
      launch_compress<__half>(p, grid, stream);
    }
  });
}

void check_finite(const FiniteTask& task, Stream stream) {
  const TensorView& rows = task.rows;
  if (rows.tokens == 0 || rows.heads == 0) return;
  const RowParams p = row_params({}, {rows.dtype, rows.heads, rows.dim}, {}, rows, {}, task.invalid);
  constexpr std::int64_t kBlocks = 4096;  // enough for any GPU
  const auto blocks =
      static_cast<unsigned>(std::clamp<std::int64_t>((rows.tokens * rows.heads + kWarps - 1) / kWarps, 1, kBlocks));
  if (p.bf16) {
    check_rows<__nv_bfloat16>
        <<<blocks, kCompressThreads, 0, cuda_stream(stream)>>>(p, rows.tokens, task.part, task.first);
  } else {
    check_rows<__half><<<blocks, kCompressThreads, 0, cuda_stream(stream)>>>(p, rows.tokens, task.part, task.first);
  }
  check_cuda(cudaGetLastError(), "check_finite");
}

void compute_absmax(const AbsmaxTask& task, Stream stream) {
  const TensorView& plain = task.plain;
  if (plain.tokens == 0 || plain.heads == 0) return;
  check_quantizable({plain.dtype, plain.heads, plain.dim});
  const RowParams p = row_params({}, {plain.dtype, plain.heads, plain.dim}, {}, plain, {}, nullptr);
  constexpr std::int64_t kBlocks = 4096;  // for all heads: enough for any GPU
  const std::int64_t blocks = std::clamp<std::int64_t>((plain.tokens + kWarps - 1) / kWarps, 1,
                                                       std::max<std::int64_t>(1, kBlocks / plain.heads));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(plain.heads));
  if (p.bf16) {
    magnitude_kernel<__nv_bfloat16><<<grid, kCompressThreads, 0, cuda_stream(stream)>>>(p, plain.tokens, task.greatest);
  } else {
    magnitude_kernel<__half><<<grid, kCompressThreads, 0, cuda_stream(stream)>>>(p, plain.tokens, task.greatest);
  }
  check_cuda(cudaGetLastError(), "compute_absmax");
}

}  // namespace ringattn::cuda
