// SPDX-License-Identifier: Apache-2.0
// Launches of sm80_ssd_backward for one element type, head_dim and state_dim. kernels/instances.cmake lists its
// instantiations.
#pragma once

#include "kernels/ssd_backward/sm80/ssd_gate.cuh"

namespace ringattn::sm80 {

template <class Kernel, class Params>
void launch_ssd_backward(Kernel kernel, int ctas, int threads, int bytes, const Params& params, cudaStream_t stream) {
  kernel<<<static_cast<unsigned>(ctas), static_cast<unsigned>(threads), static_cast<std::size_t>(bytes), stream>>>(
      params);
  check_cuda(cudaGetLastError(), "sm80_ssd_backward");
}

template <class Element, int kDims, int kStates, bool kExpand>
void launch_states(const SsdStatesParams& given, bool reversed, int segments, int /*multiprocessors*/,
                   cudaStream_t stream) {
  using Shape = SsdStatesShape<kDims, kStates>;
  SsdStatesParams params = given;
  params.blocks = cuda::head_blocks(params.scan, Shape::kHeads);
  const auto kernel = reversed ? ssd_states_kernel<Element, kDims, kStates, true, kExpand>
                               : ssd_states_kernel<Element, kDims, kStates, false, kExpand>;
  launch_ssd_backward(kernel, params.blocks * segments, Shape::kThreads, Shape::kBytes, params, stream);
}

template <class Element, int kDims, int kStates>
constexpr SsdBackwardLauncher ssd_backward_launcher() {
  using States = SsdStatesShape<kDims, kStates>;
  using Rows = SsdRowsShape<kDims, kStates>;
  using Gate = SsdGateShape<kDims, kStates>;
  return {[] {
            cuda::allow_shared(ssd_states_kernel<Element, kDims, kStates, false, false>, States::kBytes);
            cuda::allow_shared(ssd_states_kernel<Element, kDims, kStates, false, true>, States::kBytes);
            cuda::allow_shared(ssd_states_kernel<Element, kDims, kStates, true, false>, States::kBytes);
            cuda::allow_shared(ssd_states_kernel<Element, kDims, kStates, true, true>, States::kBytes);
            cuda::allow_shared(ssd_rows_kernel<Element, kDims, kStates>, Rows::kBytes);
            cuda::allow_shared(ssd_gate_kernel<Element, kDims, kStates>, Gate::kBytes);
          },
          [](const SsdStatesParams& params, bool reversed, int multiprocessors, cudaStream_t stream) {
            launch_states<Element, kDims, kStates, false>(params, reversed, params.scan.segments, multiprocessors,
                                                          stream);
          },
          [](const SsdStatesParams&, const cuda::SsmTensor&, int, cudaStream_t) { return false; },
          launch_states<Element, kDims, kStates, true>,
          [](const SsdRowsParams& given, int segments, cudaStream_t stream) {
            SsdRowsParams params = given;
            params.blocks = cuda::head_blocks(params.scan, params.set_heads);
            launch_ssd_backward(ssd_rows_kernel<Element, kDims, kStates>, params.blocks * kChunksOfSegment * segments,
                                Rows::kThreads, Rows::kBytes, params, stream);
          },
          [](const SsdGateParams& given, int segments, int /*multiprocessors*/, cudaStream_t stream) {
            SsdGateParams params = given;
            params.blocks = cuda::head_blocks(params.scan, params.set_heads);
            launch_ssd_backward(ssd_gate_kernel<Element, kDims, kStates>, params.blocks * kChunksOfSegment * segments,
                                Gate::kThreads, Gate::kBytes, params, stream);
          }};
}

}  // namespace ringattn::sm80
