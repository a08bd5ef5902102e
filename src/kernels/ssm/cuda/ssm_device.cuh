// SPDX-License-Identifier: Apache-2.0
// Device functions of the SSM kernels: segments of a launch, tensor elements, dt, softplus and silu, and hi/lo pairs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/common/cuda/ptx.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

inline constexpr float kSsmLog2E = 1.44269504F;
inline constexpr float kMinLog = -150.0F;  // log2 decay of one token, clamped (kernels/ssm/ssm.hpp)

// A segment of one of a launch's runs.
struct SegmentCoord {
  std::int64_t index;          // among all segments of the task
  std::int64_t super_segment;  // among all super-segments of the task
  std::int64_t row;
  int tokens;
  // These states before the segment are zero and not stored: the local state (M), and the super-segment's state (T).
  bool first_of_super;
  bool from_zero;
};

// Two adjacent elements of a state, or zeros for a null pointer.
__device__ __forceinline__ float2 state_pair(const float* states, std::int64_t at) {
  return states != nullptr ? *reinterpret_cast<const float2*>(states + at) : make_float2(0.0F, 0.0F);
}

// The run of the launch that contains the segment (or super-segment) with this index in the task.
template <std::int64_t SsmRunEntry::*kFirst>
__device__ __forceinline__ int run_of(const SsmParams& p, std::int64_t index) {
  int low = 0;
  int high = p.run_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.runs[middle].*kFirst <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ __forceinline__ SegmentCoord segment_coord(const SsmParams& p, std::int64_t nth) {
  const std::int64_t index = p.runs[0].segment + nth;
  const SsmRunEntry& run = p.runs[run_of<&SsmRunEntry::segment>(p, index)];
  const std::int64_t in_run = index - run.segment;
  const std::int64_t left = run.tokens - in_run * kSegmentTokens;
  const std::int64_t super_in_run = in_run / kSegmentsOfSuper;
  return {index,
          run.super_segment + super_in_run,
          run.row + in_run * kSegmentTokens,
          static_cast<int>(left < kSegmentTokens ? left : kSegmentTokens),
          in_run % kSegmentsOfSuper == 0,
          super_in_run == 0 && run.initial == nullptr};
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

template <class Element>
__device__ __forceinline__ Element from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

template <class Element>
__device__ __forceinline__ const Element* element_at(const SsmTensor& tensor, std::int64_t row, int head) {
  return static_cast<const Element*>(tensor.data) + row * tensor.token_stride + head * tensor.head_stride;
}

// Maximum and minimum. NaN if either operand is NaN.
__device__ __forceinline__ float larger(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float smaller(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// log(1 + e^v), within 8 ulp if e^v is a normal number, and 0 below that. NaN stays NaN. With e = exp(−|v|), which is
// at most 1, it is max(v, 0) + e · (log(1 + e) / e), and the quotient is a polynomial.
__device__ __forceinline__ float softplus(float v) {
  constexpr float kLog2ERest = 1.92596299e-8F;  // log2 e − kSsmLog2E
  constexpr float kLn2 = 0.693147181F;
  constexpr float kQuotient[] = {-0.0295052137F, 0.0782259107F, -0.136632427F, 0.191060051F,
                                 -0.24842982F,   0.333190978F,  -0.499994934F, 0.99999994F};
  const float distance = fminf(fabsf(v), 128.0F);  // further away e is 0; the other summand propagates NaN
  const float log = __fmul_rn(distance, -kSsmLog2E);
  const float rest = __fmaf_rn(distance, -kLog2ERest, __fmaf_rn(distance, -kSsmLog2E, -log));
  const float power = exp2_approx(log);
  const float e = __fmaf_rn(power, __fmul_rn(rest, kLn2), power);
  float quotient = 0.00523268804F;
#pragma unroll
  for (int i = 0; i < 8; ++i) quotient = __fmaf_rn(quotient, e, kQuotient[i]);
  return __fmaf_rn(quotient, e, larger(v, 0.0F));
}

// Bias of dt. −0 without a bias, which changes no bits.
__device__ __forceinline__ float dt_bias_of(const float* bias, int head) {
  return bias != nullptr ? bias[head] : -0.0F;
}

// dt after bias, softplus and clamping. NaN stays NaN.
__device__ __forceinline__ float make_dt(float dt, float bias, bool with_softplus, float dt_min, float dt_max) {
  dt = __fadd_rn(dt, bias);
  if (with_softplus) dt = softplus(dt);
  return smaller(larger(dt, dt_min), dt_max);
}

// v / (1 + exp(−v))
__device__ __forceinline__ float silu(float v) {
  const float power = exp2_approx(__fmul_rn(v, -kSsmLog2E));
  return __fmul_rn(v, reciprocal_approx(__fadd_rn(power, 1.0F)));
}
// The derivative of silu. It is 1 at +∞ and 0 at −∞, for which the product would be ∞ · 0.
__device__ __forceinline__ float silu_slope(float v) {
  const float power = exp2_approx(__fmul_rn(v, -kSsmLog2E));
  const float logistic = reciprocal_approx(__fadd_rn(power, 1.0F));
  return isinf(v) ? logistic : __fmul_rn(logistic, __fmaf_rn(v, __fsub_rn(1.0F, logistic), 1.0F));
}

// Hi/lo pairs: fp32 factors of MMAs as the sum of two bf16 values, and conversions of packed 16-bit pairs. Used by the
// SSD kernels of sm80 and sm90.

// Splits two fp32 values into packed bf16 values with first = hi + lo, within 2^−17.
__device__ __forceinline__ void split_hi_lo(float first, float second, std::uint32_t& hi, std::uint32_t& lo) {
  hi = MmaTraits<__nv_bfloat16>::pack(first, second);
  lo = MmaTraits<__nv_bfloat16>::pack(__fsub_rn(first, __uint_as_float(hi << 16)),
                                      __fsub_rn(second, __uint_as_float(hi & 0xffff0000U)));
}

// Products of two packed bf16 values with two hi/lo pairs, as hi/lo pairs within 3 · 2^−18. x · hi is represented
// exactly: its rounded value, and the rounding error in lo.
__device__ __forceinline__ void split_product_hi_lo(std::uint32_t x, uint2 factor, std::uint32_t& hi,
                                                    std::uint32_t& lo) {
  asm("{\n"
      ".reg .b32 rest;\n"
      "fma.rn.bf16x2 %0, %2, %3, %5;\n"
      "neg.bf16x2 rest, %0;\n"
      "fma.rn.bf16x2 rest, %2, %3, rest;\n"
      "fma.rn.bf16x2 %1, %2, %4, rest;\n"
      "}"
      : "=&r"(hi), "=r"(lo)
      : "r"(x), "r"(factor.x), "r"(factor.y), "r"(0x80008000U));
}

// Products of packed bf16 values, each rounded once. The addend is −0, which keeps the sign of a zero.
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t products;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(a), "r"(b), "r"(0x80008000U));
  return products;
}

__device__ __forceinline__ float2 unpack(std::uint32_t pair, __nv_bfloat16 /*type*/) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
}
__device__ __forceinline__ float2 unpack(std::uint32_t pair, __half /*type*/) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

}  // namespace ringattn::cuda
