// SPDX-License-Identifier: Apache-2.0
// Rotation of rows by RoPE on a GPU. Used by the RoPE kernel, and by the update of a KV cache if it rotates the rows
// that it writes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/rope/rope.hpp"
#include "kernels/rope/rope_angle.hpp"

namespace ringattn::cuda {

namespace rope {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

// Rounds to nearest even. Any NaN becomes the NaN that host kernels store.
__device__ __forceinline__ void store_rounded(float value, float& to) {
  to = isnan(value) ? __uint_as_float(0x7fc00000U) : value;
}
__device__ __forceinline__ void store_rounded(float value, __nv_bfloat16& to) {
  to = isnan(value) ? __ushort_as_bfloat16(0x7fc0U) : __float2bfloat16_rn(value);
}
__device__ __forceinline__ void store_rounded(float value, __half& to) {
  to = isnan(value) ? __ushort_as_half(0x7e00U) : __float2half_rn(value);
}

template <class Element>
__device__ __forceinline__ void rotate_pair(Element& a, Element& b, float cos, float sin) {
  const float x = to_float(a), y = to_float(b);
  store_rounded(__fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin)), a);
  store_rounded(__fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin)), b);
}

// kCount elements that are loaded and stored together.
template <class Element, int kCount, int kAlignment>
struct alignas(kAlignment) Elements {
  Element of[kCount];
};

}  // namespace rope

// cos and sin of a pair at a position, with the rotation's factor.
__device__ __forceinline__ SinCos sin_cos_of(const RowRotation& by, std::int64_t position, int pair) {
  const SinCos value = sin_cos(rope_angle(position, __ldg(by.frequencies + pair), by.exact));
  return {__fmul_rn(value.sin, by.factor), __fmul_rn(value.cos, by.factor)};
}

// The part of a row that a thread rotates or copies. A rotating unit has kVectors vectors of adjacent pairs
// (interleaved), or a vector of first elements and one of second elements (half-split). A unit after the rotated
// elements copies one vector.
template <class Element, bool kAligned, RopePairs kPairs, int kVectors = 1>
class RowUnit {
 public:
  static constexpr bool kInterleaved = kPairs == RopePairs::kInterleaved;
  static_assert(kVectors == 1 || (kVectors == 2 && kInterleaved && kAligned));
  // Elements of a vector: 16 bytes if rows are aligned to 16 bytes.
  static constexpr int kCount = kAligned ? 16 / static_cast<int>(sizeof(Element)) : kInterleaved ? 2 : 1;
  static constexpr int kUnitPairs = kInterleaved ? kVectors * kCount / 2 : kCount;

  // `turned`: rotating units of a row.
  __device__ __forceinline__ void load(const Element* row, int unit, int turned, int pairs) {
    turns_ = unit < turned;
    pair_ = unit * kUnitPairs;
    column_ = turns_ ? (kInterleaved ? 2 * pair_ : pair_) : 2 * pairs + (unit - turned) * kCount;
    first_ = load_vector(row + column_);
    if (kHasSecond && turns_) second_ = load_vector(row + column_ + distance(pairs));
  }

  // cos, sin: [pairs] of the row's token
  __device__ __forceinline__ void rotate_and_store(Element* row, int pairs, const float* cos, const float* sin) {
    if (turns_) {
#pragma unroll
      for (int i = 0; i < kUnitPairs; ++i) {
        Vector& vector = kInterleaved && 2 * i >= kCount ? second_ : first_;
        Element& a = vector.of[kInterleaved ? 2 * i % kCount : i];
        Element& b = kInterleaved ? vector.of[2 * i % kCount + 1] : second_.of[i];
        rope::rotate_pair(a, b, cos[pair_ + i], sin[pair_ + i]);
      }
      if (kHasSecond) *reinterpret_cast<Vector*>(row + column_ + distance(pairs)) = second_;
    }
    *reinterpret_cast<Vector*>(row + column_) = first_;
  }

 private:
  using Vector = rope::Elements<Element, kCount, kAligned ? 16 : sizeof(Element)>;

  static constexpr bool kHasSecond = !kInterleaved || kVectors == 2;
  // From the first vector of a rotating unit to the second.
  static __device__ __forceinline__ int distance(int pairs) { return kInterleaved ? kCount : pairs; }

  // Through L2: an earlier kernel may still be running when a launch that overlaps it has filled L1.
  static __device__ __forceinline__ Vector load_vector(const Element* from) {
    Vector vector;
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(&vector) = __ldcg(reinterpret_cast<const uint4*>(from));
    } else {
      using Word = std::conditional_t<sizeof(Element) == 4, unsigned int, unsigned short>;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        *reinterpret_cast<Word*>(&vector.of[i]) = __ldcg(reinterpret_cast<const Word*>(from) + i);
      }
    }
    return vector;
  }

  Vector first_, second_;
  int column_ = 0, pair_ = 0;
  bool turns_ = false;
};

}  // namespace ringattn::cuda
