// SPDX-License-Identifier: Apache-2.0
// Launch of a configuration's kernels. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "kernels/attention_backward/sm90/dkv.cuh"
#include "kernels/attention_backward/sm90/dq.cuh"
#include "kernels/attention_backward/sm90/dq_from_ds.cuh"

namespace ringattn::sm90 {

template <class Traits>
constexpr int shared_bytes() {
  return cuda::aligned_shared_bytes(Traits::kShared, kSharedAlignment);
}

template <class Traits, class Params>
void prepare_backward(void (*kernel)(Params)) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<Traits>()),
             "cudaFuncSetAttribute");
}

// Calls use(traits) for the kernel of dK and dV, or for each of the two.
template <class Element, BackwardConfig kConfig, bool kScaledFirst, class Use>
void for_each_dkv(const Use& use) {
  if constexpr (kConfig.has_dkv()) {
    use(DkvTraits<Element, kConfig, kScaledFirst>{});
  } else {
    use(DkvTraits<Element, kConfig, kScaledFirst, KeyGradients::kDk>{});
    use(DkvTraits<Element, kConfig, kScaledFirst, KeyGradients::kDv>{});
  }
}

template <class Element, BackwardConfig kConfig>
void prepare_backward_kernels() {
  prepare_backward<DqTraits<Element, kConfig, false>>(&dq_kernel<DqTraits<Element, kConfig, false>>);
  prepare_backward<DqTraits<Element, kConfig, true>>(&dq_kernel<DqTraits<Element, kConfig, true>>);
  const auto prepare = []<class Traits>(Traits) { prepare_backward<Traits>(&dkv_kernel<Traits>); };
  for_each_dkv<Element, kConfig, false>(prepare);
  for_each_dkv<Element, kConfig, true>(prepare);
  if constexpr (kConfig.spills()) {
    prepare(SpillingDkvTraits<Element, kConfig>{});
    prepare_backward<DqFromDsTraits<Element, kConfig>>(&dq_from_ds_kernel<DqFromDsTraits<Element, kConfig>>);
  }
}

template <class Traits, class Params>
void launch_backward(void (*kernel)(Params), const Params& params, int ctas, Stream stream,
                     int threads = kBackwardThreads) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = static_cast<unsigned>(ctas);
  launch.blockDim = static_cast<unsigned>(threads);
  launch.dynamicSmemBytes = shared_bytes<Traits>();
  launch.stream = cuda_stream(stream);
  check_cuda(cudaLaunchKernelEx(&launch, kernel, params), "sm90_attention_backward");
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
  DkvParams p = params;
  const auto launch = [&]<class Traits>(Traits) {
    launch_backward<Traits>(&dkv_kernel<Traits>, p, ctas, stream);
    ++p.common.tables.taken;
  };
  if constexpr (kConfig.spills()) {
    if (params.common.spill.tiles != nullptr) return launch(SpillingDkvTraits<Element, kConfig>{});
  }
  if (params.common.softmax.scaled_first) return for_each_dkv<Element, kConfig, true>(launch);
  for_each_dkv<Element, kConfig, false>(launch);
}

template <class Element, BackwardConfig kConfig>
void launch_dq_from_ds(const DqFromDsParams& params, int ctas, Stream stream) {
  using Traits = DqFromDsTraits<Element, kConfig>;
  launch_backward<Traits>(&dq_from_ds_kernel<Traits>, params, ctas, stream, kDsThreads);
}

template <class Element, BackwardConfig kConfig>
constexpr BackwardLauncher backward_launcher_of() {
  BackwardLauncher launcher{prepare_backward_kernels<Element, kConfig>, launch_dq<Element, kConfig>,
                            launch_dkv<Element, kConfig>, nullptr};
  if constexpr (kConfig.spills()) launcher.dq_from_ds = launch_dq_from_ds<Element, kConfig>;
  return launcher;
}

}  // namespace ringattn::sm90
