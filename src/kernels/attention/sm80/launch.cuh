// SPDX-License-Identifier: Apache-2.0
// Turns a configuration into a kernel and its launch. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "kernels/attention/sm80/attention.cuh"
#include "kernels/attention/sm80/attention.hpp"
#include "kernels/attention/sm80/kernel_config.hpp"

namespace ringattn::sm80 {

template <class Element, AttentionConfig kConfig, bool kPositions>
void prepare_attention() {
  using C = KernelConfig<Element, kConfig, kPositions>;
  // With the work tile at most 99 KiB, which every device from sm_80 on provides per CTA.
  static_assert(SharedLayout<C>::kBytes == kConfig.shared_bytes());
  static_assert(SharedLayout<C>::kBytes + 128 <= 99 * 1024);
  check_cuda(
      cudaFuncSetAttribute(attention_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedLayout<C>::kBytes),
      "cudaFuncSetAttribute");
}

template <class Element, AttentionConfig kConfig, bool kPositions>
void launch_attention(const cuda::AttentionParams& params, Stream stream) {
  using C = KernelConfig<Element, kConfig, kPositions>;
  const auto blocks =
      static_cast<unsigned>(params.tables.work_tile_count) * static_cast<unsigned>(params.schedule.entry_heads);
  attention_kernel<C><<<blocks, C::kThreads, SharedLayout<C>::kBytes, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention");
}

template <class Element, AttentionConfig kConfig, bool kPositions = false>
constexpr cuda::Launcher launcher_of() {
  return {prepare_attention<Element, kConfig, kPositions>, launch_attention<Element, kConfig, kPositions>};
}

}  // namespace ringattn::sm80
