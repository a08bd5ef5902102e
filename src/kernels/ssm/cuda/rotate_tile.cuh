// SPDX-License-Identifier: Apache-2.0
// RoPE of rows of B and C in shared memory, after they have landed and before they are operands of MMAs. cos and sin
// come from SsmRotation::angles, which all heads of a token share. Operations and rounding are those of rope_kernel
// (kernels/rope/cuda), NaNs aside.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/cuda/ptx.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

__device__ inline void store_shared_8(std::uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(value.x), "r"(value.y) : "memory");
}
__device__ inline std::uint32_t load_shared_half(std::uint32_t address) {
  std::uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}
__device__ inline uint2 load_shared_8(std::uint32_t address) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
  return r;
}

struct RotatedPair {
  float first, second;
};
__device__ __forceinline__ RotatedPair rotated(float first, float second, float cos, float sin) {
  return {__fsub_rn(__fmul_rn(first, cos), __fmul_rn(second, sin)),
          __fadd_rn(__fmul_rn(second, cos), __fmul_rn(first, sin))};
}

// Rotates two half-split pairs: two first elements, and two second ones.
template <class Element>
__device__ __forceinline__ void rotate_half_split(std::uint32_t& first, std::uint32_t& second, float2 cos, float2 sin) {
  const float2 a = unpack(first, Element());
  const float2 b = unpack(second, Element());
  const RotatedPair x = rotated(a.x, b.x, cos.x, sin.x);
  const RotatedPair y = rotated(a.y, b.y, cos.y, sin.y);
  first = MmaTraits<Element>::pack(x.first, y.first);
  second = MmaTraits<Element>::pack(x.second, y.second);
}
// Rotates an interleaved pair.
template <class Element>
__device__ __forceinline__ void rotate_interleaved(std::uint32_t& pair, float cos, float sin) {
  const float2 both = unpack(pair, Element());
  const RotatedPair turned = rotated(both.x, both.y, cos, sin);
  pair = MmaTraits<Element>::pack(turned.first, turned.second);
}

// What a thread rotates at a time, and where its elements are.
enum class RotationUnit { kHalfSplit, kInterleaved, kPair };  // kRotationPairs pairs, or one of either layout

// A thread's units of a tile: kUnits of them, `stride` apart, whose angles are loaded together. Units count through the
// rows of the tile.
template <int kUnits, RotationUnit kUnit>
class RotationUnits {
 public:
  // `rows`: of the tile, from row `first_row` of the tensor on.
  __device__ __forceinline__ RotationUnits(const SsmRotation& by, std::int64_t first_row, int rows, int stride)
      : by_(by), angles_(by.angles + first_row * 2 * by.pairs), count_(rows * by.units), stride_(stride) {}

  // Units of the tile.
  __device__ __forceinline__ int count() const { return count_; }

  // Loads the angles of units first, first + stride, …
  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * stride_;
      if (unit >= count_) continue;
      const int row = by_.by_units.quotient(unit);
      const float* const cos = angles_ + row * 2 * by_.pairs + (unit - row * by_.units) * kPairs;
      if constexpr (kUnit == RotationUnit::kPair) {
        cos_[u] = __ldg(cos);
        sin_[u] = __ldg(cos + by_.pairs);
      } else {
        cos_[u] = __ldg(reinterpret_cast<const float4*>(cos));
        sin_[u] = __ldg(reinterpret_cast<const float4*>(cos + by_.pairs));
      }
    }
  }

  // Rotates these units of a tile. address(row, column): of an element in shared memory; from a multiple of eight
  // columns on, eight elements are adjacent.
  template <class Element, class Address>
  __device__ __forceinline__ void rotate(int first, Address address) const {
    Words words[kUnits];  // of all units before any is stored
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first + u * stride_ < count_) words[u] = load_words(first + u * stride_, address);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first + u * stride_ >= count_) continue;
      rotate_words<Element>(words[u], cos_[u], sin_[u]);
      store_words(first + u * stride_, words[u], address);
    }
  }

 private:
  static constexpr int kPairs = kUnit == RotationUnit::kPair ? 1 : kRotationPairs;
  using Angles = std::conditional_t<kUnit == RotationUnit::kPair, float, float4>;
  // First and second elements (kHalfSplit), adjacent pairs (kInterleaved), or one pair in the first word (kPair).
  using Words = std::conditional_t<kUnit == RotationUnit::kPair, std::uint32_t, uint4>;

  __device__ __forceinline__ int first_pair(int unit, int row) const { return (unit - row * by_.units) * kPairs; }

  template <class Address>
  __device__ __forceinline__ Words load_words(int unit, Address address) const {
    const int row = by_.by_units.quotient(unit);
    const int pair = first_pair(unit, row);
    if constexpr (kUnit == RotationUnit::kInterleaved) {
      return load_shared_16(address(row, 2 * pair));
    } else if constexpr (kUnit == RotationUnit::kHalfSplit) {
      const uint2 firsts = load_shared_8(address(row, pair));
      const uint2 seconds = load_shared_8(address(row, pair + by_.pairs));
      return make_uint4(firsts.x, firsts.y, seconds.x, seconds.y);
    } else {
      const int step = by_.interleaved ? 2 : 1;
      return load_shared_half(address(row, step * pair)) | load_shared_half(address(row, second_of(pair))) << 16;
    }
  }
  template <class Address>
  __device__ __forceinline__ void store_words(int unit, const Words& words, Address address) const {
    const int row = by_.by_units.quotient(unit);
    const int pair = first_pair(unit, row);
    if constexpr (kUnit == RotationUnit::kInterleaved) {
      store_shared(address(row, 2 * pair), words);
    } else if constexpr (kUnit == RotationUnit::kHalfSplit) {
      store_shared_8(address(row, pair), make_uint2(words.x, words.y));
      store_shared_8(address(row, pair + by_.pairs), make_uint2(words.z, words.w));
    } else {
      store_shared_half(address(row, by_.interleaved ? 2 * pair : pair), words);
      store_shared_half(address(row, second_of(pair)), words >> 16);
    }
  }
  // Column of a pair's second element.
  __device__ __forceinline__ int second_of(int pair) const { return by_.interleaved ? 2 * pair + 1 : pair + by_.pairs; }

  template <class Element>
  __device__ __forceinline__ static void rotate_words(Words& words, const Angles& cos, const Angles& sin) {
    if constexpr (kUnit == RotationUnit::kPair) {
      rotate_interleaved<Element>(words, cos, sin);
    } else if constexpr (kUnit == RotationUnit::kInterleaved) {
      rotate_interleaved<Element>(words.x, cos.x, sin.x);
      rotate_interleaved<Element>(words.y, cos.y, sin.y);
      rotate_interleaved<Element>(words.z, cos.z, sin.z);
      rotate_interleaved<Element>(words.w, cos.w, sin.w);
    } else {
      rotate_half_split<Element>(words.x, words.z, make_float2(cos.x, cos.y), make_float2(sin.x, sin.y));
      rotate_half_split<Element>(words.y, words.w, make_float2(cos.z, cos.w), make_float2(sin.z, sin.w));
    }
  }

  const SsmRotation& by_;
  const float* angles_;  // of the tile's first row
  int count_;
  int stride_;
  Angles cos_[kUnits], sin_[kUnits];
};

// Calls visit with the kind of units as an integral constant.
template <class Visit>
__device__ __forceinline__ void visit_rotation_unit(const SsmRotation& by, Visit visit) {
  if (by.unit_pairs != kRotationPairs) return visit(std::integral_constant<RotationUnit, RotationUnit::kPair>());
  if (by.interleaved) return visit(std::integral_constant<RotationUnit, RotationUnit::kInterleaved>());
  visit(std::integral_constant<RotationUnit, RotationUnit::kHalfSplit>());
}

// Rotates the first `rows` rows of tiles whose first row is row `first_row` of their tensors, by `threads` threads,
// which have kUnits units at a time: with more, registers of what is live around it are spilled. A barrier before and
// after is the caller's. addresses: as in RotationUnits::rotate(), one for each tile.
template <class Element, int kUnits, class... Address>
__device__ __forceinline__ void rotate_tiles(const SsmRotation& by, std::int64_t first_row, int rows, int thread,
                                             int threads, Address... addresses) {
  visit_rotation_unit(by, [&](auto unit) {
    RotationUnits<kUnits, decltype(unit)::value> units(by, first_row, rows, threads);
#pragma unroll 1
    for (int first = thread; first < units.count(); first += kUnits * threads) {
      units.load(first);
      (units.template rotate<Element>(first, addresses), ...);
    }
  });
}

}  // namespace ringattn::cuda
