// SPDX-License-Identifier: Apache-2.0
// Turns GEMM parameters into a kernel and its launch. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "kernels/gemm/sm80/gemm.cuh"
#include "kernels/gemm/sm80/gemm.hpp"

namespace ringattn::sm80 {

template <class C>
void prepare_kernel() {
  check_cuda(cudaFuncSetAttribute(gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <class C>
void launch_kernel(const cuda::GemmParams& p, Stream stream) {
  const auto tiles = static_cast<unsigned>(cuda::gemm_tiles(p, C::kRows));
  gemm_kernel<C><<<tiles, C::kThreads, C::kSharedBytes, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "sm80_gemm");
}

template <class Element>
void prepare_gemm() {
  prepare_kernel<GemmKernel<Element, kFewRowsConfig, false>>();
  prepare_kernel<GemmKernel<Element, kFewRowsConfig, true>>();
  prepare_kernel<GemmKernel<Element, kManyRowsConfig, false>>();
  prepare_kernel<GemmKernel<Element, kManyRowsConfig, true>>();
}

template <class Element>
void launch_gemm(const cuda::GemmParams& p, Stream stream) {
  if (p.row_count <= kFewRows) {
    p.transposed ? launch_kernel<GemmKernel<Element, kFewRowsConfig, true>>(p, stream)
                 : launch_kernel<GemmKernel<Element, kFewRowsConfig, false>>(p, stream);
  } else {
    p.transposed ? launch_kernel<GemmKernel<Element, kManyRowsConfig, true>>(p, stream)
                 : launch_kernel<GemmKernel<Element, kManyRowsConfig, false>>(p, stream);
  }
}

template <class Element>
constexpr cuda::GemmLauncher gemm_launcher() {
  return {prepare_gemm<Element>, launch_gemm<Element>};
}

}  // namespace ringattn::sm80
