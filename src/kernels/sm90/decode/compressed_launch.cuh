// SPDX-License-Identifier: Apache-2.0
// From a configuration to a decode kernel over compressed caches and its launch; the compressed_*.cu files instantiate
// it.
#pragma once

#include <algorithm>
#include <cassert>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/sm90/decode/compressed.cuh"
#include "kernels/sm90/decode/compressed.hpp"
#include "kernels/sm90/decode/compressed_whole.cuh"

namespace ringattn::sm90 {

// Dims whose codes the sliced kernel's warps share evenly; others are folded by whole_kernel.
template <FoldConfig kFold>
constexpr bool slices_compressed() {
  return kFold.head_dim == kFold.head_dim_v && (kFold.head_dim == 64 || kFold.head_dim == 128);
}

// Calls with(std::integral_constant<int, n>) for the slices that kernels are compiled for: of 32 columns or more.
// With one, a CTA folds a unit by itself.
template <FoldConfig kFold, class With>
void for_compressed_slices(With with) {
  if constexpr (slices_compressed<kFold>()) {
    with(std::integral_constant<int, 1>());
    with(std::integral_constant<int, 2>());
    if constexpr (kFold.head_dim_v >= 128) with(std::integral_constant<int, 4>());
  }
}

template <class Element, FoldConfig kFold>
void prepare_compressed() {
  using C = DecodeConfig<Element, kFold>;
  check_device();
  const auto allow = [](auto* kernel, int bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
  };
  allow(whole_kernel<C>, DecodeMap<C>::kBytes);
  for_compressed_slices<kFold>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    using S = CompressedConfig<Element, kFold, kSlices>;
    allow(compressed_kernel<S>, kMostSharedBytes);
  });
}

template <class Element, FoldConfig kFold>
void launch_whole(const CompressedParams& params, int ctas, Stream stream) {
  using C = DecodeConfig<Element, kFold>;
  const cuda::OverlappingLaunch launch(ctas, kWholeThreads, DecodeMap<C>::kBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, whole_kernel<C>, params), "sm90_fold's decode of a compressed cache");
}

// Stages for what has been fetched: of V as many more as there are slices, for its tiles are so much smaller; at least
// two of K, of which one arrives while the other is read.
template <class C>
void set_stages(CompressedParams& p) {
  constexpr int kRoom = CompressedMap<C>::kPackedRoom;
  const auto bytes = [](const PackedTensor& t) {
    const int rows = C::kKeyTile * (t.row_bytes + (t.number_bytes > 0 ? kNumberPitch : 0));
    return (rows + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
  };
  p.k.stage_bytes = bytes(p.k);
  p.v.stage_bytes = bytes(p.v);
  const int both = p.k.stage_bytes + C::kSlices * p.v.stage_bytes;
  p.k.stages = std::clamp(kRoom / both, 2, kMostPacked);
  p.v.stages = std::min((kRoom - p.k.stages * p.k.stage_bytes) / p.v.stage_bytes, kMostPacked);
  assert(p.v.stages > 1);
}

template <class Element, FoldConfig kFold>
void launch_compressed(const CompressedParams& params, int clusters, Stream stream) {
  for_compressed_slices<kFold>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (params.step.slices != kSlices) return;
    using S = CompressedConfig<Element, kFold, kSlices>;
    CompressedParams p = params;
    set_stages<S>(p);
    cuda::OverlappingLaunch launch(clusters * kSlices, S::kThreads, kMostSharedBytes, stream);
    if (kSlices > 1) launch.in_clusters_of(kSlices);
    check_cuda(cudaLaunchKernelEx(&launch.config, compressed_kernel<S>, p), "sm90_fold's decode of a compressed cache");
  });
}

template <class Element, FoldConfig kFold>
int compressed_clusters(int slices) {
  int count = 0;
  for_compressed_slices<kFold>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (slices != kSlices) return;
    using S = CompressedConfig<Element, kFold, kSlices>;
    cuda::OverlappingLaunch launch(kSlices, S::kThreads, kMostSharedBytes, Stream{});
    launch.in_clusters_of(kSlices);
    launch.config.attrs = launch.attributes + 1;  // this question is asked of the clusters alone
    launch.config.numAttrs = 1;
    check_cuda(cudaOccupancyMaxActiveClusters(&count, compressed_kernel<S>, &launch.config),
               "cudaOccupancyMaxActiveClusters");
  });
  return count;
}

template <class Element, FoldConfig kFold>
constexpr CompressedLauncher compressed_launcher() {
  return {prepare_compressed<Element, kFold>, launch_whole<Element, kFold>, launch_compressed<Element, kFold>,
          compressed_clusters<Element, kFold>};
}

}  // namespace ringattn::sm90
