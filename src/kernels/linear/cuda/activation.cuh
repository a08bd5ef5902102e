// SPDX-License-Identifier: Apache-2.0
// The epilogue of linear layers on GPUs: bias, activation and rounding of one value. Every kernel uses these functions,
// and their instructions are fixed (no contraction by the compiler), so all of them round alike.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/attention/merge.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/common/cuda/widen.cuh"
#include "kernels/linear/activation.hpp"
#include "kernels/linear/linear_constants.hpp"

namespace ringattn::cuda {

// 1 / (1 + e^(−t))
__device__ __forceinline__ float sigmoid(float t) {
  return reciprocal_approx(__fadd_rn(1.0F, exp2_approx(__fmul_rn(t, -kLog2E))));
}

// The polynomial of kErfcCoefficients by Horner's rule. p: its value over the coefficients before kFirst.
template <int kFirst>
__device__ __forceinline__ float erfc_polynomial(float p, float t) {
  if constexpr (kFirst == static_cast<int>(sizeof(kErfcCoefficients) / sizeof(kErfcCoefficients[0]))) {
    return p;
  } else {
    constexpr float kCoefficient = kErfcCoefficients[kFirst];
    return erfc_polynomial<kFirst + 1>(__fmaf_rn(p, t, kCoefficient), t);
  }
}

// Φ(x)
__device__ __forceinline__ float normal_cdf(float x) {
  const float t = reciprocal_approx(__fmaf_rn(fabsf(x), kHalfSqrtHalf, 1.0F));
  constexpr float kHighest = kErfcCoefficients[0];
  const float exponent = __fmaf_rn(__fmul_rn(x, -0.5F), x, erfc_polynomial<1>(kHighest, t));
  const float tail = __fmul_rn(__fmul_rn(t, 0.5F), exp2_approx(__fmul_rn(exponent, kLog2E)));
  return x < 0.0F ? tail : __fadd_rn(1.0F, -tail);
}

// a(x) of linear.hpp.
template <LinearActivation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == LinearActivation::kSilu) return __fmul_rn(x, sigmoid(x));
  if constexpr (kActivation == LinearActivation::kGeluTanh) {
    const float slope = __fmaf_rn(__fmul_rn(x, x), kGeluTanhCubed, kGeluTanh);
    return __fmul_rn(x, sigmoid(__fmul_rn(x, slope)));
  }
  if constexpr (kActivation == LinearActivation::kGelu) return __fmul_rn(x, normal_cdf(x));
  return x;
}

// Calls visit(Activation<…>{}) with the activation, so that a loop over registers is compiled for each activation and
// chosen once.
template <LinearActivation kActivation_>
struct Activation {
  static constexpr LinearActivation kActivation = kActivation_;
  __device__ __forceinline__ float operator()(float x) const { return activate<kActivation_>(x); }
};
template <bool kGated, class Visit>
__device__ __forceinline__ void with_activation(LinearActivation activation, Visit visit) {
  if (activation == LinearActivation::kSilu) {
    visit(Activation<LinearActivation::kSilu>{});
  } else if (activation == LinearActivation::kGelu) {
    visit(Activation<LinearActivation::kGelu>{});
  } else if (activation == LinearActivation::kGeluTanh) {
    visit(Activation<LinearActivation::kGeluTanh>{});
  } else if constexpr (!kGated) {  // a gate has an activation
    visit(Activation<LinearActivation::kNone>{});
  }
}

// An element in memory: fp32, or the bits of bf16 or fp16.
template <class Element>
using StoredElement = std::conditional_t<std::is_same_v<Element, float>, float, std::uint16_t>;

template <class Element>
__device__ __forceinline__ float load_element(StoredElement<Element> stored) {
  if constexpr (std::is_same_v<Element, float>) {
    return stored;
  } else {
    return widen<Element>(stored);
  }
}

// Element `column` of a bias, or −0, which changes no sum, if there is none.
template <class Element>
__device__ __forceinline__ float load_bias(const void* bias, std::int64_t column) {
  if (bias == nullptr) return -0.0F;
  return load_element<Element>(__ldg(static_cast<const StoredElement<Element>*>(bias) + column));
}

// Rounds a value, which fp32 arithmetic has made. A NaN has the bits 0x7fff, in fp32 0x7fffffff.
template <class Element>
__device__ __forceinline__ StoredElement<Element> round_element(float value) {
  if constexpr (std::is_same_v<Element, float>) {
    return value;
  } else {
    return static_cast<std::uint16_t>(MmaTraits<Element>::pack(value, value));
  }
}

}  // namespace ringattn::cuda
