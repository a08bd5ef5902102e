// SPDX-License-Identifier: Apache-2.0
// Launch of a configuration's kernels. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "kernels/attention_backward/sm80/dkv.cuh"
#include "kernels/attention_backward/sm80/dq.cuh"

namespace ringattn::sm80 {

// The work, its stages, and row stats of dQ.
inline constexpr int kStaticBytes = 1664;
// Dynamic shared memory of a CTA. Together with its static shared memory it is at most 99 KiB, which every device from
// sm_80 on provides.
template <class Traits>
inline constexpr int kBackwardLaunchBytes = cuda::aligned_shared_bytes(Traits::kShared, cuda::kPanelRowBytes);

template <class Traits, class Params>
void prepare_backward(void (*kernel)(Params)) {
  static_assert(kBackwardLaunchBytes<Traits> + kStaticBytes <= 99 * 1024);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBackwardLaunchBytes<Traits>),
             "cudaFuncSetAttribute");
}

template <class Element, BackwardConfig kConfig>
void prepare_backward_kernels() {
  prepare_backward<DqTraits<Element, kConfig, false>>(&dq_kernel<DqTraits<Element, kConfig, false>>);
  prepare_backward<DqTraits<Element, kConfig, true>>(&dq_kernel<DqTraits<Element, kConfig, true>>);
  prepare_backward<DkvTraits<Element, kConfig, false>>(&dkv_kernel<DkvTraits<Element, kConfig, false>>);
  prepare_backward<DkvTraits<Element, kConfig, true>>(&dkv_kernel<DkvTraits<Element, kConfig, true>>);
}

template <class Traits, class Params>
void launch_backward(void (*kernel)(Params), const Params& params, int ctas, Stream stream) {
  kernel<<<static_cast<unsigned>(ctas), Traits::kThreads, kBackwardLaunchBytes<Traits>, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention_backward");
}

template <class Element, BackwardConfig kConfig>
void launch_dq(const DqParams& params, int ctas, Stream stream) {
  using Plain = DqTraits<Element, kConfig, false>;
  using Scaled = DqTraits<Element, kConfig, true>;
  if (params.common.softmax.scaled_first) return launch_backward<Scaled>(&dq_kernel<Scaled>, params, ctas, stream);
  launch_backward<Plain>(&dq_kernel<Plain>, params, ctas, stream);
}

template <class Element, BackwardConfig kConfig>
void launch_dkv(const DkvParams& params, int ctas, Stream stream) {
  using Plain = DkvTraits<Element, kConfig, false>;
  using Scaled = DkvTraits<Element, kConfig, true>;
  if (params.common.softmax.scaled_first) return launch_backward<Scaled>(&dkv_kernel<Scaled>, params, ctas, stream);
  launch_backward<Plain>(&dkv_kernel<Plain>, params, ctas, stream);
}

template <class Element, BackwardConfig kConfig>
constexpr BackwardLauncher backward_launcher_of() {
  return {prepare_backward_kernels<Element, kConfig>, launch_dq<Element, kConfig>, launch_dkv<Element, kConfig>};
}

}  // namespace ringattn::sm80
