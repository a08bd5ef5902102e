// SPDX-License-Identifier: Apache-2.0
// From a product's parameters to a kernel and its launch; the gemm_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/sm90/product/gemm.cuh"
#include "kernels/sm90/product/gemm.hpp"

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
  const std::int64_t most = std::int64_t{p.multiprocessors} * C::kCtas;
  gemm_kernel<C>
      <<<static_cast<unsigned>(tiles < most ? tiles : most), C::kThreads, C::kSharedBytes, cuda_stream(stream)>>>(
          params);
  check_cuda(cudaGetLastError(), "sm90_gemm");
}

// The matrices either way round.
template <class Element, GemmConfig kConfig>
void prepare_config() {
  prepare_kernel<GemmKernel<Element, kConfig, false>>();
  prepare_kernel<GemmKernel<Element, kConfig, true>>();
}
template <class Element, GemmConfig kConfig>
void launch_config(const cuda::GemmParams& p, Stream stream) {
  const HopperGemm params = kConfig.fetch_warps == 1 ? map_gemm(p, kConfig) : HopperGemm{p, {}, {}};
  p.transposed ? launch_kernel<GemmKernel<Element, kConfig, true>>(params, stream)
               : launch_kernel<GemmKernel<Element, kConfig, false>>(params, stream);
}

template <class Element>
void prepare_gemm() {
  prepare_config<Element, kFewRowsConfig>();
  prepare_config<Element, kSomeRowsConfig>();
  prepare_config<Element, kManyRowsConfig>();
  prepare_config<Element, kUnalignedConfig>();
}

template <class Element>
void launch_gemm(const cuda::GemmParams& p, Stream stream) {
  if (!can_map_gemm(p)) return launch_config<Element, kUnalignedConfig>(p, stream);
  const GemmConfig& config = choose_gemm(p);
  if (&config == &kFewRowsConfig) return launch_config<Element, kFewRowsConfig>(p, stream);
  if (&config == &kSomeRowsConfig) return launch_config<Element, kSomeRowsConfig>(p, stream);
  launch_config<Element, kManyRowsConfig>(p, stream);
}

template <class Element>
constexpr cuda::GemmLauncher gemm_launcher() {
  return {prepare_gemm<Element>, launch_gemm<Element>};
}

}  // namespace ringattn::sm90
