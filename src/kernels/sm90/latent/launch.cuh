// SPDX-License-Identifier: Apache-2.0
// From an element type to the kernels and their launch; the latent_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/sm90/fold/hopper_params.hpp"
#include "kernels/sm90/latent/latent.cuh"
#include "kernels/sm90/latent/latent.hpp"

namespace ringattn::sm90 {

template <class Element_, int kSlices_>
struct LatentConfig {
  using Element = Element_;
  static constexpr int kSlices = kSlices_;
  static constexpr int kKeyTile = kLatentTile;
  static constexpr int kDimV = kLatentDimV;
  static constexpr int kColumns = kLatentDimV / 2 / kSlices;  // of a warpgroup
};

template <class Element>
void prepare_latent() {
  check_device();
  check_cuda(cudaFuncSetAttribute(latent_kernel<LatentConfig<Element, 1>>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  int{LatentMap::kBytes}),
             "cudaFuncSetAttribute");
  check_cuda(cudaFuncSetAttribute(latent_kernel<LatentConfig<Element, 2>>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  int{LatentMap::kBytes}),
             "cudaFuncSetAttribute");
}

template <class Element>
void launch_latent(const DecodeParams& params, int ctas, Stream stream) {
  const auto kernel =
      params.slices == 1 ? latent_kernel<LatentConfig<Element, 1>> : latent_kernel<LatentConfig<Element, 2>>;
  kernel<<<static_cast<unsigned>(ctas), kLatentThreads, LatentMap::kBytes, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm90_latent");
}

template <class Element>
constexpr LatentLauncher latent_launcher() {
  return {prepare_latent<Element>, launch_latent<Element>};
}

}  // namespace ringattn::sm90
