// SPDX-License-Identifier: Apache-2.0
// Chooses and launches the kernel of a GEMM. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "kernels/gemm/sm90/gemm.cuh"
#include "kernels/gemm/sm90/gemm.hpp"

namespace ringattn::sm90 {

template <class C>
void prepare_kernel() {
  check_cuda(cudaFuncSetAttribute(gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <class C>
void launch_kernel(const HopperGemm& params, Stream stream) {
  const cuda::GemmParams& p = params.gemm;
  const std::int64_t tiles = cuda::gemm_tiles(p, C::kRows);
  const std::int64_t max_ctas = std::int64_t{p.multiprocessors} * C::kCtas;
  gemm_kernel<C><<<static_cast<unsigned>(tiles < max_ctas ? tiles : max_ctas), C::kThreads, C::kSharedBytes,
                   cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm90_gemm");
}

// For both layouts of the weights.
template <class Element, GemmConfig kConfig>
void prepare_config() {
  prepare_kernel<GemmKernel<Element, kConfig, false>>();
  prepare_kernel<GemmKernel<Element, kConfig, true>>();
}
template <class Element, GemmConfig kConfig>
void launch_config(const cuda::GemmParams& p, Stream stream) {
  const HopperGemm params = kConfig.producer_warps == 1 ? map_gemm(p, kConfig) : HopperGemm{p, {}, {}};
  p.transposed ? launch_kernel<GemmKernel<Element, kConfig, true>>(params, stream)
               : launch_kernel<GemmKernel<Element, kConfig, false>>(params, stream);
}

template <class Element>
void prepare_gemm() {
  prepare_config<Element, kSmallMConfig>();
  prepare_config<Element, kMediumMConfig>();
  prepare_config<Element, kLargeMConfig>();
  prepare_config<Element, kUnalignedConfig>();
}

template <class Element>
void launch_gemm(const cuda::GemmParams& p, Stream stream) {
  if (!can_map_gemm(p)) return launch_config<Element, kUnalignedConfig>(p, stream);
  const GemmConfig& config = choose_gemm(p);
  if (&config == &kSmallMConfig) return launch_config<Element, kSmallMConfig>(p, stream);
  if (&config == &kMediumMConfig) return launch_config<Element, kMediumMConfig>(p, stream);
  launch_config<Element, kLargeMConfig>(p, stream);
}

template <class Element>
constexpr cuda::GemmLauncher gemm_launcher() {
  return {prepare_gemm<Element>, launch_gemm<Element>};
}

}  // namespace ringattn::sm90
