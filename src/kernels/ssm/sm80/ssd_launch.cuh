// SPDX-License-Identifier: Apache-2.0
// Launches of sm80_ssd for one element type and state_dim. kernels/instances.cmake lists its instantiations.
#pragma once

#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/ssm/sm80/ssd_output.cuh"

namespace ringattn::sm80 {

// Max. dynamic shared memory of a CTA, in bytes.
inline int max_shared(int device) {
  int shared = 0;
  check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return shared;
}

// Chooses the most heads, then the most stages, that shared memory and max_threads allow. One head and one stage always
// fit: ssd_missing() has checked.
inline SsdShape shape_of(const SsmParams& p, int state_columns, bool with_outputs, int max_threads, int device) {
  const int shared = max_shared(device);
  SsdShape shape;
  shape.warps = (p.head_dim + kWarpDims - 1) / kWarpDims;
  for (int heads = std::min({kMaxHeadsPerCta, p.group_heads, max_threads / 32 / shape.warps}); heads > 0; --heads) {
    for (const int stages : {2, 1}) {
      shape.heads = heads;
      shape.stages = stages;
      if (layout_of(shape, state_columns, with_outputs).total <= shared) return shape;
    }
  }
  return shape;
}

// Loads a kernel onto the current device, and allows it all shared memory that a CTA can have. A launch requests what
// its shape needs.
template <class Kernel>
void load_ssd(Kernel kernel) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared(device)),
             "cudaFuncSetAttribute");
}

template <class Kernel>
void launch_ssd(Kernel kernel, const SsmParams& p, int state_columns, bool with_outputs, int max_threads, int device,
                cudaStream_t stream) {
  SsdParams params{p, shape_of(p, state_columns, with_outputs, max_threads, device), {}, 0};
  const SsdShape& shape = params.shape;
  params.blocks = head_blocks(p, shape.heads);
  params.layout = layout_of(shape, state_columns, with_outputs);
  const int bytes = params.layout.total;
  const auto ctas = static_cast<unsigned>(params.blocks) * static_cast<unsigned>(p.segments);
  kernel<<<ctas, static_cast<unsigned>(shape.heads * shape.warps * 32), static_cast<std::size_t>(bytes), stream>>>(
      params);
  check_cuda(cudaGetLastError(), "sm80_ssd");
}

template <class Element, int kStates>
constexpr SsdLauncher ssd_launcher() {
  return {
      [] {
        load_ssd(ssd_state_kernel<Element, kStates>);
        load_ssd(ssd_finish_kernel<Element, kStates>);
      },
      [](const SsmParams& p, int device, cudaStream_t stream) {
        launch_ssd(ssd_state_kernel<Element, kStates>, p, kStates, false, state_threads<kStates>(), device, stream);
      },
      [](const SsmParams& p, int device, cudaStream_t stream) {
        launch_ssd(ssd_finish_kernel<Element, kStates>, p, kStates, true, finish_threads<kStates>(), device, stream);
      },
      [](int head_dim) {
        return static_cast<std::size_t>(layout_of({1, (head_dim + kWarpDims - 1) / kWarpDims, 1}, kStates, true).total);
      }};
}

}  // namespace ringattn::sm80
