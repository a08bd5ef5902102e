// SPDX-License-Identifier: Apache-2.0
// Sixteen channels of a row: what a lane has where a whole tensor is compressed, so that few lanes share a row and what
// is worked out once a row or once a group of channels weighs little. The arithmetic is that of row_writer.cuh.
#pragma once

#include "kernels/cuda/rows/row_writer.cuh"

namespace ringattn::cuda {

inline constexpr int kSixteen = 16;

struct Sixteen {
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

// Greatest magnitude of all elements; where it is no number, the greatest of the others.
template <class Element>
__device__ __forceinline__ float greatest_magnitude(const Sixteen& row) {
  float most = 0.0F;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Quad quad = widen<Element>(row.quad(n));
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(quad.x[i]));
  }
  return most;
}

// Divisor::quotient() of a number of either sign, whose quotient is known to be kMost at most: each step rounds a
// number and its negative alike.
__device__ __forceinline__ float signed_quotient(const Divisor& by, float x) {
  const float near = fmaf(x, by.reciprocal, x * by.rest);
  return fmaf(fmaf(-near, by.scale, x), by.reciprocal, near);
}

// The lowest bytes of four numbers, the first one lowest.
__device__ __forceinline__ std::uint32_t lowest_bytes(const std::uint32_t (&x)[4]) {
  return __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
}

// The codes of 16 elements of E4M3. `own`: the scale is that of these rows, and no quotient is beyond kMost.
template <class Element>
__device__ __forceinline__ uint4 fp8_codes(const Sixteen& row, const Divisor& by, bool own) {
  std::uint32_t codes[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    Quad quad = widen<Element>(row.quad(n));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = quad.x[i];
      quad.x[i] = !by.quick ? x / by.scale : own ? signed_quotient(by, x) : copysignf(by.quotient(fabsf(x)), x);
    }
    codes[n] = e4m3_codes(quad);
  }
  return {codes[0], codes[1], codes[2], codes[3]};
}

template <class Element>
__device__ __forceinline__ uint4 int8_codes(const Sixteen& row, const Divisor& by) {
  std::uint32_t codes[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Quad quad = widen<Element>(row.quad(n));
    std::uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = by.quick ? __float_as_uint(signed_quotient(by, quad.x[i]) + 0x1.8p23F)  // its lowest byte is the nearest's
                      : static_cast<std::uint32_t>(int8_code(quad.x[i], by.scale));
    }
    codes[n] = lowest_bytes(x);
  }
  return {codes[0], codes[1], codes[2], codes[3]};
}

// Of 4 bits, of one scale and zero.
template <class Element>
__device__ __forceinline__ uint2 int4_codes(const Sixteen& row, float scale, float zero) {
  const Divisor by = int4_divisor(scale);
  std::uint32_t codes[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const std::uint32_t four = int4_codes(widen<Element>(row.quad(n)), {scale, scale, scale, scale},
                                          {zero, zero, zero, zero}, {by, by, by, by});
    codes[n / 2] |= four << n % 2 * 16;
  }
  return {codes[0], codes[1]};
}

// A row of one head, of which this lane has the 16 channels from `channel` on and kLanes lanes have all. `present`:
// else nothing is written. Every lane of the warp comes here.
template <class Element, RowCoding kCoding, int kLanes>
__device__ __forceinline__ void write_sixteen(const RowParams& p, const Sixteen& row, int channel, int head,
                                              std::byte* codes, std::byte* numbers, bool present) {
  if constexpr (kCoding == RowCoding::kInt4Token) {
    float least = 0.0F, most = 0.0F;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Quad quad = widen<Element>(row.quad(n));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool first = n == 0 && i == 0;
        least = first ? quad.x[i] : fminf(least, quad.x[i]);
        most = first ? quad.x[i] : fmaxf(most, quad.x[i]);
      }
    }
    constexpr int kShare = kPairChannels / kSixteen;  // lanes of a group
    const float zero = int4_zero(rounded<Element>(least_of<kShare>(least)));
    const float scale = truncated<Element>(int4_scale(zero, greatest_of<kShare>(most)));
    if (!present) return;
    *reinterpret_cast<uint2*>(codes + channel / 2) = int4_codes<Element>(row, scale, zero);
    if (channel % kPairChannels == 0) {
      *reinterpret_cast<std::uint32_t*>(numbers + channel / kPairChannels * 4) = Products<Element>::pack(scale, zero);
    }
  } else {
    constexpr bool kFp8 = kCoding == RowCoding::kFp8;
    const bool own = !kFp8 || p.format.scales == ScaleGrain::kTokenHead;
    float scale = 0.0F;
    if (own) {
      scale = scale_of(greatest_of<kLanes>(greatest_magnitude<Element>(row)), kFp8 ? kGreatestE4m3 : kGreatestInt8);
    } else {
      scale = reinterpret_cast<const float*>(p.tables[0])[p.format.scales == ScaleGrain::kHead ? head : 0];
    }
    if (!present) return;
    const Divisor by = divisor_of(scale);
    const uint4 all = kFp8 ? fp8_codes<Element>(row, by, own) : int8_codes<Element>(row, by);
    *reinterpret_cast<uint4*>(codes + channel) = all;
    if (own && channel == 0) *reinterpret_cast<float*>(numbers) = scale;
  }
}

}  // namespace ringattn::cuda
