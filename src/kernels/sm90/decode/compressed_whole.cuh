// SPDX-License-Identifier: Apache-2.0
// Decoding over a compressed cache where the sliced kernel doesn't: many query rows a KV head, other head dims, and
// units that the sliced kernel has failed at. It is decode_kernel with a warpgroup instead of the fetching warp,
// which reads codes from memory and writes elements into the tiles, by row_codes.hpp.
#pragma once

#include "kernels/cuda/device/overlap.cuh"
#include "kernels/sm90/decode/compressed_map.cuh"
#include "kernels/sm90/decode/compressed_values.cuh"
#include "kernels/sm90/decode/decoder.cuh"

namespace ringattn::sm90 {

inline constexpr int kUnpackBarrier = 3;  // of the threads that unpack
inline constexpr int kUnpackThreads = 128;
inline constexpr int kWholeThreads = kDecodeFoldThreads + kUnpackThreads;

template <class C>
class Unpacker {
 public:
  __device__ __forceinline__ Unpacker(const CompressedParams& p, const DecodeMap<C>& map)
      : p_(p), map_(map), thread_(thread_of_cta() - kDecodeFoldThreads) {}

  __device__ __forceinline__ void take(const DecodeUnit& unit) {
#pragma unroll 1
    for (int tile = unit.begin; tile < unit.end; ++tile, ring_.advance()) {
      const std::uint32_t stage = ring_.stage();
      barrier_wait(map_.k_empty(stage), ring_.parity() ^ 1U);
      unpack<C::kDim>(p_.k, map_.k(stage), unit, tile);
      tell(map_.k_full(stage));
      barrier_wait(map_.v_empty(stage), ring_.parity() ^ 1U);
      unpack<C::kDimV>(p_.v, map_.v(stage), unit, tile);
      tell(map_.v_full(stage));
    }
  }

 private:
  __device__ __forceinline__ void tell(std::uint32_t barrier) const {
    proxy_fence();
    named_sync(kUnpackBarrier, kUnpackThreads);
    if (thread_ == 0) barrier_arrive(barrier);
  }

  // Where a key of the unit's sequence lies.
  struct Place {
    int page, row;
  };
  __device__ __forceinline__ Place place_of_key(const DecodeUnit& unit, int key) const {
    const DecodeParams& p = p_.step;
    const int here = key - unit.lag;
    if (p.pages == nullptr) return {unit.sequence, here};
    return {__ldcg(p.pages + unit.sequence * p.table_stride + (here >> p.page_log)), here & ((1 << p.page_log) - 1)};
  }

  // 8 columns of a row at a time. Rows behind the last key are left as they are: nobody sees them.
  template <int kColumns>
  __device__ __forceinline__ void unpack(const PackedTensor& t, std::uint32_t tile, const DecodeUnit& unit,
                                         int number) const {
    constexpr int kChunks = kColumns / 8;
    const int first = number * C::kKeyTile;
    const int left = unit.of.length - first;
    const int rows = left < C::kKeyTile ? left : C::kKeyTile;
#pragma unroll 4
    for (int i = thread_; i < rows * kChunks; i += kUnpackThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const int panel = chunk / 8 * C::kKeyTile * kPanelRowBytes;
      cuda::store_shared(tile + static_cast<std::uint32_t>(panel) + swizzled_chunk(kPanelRowBytes, row, chunk % 8),
                         elements<kColumns>(t, unit, first + row, chunk));
    }
  }

  template <int kColumns>
  __device__ __forceinline__ uint4 elements(const PackedTensor& t, const DecodeUnit& unit, int key, int chunk) const {
    using Element = typename C::Element;
    if (t.has_tail() && key >= unit.of.length - unit.of.length % t.group) {
      const std::int64_t place =
          (static_cast<std::int64_t>(unit.sequence) * t.group + key % t.group) * p_.step.fold.kv_heads + unit.kv_head;
      return __ldcg(reinterpret_cast<const uint4*>(t.table + (place * kColumns + chunk * 8) * 2));
    }
    const Place at = place_of_key(unit, key);
    const std::byte* const codes = t.codes.at(at.page, at.row, unit.kv_head);
    if (!t.four_bits()) {
      const auto* const scale = reinterpret_cast<const float*>(
          t.number_bytes > 0 ? t.numbers.at(at.page, at.row, unit.kv_head)
                             : t.table + (t.scales == ScaleGrain::kHead ? unit.kv_head * 4 : 0));
      const uint2 words = __ldcg(reinterpret_cast<const uint2*>(codes + chunk * 8));
      const float by = __ldcg(scale);
      const uint2 a = t.coding == RowCoding::kFp8 ? eight_bits<Element, true>(words.x, by)
                                                  : eight_bits<Element, false>(words.x, by);
      const uint2 b = t.coding == RowCoding::kFp8 ? eight_bits<Element, true>(words.y, by)
                                                  : eight_bits<Element, false>(words.y, by);
      return {a.x, a.y, b.x, b.y};
    }
    const std::uint32_t word = __ldcg(reinterpret_cast<const std::uint32_t*>(codes + chunk * 4));
    EightPairs pairs;
    if (t.coding == RowCoding::kInt4Token) {
      const std::byte* const numbers = t.numbers.at(at.page, at.row, unit.kv_head);
      pairs.set(__ldcg(reinterpret_cast<const std::uint32_t*>(numbers) + chunk / 4));
    } else {
      const int group_key = key - key % t.group;
      const int each = kColumns / t.group;
      const auto pair_of = [&](int i) {
        const int column = chunk * 8 + i;
        const Place of = place_of_key(unit, group_key + column / each);
        const std::byte* const numbers = t.numbers.at(of.page, of.row, unit.kv_head);
        return __ldcg(reinterpret_cast<const std::uint32_t*>(numbers) + column % each);
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs.set(i, pair_of(i), pair_of(i + 4));
    }
    return four_bits<Element>(word, pairs);
  }

  const CompressedParams& p_;
  const DecodeMap<C>& map_;
  const int thread_;
  RingCursor<C::kStages> ring_;
};

// Of the units first, first + step, … of a step those that `chosen(number)` says, by kWholeThreads threads.
template <class C, class Chosen>
__device__ __forceinline__ void fold_whole_units(const CompressedParams& p, const DecodeMap<C>& map, int first,
                                                 int step, const Chosen& chosen) {
  const int units = unit_count(p.step, map);
  const auto each_unit = [&](auto&& worker) {
    for (int n = first; n < units; n += step) {
      if (chosen(n)) worker.take(unit_of<C>(p.step, map, n));
    }
  };
  if (threadIdx.x < kDecodeFoldThreads) {
    each_unit(Decoder<C>(p.step, map));
  } else if (threadIdx.x < kWholeThreads) {
    each_unit(Unpacker<C>(p, map));
  }
}

template <class C>
__global__ void __launch_bounds__(kWholeThreads, 1) whole_kernel(const __grid_constant__ CompressedParams p) {
  const DecodeMap<C> map;
  if (threadIdx.x == 0) init_decode_barriers(map);
  cuda::let_next_begin();
  cuda::await_kernels_before();
  if (threadIdx.x >= kDecodeFoldThreads && threadIdx.x < kDecodeFoldThreads + 32) count_units<C>(p.step, map);
  __syncthreads();
  fold_whole_units(p, map, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), [](int) { return true; });
}

}  // namespace ringattn::sm90
