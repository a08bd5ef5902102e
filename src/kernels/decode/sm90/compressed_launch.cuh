// SPDX-License-Identifier: Apache-2.0
// Kernel traits and launch of the decode kernels over quantized caches. kernels/instances.cmake lists its
// instantiations.
#pragma once

#include <algorithm>
#include <cassert>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/decode/sm90/compressed.cuh"
#include "kernels/decode/sm90/compressed.hpp"

namespace ringattn::sm90 {

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
