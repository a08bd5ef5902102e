// SPDX-License-Identifier: Apache-2.0
// From a configuration to a kernel and its launch; the fold_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/sm80/fold.cuh"
#include "kernels/sm80/fold.hpp"
#include "kernels/sm80/kernel_config.hpp"

namespace ringattn::sm80 {

template <class Element, FoldConfig kConfig, bool kPositions>
void prepare_fold() {
  using C = KernelConfig<Element, kConfig, kPositions>;
  // With the work item no more than 99 KiB: what a CTA gets on every device from sm_80 on.
  static_assert(SharedLayout<C>::kBytes == kConfig.shared_bytes());
  static_assert(SharedLayout<C>::kBytes + 128 <= 99 * 1024);
  check_cuda(cudaFuncSetAttribute(fold_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedLayout<C>::kBytes),
             "cudaFuncSetAttribute");
}

template <class Element, FoldConfig kConfig, bool kPositions>
void launch_fold(const cuda::FoldParams& params, Stream stream) {
  using C = KernelConfig<Element, kConfig, kPositions>;
  const auto blocks =
      static_cast<unsigned>(params.tables.item_count) * static_cast<unsigned>(params.schedule.piece_heads);
  fold_kernel<C><<<blocks, C::kThreads, SharedLayout<C>::kBytes, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_fold");
}

template <class Element, FoldConfig kConfig, bool kPositions = false>
constexpr cuda::Launcher launcher_of() {
  return {prepare_fold<Element, kConfig, kPositions>, launch_fold<Element, kConfig, kPositions>};
}

}  // namespace ringattn::sm80
