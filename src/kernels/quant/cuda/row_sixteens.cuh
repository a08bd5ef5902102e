// SPDX-License-Identifier: Apache-2.0
// Quantization of whole tensors whose alignment allows wide accesses. For encodings per token a lane has 16 channels of
// a row, so that few lanes share a row and work per row or channel group is amortized. For kInt4Channel a lane has some
// channels of all tokens of a group and loads them once. The arithmetic is that of row_writer.cuh without the cases
// that can't occur here.
#pragma once

#include "kernels/quant/cuda/row_writer.cuh"

namespace ringattn::cuda {

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

}  // namespace ringattn::cuda
