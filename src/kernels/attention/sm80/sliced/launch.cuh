// SPDX-License-Identifier: Apache-2.0
// Turns a configuration with slices into a kernel and its launch. attention_*_512.cu and attention_*_576.cu instantiate
// it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/attention/sm80/attention.hpp"
#include "kernels/attention/sm80/kernel_config.hpp"
#include "kernels/attention/sm80/sliced/attention.cuh"

namespace ringattn::sm80 {

// Dynamic shared memory of a CTA.
template <class C>
inline constexpr int kSlicedLaunchBytes = cuda::aligned_shared_bytes(ColumnSliceAttentionLayout<C>::kBytes,
                                                                     cuda::kPanelRowBytes);

template <class Element, AttentionConfig kConfig>
void prepare_sliced_attention() {
  using C = KernelConfig<Element, kConfig>;
  constexpr int kBytes = ColumnSliceAttentionLayout<C>::kBytes;
  // With the work tile at most 99 KiB, which every device from sm_80 on provides per CTA.
  static_assert(ColumnSliceLayout<C>::kBytes == kConfig.sliced_bytes() && kBytes == kConfig.shared_bytes());
  static_assert(kSlicedLaunchBytes<C> + 128 <= 99 * 1024);
  check_cuda(cudaFuncSetAttribute(sliced_attention_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kSlicedLaunchBytes<C>),
             "cudaFuncSetAttribute");
}

template <class Element, AttentionConfig kConfig>
void launch_sliced_attention(const cuda::AttentionParams& params, Stream stream) {
  using C = KernelConfig<Element, kConfig>;
  const auto blocks =
      static_cast<unsigned>(params.tables.work_tile_count) * static_cast<unsigned>(params.schedule.entry_heads);
  sliced_attention_kernel<C><<<blocks, C::kThreads, kSlicedLaunchBytes<C>, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention");
}

template <class Element, AttentionConfig kConfig>
constexpr cuda::Launcher sliced_launcher_of() {
  return {prepare_sliced_attention<Element, kConfig>, launch_sliced_attention<Element, kConfig>};
}

}  // namespace ringattn::sm80
