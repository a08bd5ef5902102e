// SPDX-License-Identifier: Apache-2.0
// Maps an element type to the MLA decode kernels and their launches. kernels/instances.cmake lists its instantiations.
#pragma once

#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/attention/sm90/hopper_params.hpp"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/mla/sm90/cta_group.cuh"
#include "kernels/mla/sm90/cta_pair.cuh"
#include "kernels/mla/sm90/mla.cuh"
#include "kernels/mla/sm90/mla.hpp"

namespace ringattn::sm90 {

template <class Element_, bool kFp8_, int kCtas_>
struct MlaConfig {
  using Element = Element_;
  using KvSplits = LaunchKvSplits;
  static constexpr bool kFp8 = kFp8_;  // FP8 latent cache
  using Params = std::conditional_t<kFp8, MlaFp8Params, MlaParams>;
  static constexpr int kCtas = kCtas_;  // per cluster, one row block each
  static constexpr int kKeyTile = kMlaKeyTile;
  static constexpr int kDimV = kLatentDimV;
  static constexpr int kColumns = kLatentDimV / 2;  // output columns per warpgroup
};

// Calls with(MlaConfig()) for each cluster size of mla_kernel. There is no cluster of four: GPCs whose number of SMs is
// not a multiple of four would leave SMs idle.
template <class Element, bool kFp8, class With>
void for_mla_configs(With with) {
  with(MlaConfig<Element, kFp8, 1>());
  with(MlaConfig<Element, kFp8, 2>());
}

template <class Element_, bool kFp8_>
struct CtaPairConfig {
  using Element = Element_;
  using KvSplits = LaunchKvSplits;
  static constexpr bool kFp8 = kFp8_;
  using Params = std::conditional_t<kFp8, MlaFp8Params, MlaParams>;
  static constexpr int kKeyTile = kMlaKeyTile;
  static constexpr int kDimV = kLatentDimV;
};

// Max. co-resident clusters of `ctas` CTAs on the current device.
template <class Kernel>
int max_active_clusters(Kernel kernel, int ctas, int shared_bytes) {
  cuda::PdlLaunch launch(ctas, kMlaThreads, shared_bytes, Stream{});
  launch.set_cluster_size(ctas);
  // Skips the PDL attribute: the occupancy query accepts only the cluster size.
  launch.config.attrs = launch.attributes + 1;
  launch.config.numAttrs = 1;
  int count = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config);
  if (error == cudaErrorInvalidClusterSize) {  // a MIG slice may be too small for any
    cudaGetLastError();
    return 0;
  }
  check_cuda(error, "cudaOccupancyMaxActiveClusters");
  return count;
}

template <class Element_, int kCtas>
struct CtaGroupConfig {
  using Element = Element_;
  using KvSplits = LaunchKvSplits;
  using Map = CtaGroupMap<kCtas>;
  static constexpr int kKeyTile = kMlaKeyTile;
  static constexpr int kDimV = kLatentDimV;
};

template <class Element, bool kFp8>
int mla_clusters(int ctas) {
  int count = 0;
  for_mla_configs<Element, kFp8>([&]<class C>(C) {
    if (C::kCtas != ctas) return;
    count = max_active_clusters(mla_kernel<C>, C::kCtas, MlaMap::kBytes);
  });
  return count;
}

template <class Element, bool kFp8, class Params>
void launch_mla(const Params& params, int ctas, int clusters, Stream stream) {
  for_mla_configs<Element, kFp8>([&]<class C>(C) {
    if (C::kCtas != ctas) return;
    cuda::PdlLaunch launch(clusters * C::kCtas, kMlaThreads, MlaMap::kBytes, stream);
    if (C::kCtas > 1) launch.set_cluster_size(C::kCtas);
    check_cuda(cudaLaunchKernelEx(&launch.config, mla_kernel<C>, params), "decoding over latents");
  });
}

// Calls with(kernel, shared-memory bytes) for the kernel whose clusters of `ctas` CTAs share row blocks, if there is
// one.
template <class Element, bool kFp8, class With>
void with_cta_group_kernel(int ctas, With with) {
  using C = CtaPairConfig<Element, kFp8>;
  if (ctas == 2) with(cta_pair_kernel<C>, int{CtaPairMap::kBytes});
  if constexpr (!kFp8) {
    using Three = CtaGroupConfig<Element, 3>;
    using Four = CtaGroupConfig<Element, 4>;
    if (ctas == 3 || ctas == 6) with(cta_group_kernel<Three>, int{Three::Map::kBytes});
    if (ctas == 4 || ctas == 8) with(cta_group_kernel<Four>, int{Four::Map::kBytes});
  }
}

template <class Element, bool kFp8>
void prepare_mla() {
  check_device();
  const auto allow = [](auto kernel, int bytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
  };
  for (const int ctas : {2, 3, 4}) with_cta_group_kernel<Element, kFp8>(ctas, allow);
  for_mla_configs<Element, kFp8>([&]<class C>(C) { allow(mla_kernel<C>, MlaMap::kBytes); });
}

template <class Element, bool kFp8>
int mla_cta_group_clusters(int ctas) {
  int count = 0;
  with_cta_group_kernel<Element, kFp8>(
      ctas, [&](auto kernel, int bytes) { count = max_active_clusters(kernel, ctas, bytes); });
  return count;
}

template <class Element, bool kFp8, class Params>
void launch_mla_cta_groups(const Params& params, int ctas, int clusters, Stream stream) {
  with_cta_group_kernel<Element, kFp8>(ctas, [&](auto kernel, int bytes) {
    cuda::PdlLaunch launch(ctas * clusters, kMlaThreads, bytes, stream);
    launch.set_cluster_size(ctas);
    check_cuda(cudaLaunchKernelEx(&launch.config, kernel, params), "decoding over latents");
  });
}

template <class Element, bool kFp8>
constexpr auto mla_launcher() {
  using Params = typename CtaPairConfig<Element, kFp8>::Params;
  return MlaLauncher<Params>{prepare_mla<Element, kFp8>, mla_clusters<Element, kFp8>, launch_mla<Element, kFp8, Params>,
                             mla_cta_group_clusters<Element, kFp8>, launch_mla_cta_groups<Element, kFp8, Params>};
}

}  // namespace ringattn::sm90
