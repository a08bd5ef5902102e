// SPDX-License-Identifier: Apache-2.0
// Turns a configuration into a kernel and its launch. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/attention/sm80/attention.cuh"
#include "kernels/attention/sm80/attention.hpp"
#include "kernels/attention/sm80/kernel_config.hpp"

namespace ringattn::sm80 {

// Dynamic shared memory of a CTA.
template <class C>
inline constexpr int kAttentionLaunchBytes = cuda::aligned_shared_bytes(SharedLayout<C>::kBytes, cuda::kPanelRowBytes);

template <class Element, AttentionConfig kConfig, bool kPositions>
void prepare_attention() {
  using C = KernelConfig<Element, kConfig, kPositions>;
  // With the work tile at most 99 KiB, which every device from sm_80 on provides per CTA.
  static_assert(SharedLayout<C>::kBytes == kConfig.shared_bytes());
  static_assert(kAttentionLaunchBytes<C> + 128 <= 99 * 1024);
  if constexpr (!kRoundsUp<C>) {
    // The dynamic array follows the static shared memory.
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, attention_kernel<C>), "cudaFuncGetAttributes");
    if (attributes.sharedSizeBytes % cuda::kPanelRowBytes != 0) {
      fail(ErrorCode::kUnsupported, "sm80_attention with head_dim 96",
           "it was compiled with options that ignore the alignment of shared memory", "Compile it without -Ofc.");
    }
  }
  check_cuda(
      cudaFuncSetAttribute(attention_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionLaunchBytes<C>),
      "cudaFuncSetAttribute");
}

template <class Element, AttentionConfig kConfig, bool kPositions>
void launch_attention(const cuda::AttentionParams& params, Stream stream) {
  using C = KernelConfig<Element, kConfig, kPositions>;
  const auto blocks =
      static_cast<unsigned>(params.tables.work_tile_count) * static_cast<unsigned>(params.schedule.entry_heads);
  attention_kernel<C><<<blocks, C::kThreads, kAttentionLaunchBytes<C>, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention");
}

template <class Element, AttentionConfig kConfig, bool kPositions = false>
constexpr cuda::Launcher launcher_of() {
  return {prepare_attention<Element, kConfig, kPositions>, launch_attention<Element, kConfig, kPositions>};
}

}  // namespace ringattn::sm80
