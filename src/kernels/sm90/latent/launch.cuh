// SPDX-License-Identifier: Apache-2.0
// From an element type to the kernels and their launch; the latent_*.cu files instantiate it.
#pragma once

#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/sm90/fold/hopper_params.hpp"
#include "kernels/sm90/latent/latent.cuh"
#include "kernels/sm90/latent/latent.hpp"
#include "kernels/sm90/latent/pair.cuh"

namespace ringattn::sm90 {

template <class Element_, bool kCodes_, int kCtas_>
struct LatentConfig {
  using Element = Element_;
  static constexpr bool kCodes = kCodes_;  // latents of 8 bits
  using Params = std::conditional_t<kCodes, LatentCodeParams, DecodeParams>;
  static constexpr int kCtas = kCtas_;  // of a cluster, each with a block of rows
  static constexpr int kKeyTile = kLatentTile;
  static constexpr int kDimV = kLatentDimV;
  static constexpr int kColumns = kLatentDimV / 2;  // of a warpgroup
};

// Calls with(LatentConfig()) for every form of the kernel. Clusters of four would be fewer than a quarter of the
// multiprocessors: some parts of the device have a number of them that is no multiple of four.
template <class Element, bool kCodes, class With>
void for_latent_configs(With with) {
  with(LatentConfig<Element, kCodes, 1>());
  with(LatentConfig<Element, kCodes, 2>());
}

template <class Element_, bool kCodes_>
struct PairConfig {
  using Element = Element_;
  static constexpr bool kCodes = kCodes_;
  using Params = std::conditional_t<kCodes, LatentCodeParams, DecodeParams>;
  static constexpr int kKeyTile = kLatentTile;
  static constexpr int kDimV = kLatentDimV;
};

template <class Element, bool kCodes>
void prepare_latent() {
  check_device();
  check_cuda(cudaFuncSetAttribute(pair_kernel<PairConfig<Element, kCodes>>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  int{PairMap::kBytes}),
             "cudaFuncSetAttribute");
  for_latent_configs<Element, kCodes>([]<class C>(C) {
    check_cuda(
        cudaFuncSetAttribute(latent_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{LatentMap::kBytes}),
        "cudaFuncSetAttribute");
  });
}

// `cluster` must live as long as what is returned.
template <class C>
cudaLaunchConfig_t latent_launch(int clusters, cudaLaunchAttribute& cluster) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {C::kCtas, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = static_cast<unsigned>(clusters * C::kCtas);
  launch.blockDim = kLatentThreads;
  launch.dynamicSmemBytes = LatentMap::kBytes;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  return launch;
}

template <class Element, bool kCodes>
int latent_clusters(int ctas) {
  int count = 0;
  for_latent_configs<Element, kCodes>([&]<class C>(C) {
    if (C::kCtas != ctas) return;
    cudaLaunchAttribute cluster{};
    const cudaLaunchConfig_t launch = latent_launch<C>(1, cluster);
    check_cuda(cudaOccupancyMaxActiveClusters(&count, latent_kernel<C>, &launch), "cudaOccupancyMaxActiveClusters");
  });
  return count;
}

template <class Element, bool kCodes, class Params>
void launch_latent(const Params& params, int ctas, int clusters, Stream stream) {
  for_latent_configs<Element, kCodes>([&]<class C>(C) {
    if (C::kCtas != ctas) return;
    cudaLaunchAttribute cluster{};
    cudaLaunchConfig_t launch = latent_launch<C>(clusters, cluster);
    launch.stream = cuda_stream(stream);
    check_cuda(cudaLaunchKernelEx(&launch, latent_kernel<C>, params), "sm90_latent");
  });
}

// `cluster` must live as long as what is returned.
inline cudaLaunchConfig_t pair_launch(int pairs, cudaLaunchAttribute& cluster) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = static_cast<unsigned>(2 * pairs);
  launch.blockDim = kLatentThreads;
  launch.dynamicSmemBytes = PairMap::kBytes;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  return launch;
}

template <class Element, bool kCodes>
int latent_pairs() {
  int count = 0;
  cudaLaunchAttribute cluster{};
  const cudaLaunchConfig_t launch = pair_launch(1, cluster);
  check_cuda(cudaOccupancyMaxActiveClusters(&count, pair_kernel<PairConfig<Element, kCodes>>, &launch),
             "cudaOccupancyMaxActiveClusters");
  return count;
}

template <class Element, bool kCodes, class Params>
void launch_latent_pairs(const Params& params, int pairs, Stream stream) {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t launch = pair_launch(pairs, cluster);
  launch.stream = cuda_stream(stream);
  check_cuda(cudaLaunchKernelEx(&launch, pair_kernel<PairConfig<Element, kCodes>>, params), "sm90_latent");
}

template <class Element, bool kCodes>
constexpr auto latent_launcher() {
  using Params = typename PairConfig<Element, kCodes>::Params;
  return LatentLauncher<Params>{prepare_latent<Element, kCodes>, latent_clusters<Element, kCodes>,
                                launch_latent<Element, kCodes, Params>, latent_pairs<Element, kCodes>,
                                launch_latent_pairs<Element, kCodes, Params>};
}

}  // namespace ringattn::sm90
