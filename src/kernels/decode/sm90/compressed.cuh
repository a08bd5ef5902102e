// SPDX-License-Identifier: Apache-2.0
// The sliced kernel (sliced.cuh) over a quantized cache: the warps that issue mma dequantize in registers. Failed work
// tiles are recomputed tile by tile at the end.
#pragma once

#include <algorithm>
#include <cassert>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/pdl.cuh"
#include "kernels/decode/sm90/compressed.hpp"
#include "kernels/decode/sm90/compressed_fetch.cuh"
#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/dequantize.cuh"
#include "kernels/decode/sm90/quantized.cuh"
#include "kernels/decode/sm90/sliced.cuh"

namespace ringattn::sm90 {

// Decode over a quantized cache without the sliced kernel: for many query rows of a KV head, for other head dims, and
// for work tiles that the sliced kernel has failed. It is decode_kernel with a dequantizing warpgroup instead of the
// producer warp, which reads quantized values from global memory and writes elements to the tiles, with the arithmetic
// of quant/row_quantization.hpp.

inline constexpr int kDequantizeBarrier = 3;  // named barrier of the dequantizing threads
inline constexpr int kDequantizeThreads = 128;
inline constexpr int kWholeThreads = kDecodeConsumerThreads + kDequantizeThreads;

template <class C>
class Dequantizer {
 public:
  __device__ __forceinline__ Dequantizer(const CompressedParams& p, const DecodeMap<C>& map)
      : p_(p), map_(map), thread_(thread_of_cta() - kDecodeConsumerThreads) {}

  __device__ __forceinline__ void process(const DecodeWorkTile& work_tile) {
#pragma unroll 1
    for (int tile = work_tile.begin; tile < work_tile.end; ++tile, ring_.advance()) {
      const std::uint32_t stage = ring_.stage();
      barrier_wait(map_.k_empty(stage), ring_.parity() ^ 1U);
      dequantize<C::kDim>(p_.k, map_.k(stage), work_tile, tile);
      arrive(map_.k_full(stage));
      barrier_wait(map_.v_empty(stage), ring_.parity() ^ 1U);
      dequantize<C::kDimV>(p_.v, map_.v(stage), work_tile, tile);
      arrive(map_.v_full(stage));
    }
  }

 private:
  __device__ __forceinline__ void arrive(std::uint32_t barrier) const {
    proxy_fence();
    named_sync(kDequantizeBarrier, kDequantizeThreads);
    if (thread_ == 0) barrier_arrive(barrier);
  }

  // The location of a key of the work tile's sequence.
  struct KeyCoord {
    int page, row;
  };
  __device__ __forceinline__ KeyCoord locate_key(const DecodeWorkTile& work_tile, int key) const {
    const CompressedParams& p = p_;
    const int here = key - work_tile.lag;
    if (p.table.pages == nullptr) return {work_tile.sequence, here};
    return {__ldcg(p.table.pages + work_tile.sequence * p.table.stride + (here >> p.table.page_log)),
            here & ((1 << p.table.page_log) - 1)};
  }

  // Dequantizes 8 columns of a row at a time. Rows after the last key are left as they are: no row sees them.
  template <int kColumns>
  __device__ __forceinline__ void dequantize(const QuantizedTensor& t, std::uint32_t tile,
                                             const DecodeWorkTile& work_tile, int number) const {
    constexpr int kChunks = kColumns / 8;
    const int first = number * C::kKeyTile;
    const int left = work_tile.seq_info.length - first;
    const int rows = left < C::kKeyTile ? left : C::kKeyTile;
#pragma unroll 4
    for (int i = thread_; i < rows * kChunks; i += kDequantizeThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const int panel = chunk / 8 * C::kKeyTile * kPanelRowBytes;
      cuda::store_shared(tile + static_cast<std::uint32_t>(panel) + swizzled_chunk(kPanelRowBytes, row, chunk % 8),
                         elements<kColumns>(t, work_tile, first + row, chunk));
    }
  }

  template <int kColumns>
  __device__ __forceinline__ uint4 elements(const QuantizedTensor& t, const DecodeWorkTile& work_tile, int key,
                                            int chunk) const {
    using Element = typename C::Element;
    if (t.has_tail() && key >= work_tile.seq_info.length - work_tile.seq_info.length % t.group) {
      const std::int64_t row_index =
          (static_cast<std::int64_t>(work_tile.sequence) * t.group + key % t.group) * p_.attention.kv_heads +
          work_tile.kv_head;
      return __ldcg(reinterpret_cast<const uint4*>(t.table + (row_index * kColumns + chunk * 8) * 2));
    }
    const KeyCoord at = locate_key(work_tile, key);
    const std::byte* const quantized = t.quantized.at(at.page, at.row, work_tile.kv_head);
    if (!t.four_bits()) {
      const auto* const scale = reinterpret_cast<const float*>(
          t.qparam_bytes > 0 ? t.qparams.at(at.page, at.row, work_tile.kv_head)
                             : t.table + (t.scales == ScaleGrain::kHead ? work_tile.kv_head * 4 : 0));
      const uint2 words = __ldcg(reinterpret_cast<const uint2*>(quantized + chunk * 8));
      const float by = __ldcg(scale);
      const uint2 a = t.encoding == RowEncoding::kFp8 ? eight_bits<Element, true>(words.x, by)
                                                      : eight_bits<Element, false>(words.x, by);
      const uint2 b = t.encoding == RowEncoding::kFp8 ? eight_bits<Element, true>(words.y, by)
                                                      : eight_bits<Element, false>(words.y, by);
      return {a.x, a.y, b.x, b.y};
    }
    const std::uint32_t word = __ldcg(reinterpret_cast<const std::uint32_t*>(quantized + chunk * 4));
    EightPairs pairs;
    if (t.encoding == RowEncoding::kInt4Token) {
      const std::byte* const qparams = t.qparams.at(at.page, at.row, work_tile.kv_head);
      pairs.set(__ldcg(reinterpret_cast<const std::uint32_t*>(qparams) + chunk / 4));
    } else {
      const int group_key = key - key % t.group;
      const int each = kColumns / t.group;
      const auto pair_of = [&](int i) {
        const int column = chunk * 8 + i;
        const KeyCoord of = locate_key(work_tile, group_key + column / each);
        const std::byte* const qparams = t.qparams.at(of.page, of.row, work_tile.kv_head);
        return __ldcg(reinterpret_cast<const std::uint32_t*>(qparams) + column % each);
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs.set(i, pair_of(i), pair_of(i + 4));
    }
    return four_bits<Element>(word, pairs);
  }

  const CompressedParams& p_;
  const DecodeMap<C>& map_;
  const int thread_;
  PackedPipelineState<C::kStages> ring_;
};

// Decodes those of the work tiles first, first + step, … for which chosen(number) is true. Called by kWholeThreads
// threads.
template <class C, class Chosen>
__device__ __forceinline__ void decode_whole_tiles(const CompressedParams& p, const DecodeMap<C>& map, int first,
                                                   int step, const Chosen& chosen) {
  const int work_tiles = work_tile_count(p, map);
  const auto each_work_tile = [&](auto&& worker) {
    for (int n = first; n < work_tiles; n += step) {
      if (chosen(n)) worker.process(work_tile_of<C>(p, map, n));
    }
  };
  if (threadIdx.x < kDecodeConsumerThreads) {
    each_work_tile(Decoder<C>(p, map));
  } else if (threadIdx.x < kWholeThreads) {
    each_work_tile(Dequantizer<C>(p, map));
  }
}

template <class C>
__global__ void __launch_bounds__(kWholeThreads, 1) whole_kernel(const __grid_constant__ CompressedParams p) {
  const DecodeMap<C> map;
  if (threadIdx.x == 0) init_decode_barriers(map);
  cuda::pdl_launch_dependents();
  cuda::pdl_wait();
  if (threadIdx.x >= kDecodeConsumerThreads && threadIdx.x < kDecodeConsumerThreads + 32) count_work_tiles<C>(p, map);
  __syncthreads();
  decode_whole_tiles(p, map, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), [](int) { return true; });
}

// As recompute_failed(), over a quantized cache.
template <class C>
__device__ __noinline__ void recompute_failed(const CompressedParams& p, int first, int step) {
  using Whole = typename C::Whole;
  static_assert(C::kThreads >= kWholeThreads);
  const DecodeMap<Whole> map;
  lay_out_whole(p, map, [] {
    const CompressedMap<C> before;
    for (std::uint32_t i = 0; i < ColumnSliceMap<C>::kBarriers; ++i) barrier_invalidate(before.k_full(i));
    for (std::uint32_t i = 0; i < CompressedMap<C>::kQuantizedBarriers; ++i) {
      barrier_invalidate(before.quantized_full(false, i));
    }
  });
  decode_whole_tiles(p, map, first, step, [&p](int n) { return __ldcg(p.failed + n) != 0; });
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) compressed_kernel(const __grid_constant__ CompressedParams params) {
  const CompressedMap<C> map;
  const std::uint32_t rank = C::kSlices > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    init_sliced_barriers<C>(params, map);
    store_number(map.any_failed(), 0);
  }
  if (threadIdx.x == 32) init_quantized_barriers<C>(params, map);
  cuda::pdl_launch_dependents();
  __syncthreads();
  arrive_in_cluster<C, false>();  // warps that write to other CTAs wait for this arrival of all
  cuda::pdl_wait();
  const ClusterWorkTiles work = cluster_work_tiles<C>();
  decode_sliced<C>(
      params, map, rank, work, [&] { return QuantizedKeys<C>(params, map); },
      [&] { return ColumnOutputs<C, QuantizedColumns<C>>(params, map, rank, QuantizedColumns<C>(params, map, rank)); },
      [&](auto values) { return QuantizedBoxes<C, values>(params, map, rank); },
      [&] { store_number(map.any_failed(), 1); });
  // A CTA stays until no other CTA writes to its shared memory.
  __syncthreads();
  arrive_in_cluster<C, true>();
  wait_for_cluster<C>();
  if (rank == 0 && load_number(map.any_failed()) != 0) recompute_failed<C>(params, work.first, work.step);
}

// Launch. kernels/instances.cmake lists the instantiations.

// Head dims whose quantized values the sliced kernel's warps share evenly. whole_kernel decodes others.
template <AttentionConfig kAttention>
constexpr bool slices_compressed() {
  return kAttention.head_dim == kAttention.head_dim_v && (kAttention.head_dim == 64 || kAttention.head_dim == 128);
}

// Calls with(std::integral_constant<int, n>) for the slices that kernels are compiled for: at least 32 columns. With
// one slice, a CTA computes a work tile by itself.
template <AttentionConfig kAttention, class With>
void for_compressed_slices(With with) {
  if constexpr (slices_compressed<kAttention>()) {
    with(std::integral_constant<int, 1>());
    with(std::integral_constant<int, 2>());
    if constexpr (kAttention.head_dim_v >= 128) with(std::integral_constant<int, 4>());
  }
}

template <class Element, AttentionConfig kAttention>
void prepare_compressed() {
  using C = CompressedWholeConfig<Element, kAttention>;
  check_device();
  const auto allow = [](auto* kernel, int bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
  };
  allow(whole_kernel<C>, DecodeMap<C>::kBytes);
  for_compressed_slices<kAttention>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    using S = CompressedConfig<Element, kAttention, kSlices>;
    allow(compressed_kernel<S>, kMaxSharedBytes);
  });
}

template <class Element, AttentionConfig kAttention>
void launch_whole(const CompressedParams& params, int ctas, Stream stream) {
  using C = CompressedWholeConfig<Element, kAttention>;
  const cuda::PdlLaunch launch(ctas, kWholeThreads, DecodeMap<C>::kBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, whole_kernel<C>, params),
             "sm90_attention's decode of a compressed cache");
}

// Sets the stages of quantized tiles: V gets more than K in proportion to the slices, since its tiles are smaller by
// that factor. K gets at least two, so that one is loaded while the other is read.
template <class C>
void set_stages(CompressedParams& p) {
  constexpr int kCapacity = CompressedMap<C>::kQuantizedCapacity;
  const auto bytes = [](const QuantizedTensor& t) {
    const int rows = C::kKeyTile * (t.row_bytes + (t.qparam_bytes > 0 ? kQparamPitch : 0));
    return (rows + kQuantizedAlignment - 1) / kQuantizedAlignment * kQuantizedAlignment;
  };
  p.k.stage_bytes = bytes(p.k);
  p.v.stage_bytes = bytes(p.v);
  const int both = p.k.stage_bytes + C::kSlices * p.v.stage_bytes;
  p.k.stages = std::clamp(kCapacity / both, 2, kMaxQuantizedStages);
  p.v.stages = std::min((kCapacity - p.k.stages * p.k.stage_bytes) / p.v.stage_bytes, kMaxQuantizedStages);
  assert(p.v.stages > 1);
}

template <class Element, AttentionConfig kAttention>
void launch_compressed(const CompressedParams& params, int clusters, Stream stream) {
  for_compressed_slices<kAttention>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (params.slices != kSlices) return;
    using S = CompressedConfig<Element, kAttention, kSlices>;
    CompressedParams p = params;
    set_stages<S>(p);
    cuda::PdlLaunch launch(clusters * kSlices, S::kThreads, kMaxSharedBytes, stream);
    if (kSlices > 1) launch.set_cluster_size(kSlices);
    check_cuda(cudaLaunchKernelEx(&launch.config, compressed_kernel<S>, p),
               "sm90_attention's decode of a compressed cache");
  });
}

template <class Element, AttentionConfig kAttention>
int compressed_clusters(int slices) {
  int count = 0;
  for_compressed_slices<kAttention>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (slices != kSlices) return;
    using S = CompressedConfig<Element, kAttention, kSlices>;
    cuda::PdlLaunch launch(kSlices, S::kThreads, kMaxSharedBytes, Stream{});
    launch.set_cluster_size(kSlices);
    launch.config.attrs = launch.attributes + 1;  // the query accepts only the cluster attribute
    launch.config.numAttrs = 1;
    check_cuda(cudaOccupancyMaxActiveClusters(&count, compressed_kernel<S>, &launch.config),
               "cudaOccupancyMaxActiveClusters");
  });
  return count;
}

template <class Element, AttentionConfig kAttention>
constexpr CompressedLauncher compressed_launcher() {
  return {prepare_compressed<Element, kAttention>, launch_whole<Element, kAttention>,
          launch_compressed<Element, kAttention>, compressed_clusters<Element, kAttention>};
}

}  // namespace ringattn::sm90
