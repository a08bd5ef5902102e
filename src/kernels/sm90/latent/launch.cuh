// SPDX-License-Identifier: Apache-2.0
// From an element type to the kernels and their launch; the latent_*.cu files instantiate it.
#pragma once

#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/cuda/device/overlapping_launch.hpp"
#include "kernels/sm90/fold/hopper_params.hpp"
#include "kernels/sm90/latent/latent.cuh"
#include "kernels/sm90/latent/latent.hpp"
#include "kernels/sm90/latent/pair.cuh"
#include "kernels/sm90/latent/team.cuh"

namespace ringattn::sm90 {

template <class Element_, bool kCodes_, int kCtas_>
struct LatentConfig {
  using Element = Element_;
  using Groups = LaunchedGroups;
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
  using Groups = LaunchedGroups;
  static constexpr bool kCodes = kCodes_;
  using Params = std::conditional_t<kCodes, LatentCodeParams, DecodeParams>;
  static constexpr int kKeyTile = kLatentTile;
  static constexpr int kDimV = kLatentDimV;
};

// How many clusters of so many CTAs the current device holds at a time.
template <class Kernel>
int clusters_at_a_time(Kernel kernel, int ctas, int shared_bytes) {
  cuda::OverlappingLaunch launch(ctas, kLatentThreads, shared_bytes, Stream{});
  launch.in_clusters_of(ctas);
  launch.config.attrs = launch.attributes + 1;  // this question is asked of the clusters alone
  launch.config.numAttrs = 1;
  int count = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config);
  if (error == cudaErrorInvalidClusterSize) {  // a part of a device may be too small for any
    cudaGetLastError();
    return 0;
  }
  check_cuda(error, "cudaOccupancyMaxActiveClusters");
  return count;
}

template <class Element_, int kCtas>
struct TeamConfig {
  using Element = Element_;
  using Groups = LaunchedGroups;
  using Map = TeamMap<kCtas>;
  static constexpr int kKeyTile = kLatentTile;
  static constexpr int kDimV = kLatentDimV;
};

template <class Element, bool kCodes>
int latent_clusters(int ctas) {
  int count = 0;
  for_latent_configs<Element, kCodes>([&]<class C>(C) {
    if (C::kCtas != ctas) return;
    count = clusters_at_a_time(latent_kernel<C>, C::kCtas, LatentMap::kBytes);
  });
  return count;
}

template <class Element, bool kCodes, class Params>
void launch_latent(const Params& params, int ctas, int clusters, Stream stream) {
  for_latent_configs<Element, kCodes>([&]<class C>(C) {
    if (C::kCtas != ctas) return;
    cuda::OverlappingLaunch launch(clusters * C::kCtas, kLatentThreads, LatentMap::kBytes, stream);
    if (C::kCtas > 1) launch.in_clusters_of(C::kCtas);
    check_cuda(cudaLaunchKernelEx(&launch.config, latent_kernel<C>, params), "decoding over latents");
  });
}

// Calls with(kernel, bytes of shared memory) for the form of clusters of so many CTAs that share blocks of rows.
template <class Element, bool kCodes, class With>
void with_sharing_kernel(int ctas, With with) {
  using C = PairConfig<Element, kCodes>;
  if (ctas == 2) with(pair_kernel<C>, int{PairMap::kBytes});
  if constexpr (!kCodes) {
    using Three = TeamConfig<Element, 3>;
    using Four = TeamConfig<Element, 4>;
    if (ctas == 3 || ctas == 6) with(team_kernel<Three>, int{Three::Map::kBytes});
    if (ctas == 4 || ctas == 8) with(team_kernel<Four>, int{Four::Map::kBytes});
  }
}

template <class Element, bool kCodes>
void prepare_latent() {
  check_device();
  const auto allow = [](auto kernel, int bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
  };
  for (const int ctas : {2, 3, 4}) with_sharing_kernel<Element, kCodes>(ctas, allow);
  for_latent_configs<Element, kCodes>([&]<class C>(C) { allow(latent_kernel<C>, LatentMap::kBytes); });
}

template <class Element, bool kCodes>
int latent_sharing_clusters(int ctas) {
  int count = 0;
  with_sharing_kernel<Element, kCodes>(
      ctas, [&](auto kernel, int bytes) { count = clusters_at_a_time(kernel, ctas, bytes); });
  return count;
}

template <class Element, bool kCodes, class Params>
void launch_latent_sharing(const Params& params, int ctas, int clusters, Stream stream) {
  with_sharing_kernel<Element, kCodes>(ctas, [&](auto kernel, int bytes) {
    cuda::OverlappingLaunch launch(ctas * clusters, kLatentThreads, bytes, stream);
    launch.in_clusters_of(ctas);
    check_cuda(cudaLaunchKernelEx(&launch.config, kernel, params), "decoding over latents");
  });
}

template <class Element, bool kCodes>
constexpr auto latent_launcher() {
  using Params = typename PairConfig<Element, kCodes>::Params;
  return LatentLauncher<Params>{prepare_latent<Element, kCodes>, latent_clusters<Element, kCodes>,
                                launch_latent<Element, kCodes, Params>, latent_sharing_clusters<Element, kCodes>,
                                launch_latent_sharing<Element, kCodes, Params>};
}

}  // namespace ringattn::sm90
