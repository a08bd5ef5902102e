// SPDX-License-Identifier: Apache-2.0
// Quantization of a row of one head, or of a group of its tokens, by a warp.
#pragma once

#include "kernels/quant/cuda/row_quads.cuh"
#include "kernels/quant/cuda/rows.hpp"

namespace ringattn::cuda {

// Maximum of both, or NaN if one of them is NaN.
__device__ __forceinline__ float greater_or_nan(float a, float b) {
  float greater;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(a), "f"(b));
  return greater;
}

// Reduction over 2ⁿ neighbouring lanes with join(a, b).
template <int kLanes, class Join>
__device__ __forceinline__ float reduce_lanes(float value, const Join& join) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) value = join(value, __shfl_xor_sync(0xffffffffU, value, lanes));
  return value;
}
template <int kLanes>
__device__ __forceinline__ float max_or_nan_of(float value) {
  return reduce_lanes<kLanes>(value, [](float a, float b) { return greater_or_nan(a, b); });
}
// Maximum and minimum, which ignore NaN.
template <int kLanes>
__device__ __forceinline__ float max_of(float value) {
  return reduce_lanes<kLanes>(value, [](float a, float b) { return fmaxf(a, b); });
}
template <int kLanes>
__device__ __forceinline__ float min_of(float value) {
  return -max_of<kLanes>(-value);
}

// Quantization to int4 divides half of the element by half of the scale.
__device__ __forceinline__ Divisor int4_divisor(float scale) { return divisor_of(0.5F * scale); }
// Four int4 values, the first one in the lowest bits. by[i] is int4_divisor(scale[i]).
__device__ __forceinline__ std::uint32_t quantize_int4(const Quad& quad, const float (&scale)[4],
                                                       const float (&zero)[4], const Divisor (&by)[4]) {
  std::uint32_t quantized = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t code = 0;
    if (by[i].quick) {
      const float above = fmaxf(0.5F * quad.x[i] - 0.5F * zero[i], 0.0F);
      code = __float_as_uint(fminf(by[i].quotient(above), kMaxInt4) + 0x1.8p23F) & 0xfU;
    } else {
      code = quantize_to_int4(quad.x[i], scale[i], zero[i]);
    }
    quantized |= code << 4 * i;
  }
  return quantized;
}

// A lane's quads of a row.
template <int kQuads>
struct RowQuads {
  uint2 raw[kQuads];

  __device__ __forceinline__ static int channel(int n) {
    return static_cast<int>(threadIdx.x % 32) * kQuadChannels + n * kLaneStep;
  }
  __device__ __forceinline__ void load(const RowParams& p, const std::byte* row) {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) raw[n] = channel(n) < p.dim ? load_elements(p, row, channel(n)) : uint2{0, 0};
  }
  template <class Element>
  __device__ __forceinline__ void check(const RowParams& p, std::int64_t token, int head) const {
#pragma unroll
    for (int n = 0; n < kQuads; ++n) check_elements<Element>(p, raw[n], 0, token, head, channel(n));
  }
};

// Writes a row in an encoding that quantizes each token's row separately.
template <class Element, int kQuads>
class RowWriter {
 public:
  __device__ __forceinline__ RowWriter(const RowParams& p, const RowQuads<kQuads>& row)
      : p_(p), row_(row), lane_(static_cast<int>(threadIdx.x % 32)) {}

  // `streams`: address of the row in each stream.
  template <RowEncoding kEncoding>
  __device__ __forceinline__ void write(std::byte* const (&streams)[kMaxStreams], int head, const std::byte* plain,
                                        const std::byte* products) const {
    if constexpr (kEncoding == RowEncoding::kPlain) {
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        if (has(n)) store_elements(p_, streams[0], channel(n), row_.raw[n]);
      }
    } else if constexpr (kEncoding == RowEncoding::kFp8) {
      write_fp8(streams, head);
    } else if constexpr (kEncoding == RowEncoding::kInt8) {
      write_int8(streams);
    } else if constexpr (kEncoding == RowEncoding::kInt4Token) {
#pragma unroll
      for (int n = 0; n < kQuads; ++n) write_pairs(n, widen<Element>(row_.raw[n]), streams[0], streams[1]);
    } else if constexpr (kEncoding == RowEncoding::kHybrid) {
      write_hybrid(streams, head, plain, products);
    } else if constexpr (kEncoding == RowEncoding::kLatent) {
      write_latent(streams);
    } else {
      static_assert(kEncoding == RowEncoding::kVector);
      write_vectors(streams[0], head, plain);
    }
  }

 private:
  __device__ __forceinline__ int channel(int n) const { return row_.channel(n); }
  __device__ __forceinline__ bool has(int n) const { return channel(n) < p_.dim; }

  __device__ __forceinline__ float max_magnitude() const {
    float max_value = 0.0F;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const Quad quad = widen<Element>(row_.raw[n]);
#pragma unroll
      for (int i = 0; i < 4; ++i) max_value = greater_or_nan(max_value, fabsf(quad.x[i]));
    }
    return max_or_nan_of<32>(max_value);
  }

  __device__ __forceinline__ void write_fp8(std::byte* const (&streams)[kMaxStreams], int head) const {
    float scale = 0.0F;
    if (p_.format.scales == ScaleGrain::kTokenHead) {
      scale = row_scale_of(max_magnitude(), kMaxE4m3, max_finite<Element>());
      if (lane_ == 0) store_word(p_, streams[1], __float_as_uint(scale));
    } else {
      scale = reinterpret_cast<const float*>(p_.tables[0])[p_.format.scales == ScaleGrain::kHead ? head : 0];
    }
    const Divisor by = divisor_of(scale);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const Quad quad = divided(widen<Element>(row_.raw[n]), by);
      if (has(n)) store_quantized(p_, streams[0], channel(n), quantize_e4m3(quad));
    }
  }

  static __device__ __forceinline__ Quad divided(Quad quad, const Divisor& by) {
    if (by.quick) {
#pragma unroll
      for (int i = 0; i < 4; ++i) quad.x[i] = copysignf(by.quotient(fabsf(quad.x[i])), quad.x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) quad.x[i] = quad.x[i] / by.scale;
    }
    return quad;
  }

  // The channels of one step of the warp's lanes share a scale.
  __device__ __forceinline__ void write_latent(std::byte* const (&streams)[kMaxStreams]) const {
    static_assert(kLaneStep == kLatentScaleBlock);
    const int quantized_dims = p_.dim - p_.format.rope;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const Quad quad = widen<Element>(row_.raw[n]);
      float max_value = 0.0F;
#pragma unroll
      for (int i = 0; i < 4; ++i) max_value = fmaxf(max_value, fabsf(quad.x[i]));
      const float scale = scale_of(max_of<32>(max_value), kMaxE4m3);
      if (channel(n) < quantized_dims) {
        if (lane_ == 0) store_word(p_, streams[1] + 4 * n, __float_as_uint(scale));
        store_quantized(p_, streams[0], channel(n), quantize_e4m3(divided(quad, divisor_of(scale))));
      } else if (has(n)) {
        store_elements(p_, streams[2], channel(n) - quantized_dims, row_.raw[n]);
      }
    }
  }

  __device__ __forceinline__ void write_int8(std::byte* const (&streams)[kMaxStreams]) const {
    const float scale = row_scale_of(max_magnitude(), kMaxInt8, max_finite<Element>());
    if (lane_ == 0) store_word(p_, streams[1], __float_as_uint(scale));
    const Divisor by = divisor_of(scale);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const Quad quad = widen<Element>(row_.raw[n]);
      std::uint32_t quantized = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t code = 0;
        if (by.quick) {  // the sum's lowest byte is the nearest integer
          const float ratio = fminf(by.quotient(fabsf(quad.x[i])), kMaxInt8);
          code = __float_as_uint(copysignf(ratio, quad.x[i]) + 0x1.8p23F) & 0xffU;
        } else {
          code = static_cast<std::uint8_t>(quantize_to_int8(quad.x[i], scale));
        }
        quantized |= code << 8 * i;
      }
      if (has(n)) store_quantized(p_, streams[0], channel(n), quantized);
    }
  }

  // 32 channels, i.e. eight lanes, share a scale and a zero point. Called by all lanes of the warp.
  __device__ __forceinline__ void write_pairs(int n, const Quad& quad, std::byte* quantized, std::byte* pairs) const {
    const float min_value = min_of<8>(fminf(fminf(quad.x[0], quad.x[1]), fminf(quad.x[2], quad.x[3])));
    const float max_value = max_of<8>(fmaxf(fmaxf(quad.x[0], quad.x[1]), fmaxf(quad.x[2], quad.x[3])));
    const float zero = int4_zero_point(rounded<Element>(min_value));
    const float scale = truncated<Element>(int4_scale(zero, max_value));
    if (!has(n)) return;
    const Divisor by = int4_divisor(scale);
    store_nibbles(p_, quantized, channel(n),
                  quantize_int4(quad, {scale, scale, scale, scale}, {zero, zero, zero, zero}, {by, by, by, by}));
    if (lane_ % 8 == 0) store_pair(p_, pairs, channel(n) / kPairChannels, MmaTraits<Element>::pack(scale, zero));
  }

  __device__ __forceinline__ void write_hybrid(std::byte* const (&streams)[kMaxStreams], int head,
                                               const std::byte* plain, const std::byte* products) const {
    const int outliers = p_.format.outliers;
    const auto* const channels = reinterpret_cast<const std::int32_t*>(p_.tables[1]) + head * outliers;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      Quad rest = widen<Element>(row_.raw[n]);
      const Quad product = widen<Element>(has(n) ? load_elements(p_, products, channel(n)) : uint2{0, 0});
#pragma unroll
      for (int i = 0; i < 4; ++i) rest.x[i] = rest.x[i] - product.x[i];
      for (int o = 0; o < outliers; ++o) {
        const int at = channels[o] - channel(n);
#pragma unroll
        for (int i = 0; i < 4; ++i) rest.x[i] = at == i ? 0.0F : rest.x[i];
      }
      write_pairs(n, rest, streams[1], streams[2]);
    }
    for (int o = lane_; o < outliers; o += 32) {
      const std::int32_t at = channels[o];
      if (at < 0 || at >= p_.dim) continue;
      store_any_half(streams[3] + 2 * o, reinterpret_cast<const std::uint16_t*>(plain)[at]);
    }
  }

  // Each lane finds the nearest vectors of some runs of channels.
  __device__ __forceinline__ void write_vectors(std::byte* quantized, int head, const std::byte* plain) const {
    const int width = p_.format.width;
    const auto* const row = reinterpret_cast<const std::uint16_t*>(plain);
    const auto* const books = reinterpret_cast<const std::uint16_t*>(p_.tables[0]) +
                              static_cast<std::int64_t>(head) * kCodebookVectors * p_.dim;
    for (int run = lane_; run < p_.dim / width; run += 32) {
      float element[8], vector[8];
      for (int i = 0; i < width; ++i) element[i] = widen<Element>(row[run * width + i]);
      const std::uint16_t* const book = books + run * kCodebookVectors * width;
      int nearest = 0;
      float min_value = 0.0F;
#pragma unroll 1
      for (int v = 0; v < kCodebookVectors; ++v) {
        for (int i = 0; i < width; ++i) vector[i] = widen<Element>(book[v * width + i]);
        const float distance = squared_distance(element, vector, width);
        if (v > 0 && !(distance < min_value)) continue;
        nearest = v;
        min_value = distance;
      }
      quantized[run] = static_cast<std::byte>(nearest);
    }
  }

  const RowParams& p_;
  const RowQuads<kQuads>& row_;
  const int lane_;
};

// Minimum and maximum of each of four neighbouring channels over a group of tokens of kInt4Channel.
struct GroupExtremes {
  float min_value[4], max_value[4];

  __device__ __forceinline__ void join(const GroupExtremes& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      min_value[i] = fminf(min_value[i], other.min_value[i]);
      max_value[i] = fmaxf(max_value[i], other.max_value[i]);
    }
  }
};

template <class Element>
struct GroupQparams {
  float scale[4], zero[4];
  Divisor by[4];

  __device__ __forceinline__ explicit GroupQparams(const GroupExtremes& of) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      zero[i] = int4_zero_point(of.min_value[i]);
      scale[i] = truncated<Element>(int4_scale(zero[i], of.max_value[i]));
      by[i] = int4_divisor(scale[i]);
    }
  }
};

// Calls with(raw, t) for tokens begin … end − 1 of a group, with their elements from `channel` on. Elements are loaded
// kRows tokens at a time, and end − begin is a multiple of kRows. plain_at(t) returns the address of a token's row.
template <int kRows, class PlainAt, class With>
__device__ __forceinline__ void for_tokens(const RowParams& p, int channel, int begin, int end, const PlainAt& plain_at,
                                           const With& with) {
  for (int first = begin; first < end; first += kRows) {
    uint2 raw[kRows];
#pragma unroll
    for (int t = 0; t < kRows; ++t) raw[t] = load_elements(p, plain_at(first + t), channel);
#pragma unroll
    for (int t = 0; t < kRows; ++t) with(raw[t], first + t);
  }
}

template <class Element, int kRows, class PlainAt, class Check>
__device__ __forceinline__ GroupExtremes extremes_of(const RowParams& p, int channel, int begin, int end,
                                                     const PlainAt& plain_at, const Check& check) {
  GroupExtremes all;
  for_tokens<kRows>(p, channel, begin, end, plain_at, [&](uint2 raw, int t) {
    check(raw, t, channel);
    const Quad quad = widen<Element>(raw);
    GroupExtremes token_extremes;
#pragma unroll
    for (int i = 0; i < 4; ++i) token_extremes.min_value[i] = token_extremes.max_value[i] = quad.x[i];
    if (t == begin) {
      all = token_extremes;
    } else {
      all.join(token_extremes);
    }
  });
  return all;
}

// Writes the scale and zero point of channel `channel` + i. row_at(stream, t) returns the address of the quantized
// values or the qparams of a group's t-th token, or null, in which case nothing is written.
template <class Element, class RowAt>
__device__ __forceinline__ void write_pair(const RowParams& p, int channel, int i, const GroupQparams<Element>& code,
                                           const RowAt& row_at) {
  const ScaleOffset offset = scale_offset_of(channel + i, p.dim, p.format.group);
  std::byte* const row = row_at(1, static_cast<int>(offset.token));
  if (row == nullptr) return;
  store_pair(p, row, static_cast<int>(offset.pair), MmaTraits<Element>::pack(code.scale[i], code.zero[i]));
}

// Writes the quantized values of tokens begin … end − 1.
template <class Element, int kRows, class PlainAt, class RowAt>
__device__ __forceinline__ void write_quantized(const RowParams& p, int channel, int begin, int end,
                                                const GroupQparams<Element>& code, const PlainAt& plain_at,
                                                const RowAt& row_at) {
  for_tokens<kRows>(p, channel, begin, end, plain_at, [&](uint2 raw, int t) {
    std::byte* const row = row_at(0, t);
    if (row == nullptr) return;
    store_nibbles(p, row, channel, quantize_int4(widen<Element>(raw), code.scale, code.zero, code.by));
  });
}

// A warp quantizes a group of kInt4Channel of one head. check(raw, t, channel) is called for all of its elements.
template <class Element, class PlainAt, class RowAt, class Check>
__device__ __forceinline__ void write_group(const RowParams& p, const PlainAt& plain_at, const RowAt& row_at,
                                            const Check& check) {
  constexpr int kRows = 16;
  const int group = p.format.group;
  for (int channel = static_cast<int>(threadIdx.x % 32) * kQuadChannels; channel < p.dim; channel += kLaneStep) {
    const GroupQparams<Element> code(extremes_of<Element, kRows>(p, channel, 0, group, plain_at, check));
#pragma unroll
    for (int i = 0; i < 4; ++i) write_pair(p, channel, i, code, row_at);
    // Loads the elements again, from the cache.
    write_quantized<Element, kRows>(p, channel, 0, group, code, plain_at, row_at);
  }
}

// The same with all of a thread block's four warps, each of which takes a quarter of the tokens. `shared` is their
// exchange buffer, [4 warps][kMaxQuads]. The caller synchronizes the block before and after.
inline constexpr int kGroupWarps = 4;
inline constexpr int kMaxQuads = kMaxRowDim / kQuadChannels;
template <class Element, class PlainAt, class RowAt>
__device__ __forceinline__ void write_group_by_block(const RowParams& p, GroupExtremes (*shared)[kMaxQuads],
                                                     const PlainAt& plain_at, const RowAt& row_at) {
  constexpr int kRows = 8;
  const auto warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int tokens = p.format.group / kGroupWarps, begin = warp * tokens;
  const int quads = (p.dim + kQuadChannels - 1) / kQuadChannels;
  for (int quad = lane; quad < quads; quad += 32) {
    shared[warp][quad] =
        extremes_of<Element, kRows>(p, quad * kQuadChannels, begin, begin + tokens, plain_at, [](uint2, int, int) {});
  }
  __syncthreads();
  for (int quad = lane; quad < quads; quad += 32) {
    const int channel = quad * kQuadChannels;
    GroupExtremes all = shared[0][quad];
#pragma unroll
    for (int other = 1; other < kGroupWarps; ++other) all.join(shared[other][quad]);
    const GroupQparams<Element> code(all);
#pragma unroll
    for (int i = 0; i < kQuadChannels; ++i) {
      if (i % kGroupWarps == warp) write_pair(p, channel, i, code, row_at);
    }
    write_quantized<Element, kRows>(p, channel, begin, begin + tokens, code, plain_at, row_at);
  }
}

// Writes a token of kInt4Channel whose group isn't full: its elements go to the tail, and its quantized values and
// scales are zeros.
template <class Check>
__device__ __forceinline__ void write_tail(const RowParams& p, const std::byte* plain, std::byte* tail,
                                           std::byte* quantized, std::byte* pairs, const Check& check) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (int channel = lane * kQuadChannels; channel < p.dim; channel += kLaneStep) {
    const uint2 raw = load_elements(p, plain, channel);
    check(raw, channel);
    store_elements(p, tail, channel, raw);
    store_nibbles(p, quantized, channel, 0);
  }
  for (int pair = lane; pair < p.dim / p.format.group; pair += 32) store_pair(p, pairs, pair, 0);
}

}  // namespace ringattn::cuda
