// SPDX-License-Identifier: Apache-2.0
// Launches of sm90_ssd_backward for one state_dim. kernels/instances.cmake lists its instantiations.
#pragma once

#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/ssd_backward/sm80/launch.cuh"
#include "kernels/ssd_backward/sm90/ssd_rows.cuh"

namespace ringattn::sm90 {

template <int kStates>
void launch_rows(const cuda::SsdRowsParams& given, int segments, cudaStream_t stream) {
  HopperSsdRows p{};
  p.rows = given;
  const cuda::SsmParams& s = given.scan;
  p.rows.blocks = cuda::head_blocks(s, given.set_heads);
  const auto map = [&](const cuda::SsmTensor& tensor, CUtensorMap& target) {
    const MappedTensor mapped{tensor.data,   given.rows, s.heads, kRowsDims, given.rows == 1 ? kRowsDims : tensor.token_stride,
                              s.heads == 1 ? kRowsDims : tensor.head_stride};
    if (!can_map(mapped)) return false;
    target = map_tensor(mapped, Dtype::kBf16, kChunk, kRowsDims);
    return true;
  };
  p.maps = map(s.x, p.x) && map(given.g, p.g);
  const auto ctas = static_cast<unsigned>(p.rows.blocks * kChunksOfSegment * segments);
  ssd_rows_kernel<kStates><<<ctas, kRowsThreads, HopperRowsShape<kStates>::kSharedBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "sm90_ssd_backward");
}

template <int kStates>
constexpr cuda::SsdBackwardLauncher ssd_backward_launcher() {
  cuda::SsdBackwardLauncher launcher = sm80::ssd_backward_launcher<Bf16, kRowsDims, kStates>();
  launcher.load = [] {
    sm80::ssd_backward_launcher<Bf16, kRowsDims, kStates>().load();
    sm80::allow_shared(ssd_rows_kernel<kStates>, HopperRowsShape<kStates>::kSharedBytes);
  };
  launcher.rows = launch_rows<kStates>;
  return launcher;
}

}  // namespace ringattn::sm90
