// SPDX-License-Identifier: Apache-2.0
// Launches of sm90_ssd_backward for one state_dim. kernels/instances.cmake lists its instantiations.
#pragma once

#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/ssd_backward/sm90/ssd_gate.cuh"
#include "kernels/ssd_backward/sm90/ssd_rows.cuh"
#include "kernels/ssd_backward/sm90/ssd_states.cuh"
#include "kernels/ssm/sm90/launch.cuh"

namespace ringattn::sm90 {

// map_task() is the forward kernels' function. It also maps y, which is x here.
template <int kStates, bool kReversed, bool kExpand>
void launch_states(const cuda::SsdStatesParams& given, int segments, int multiprocessors, cudaStream_t stream) {
  cuda::SsmParams scan = given.scan;
  scan.segments = segments;
  scan.y = const_cast<void*>(scan.x.data);
  scan.y_token_stride = scan.x.token_stride;
  scan.y_head_stride = scan.x.head_stride;
  const HopperSsdStates p{map_task<kStates>(scan, multiprocessors), given.first_segment, given.chunk_states};
  const auto ctas = static_cast<unsigned>(p.ssd.blocks.threes + p.ssd.blocks.shorts) * static_cast<unsigned>(segments);
  const auto kernel = ssd_states_kernel<kStates, kReversed, kExpand>;
  constexpr int kSharedBytes =
      kExpand ? ChunkStateTiles<kStates>::kSharedBytes : SsdLayout<kStates, false>::kSharedBytes;
  if constexpr (kReversed && kExpand) {
    // Its CTAs fill the last wave of the previous kernel, which computes the states of the same batch.
    cuda::PdlLaunch launch(static_cast<int>(ctas), kSsdThreads, kSharedBytes, Stream{stream});
    check_cuda(cudaLaunchKernelEx(&launch.config, kernel, p), "sm90_ssd_backward");
  } else {
    kernel<<<ctas, kSsdThreads, kSharedBytes, stream>>>(p);
    check_cuda(cudaGetLastError(), "sm90_ssd_backward");
  }
}

template <int kStates, bool kExpand>
void launch_states(const cuda::SsdStatesParams& params, bool reversed, int segments, int multiprocessors,
                   cudaStream_t stream) {
  const auto launch = reversed ? launch_states<kStates, true, kExpand> : launch_states<kStates, false, kExpand>;
  launch(params, segments, multiprocessors, stream);
}

// g is stored in `given.scan.x`. Returns false, and launches nothing, if TMA cannot access dy, z or g.
template <int kStates>
bool launch_gated_gradients(const cuda::SsdStatesParams& given, const cuda::SsmTensor& dy, int multiprocessors,
                            cudaStream_t stream) {
  cuda::SsmParams scan = given.scan;
  scan.y = const_cast<void*>(scan.x.data);
  scan.y_token_stride = scan.x.token_stride;
  scan.y_head_stride = scan.x.head_stride;
  scan.x = dy;
  HopperSsd p = map_task<kStates>(scan, multiprocessors);
  std::int64_t rows = 0;
  for (int run = 0; run < scan.run_count; ++run) rows = std::max(rows, scan.runs[run].row + scan.runs[run].tokens);
  const MappedTensor z = mapped(scan.z.data, scan.z.token_stride, scan.z.head_stride, rows, scan.heads, scan.head_dim);
  if (!p.maps_x || !p.maps_y || !map_ssd(z, kDimBlockDims, p.c)) return false;
  const auto ctas = static_cast<unsigned>(p.blocks.threes + p.blocks.shorts) * static_cast<unsigned>(scan.segments);
  ssd_gated_gradients_kernel<kStates><<<ctas, kSsdThreads, GatedGradientTiles<kStates>::kSharedBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "sm90_ssd_backward");
  return true;
}

template <int kStates>
void launch_rows(const cuda::SsdRowsParams& given, int segments, cudaStream_t stream) {
  HopperSsdRows p{};
  p.rows = given;
  const cuda::SsmParams& s = given.scan;
  p.rows.blocks = cuda::head_blocks(s, given.set_heads);
  const auto map = [&](const void* data, std::int64_t token_stride, std::int64_t head_stride, CUtensorMap& target,
                       int box_rows = kChunk) {
    const MappedTensor tensor = mapped(data, token_stride, head_stride, given.rows, s.heads, kRowsDims);
    if (!can_map(tensor)) return false;
    target = map_tensor(tensor, Dtype::kBf16, box_rows, kRowsDims);
    return true;
  };
  p.maps = map(s.x.data, s.x.token_stride, s.x.head_stride, p.x) &&
           map(given.g.data, given.g.token_stride, given.g.head_stride, p.g);
  p.maps_dx = !given.dx.wide && map(given.dx.data, given.dx.token_stride, given.dx.head_stride, p.dx, kRowsOfWarp);
  const auto ctas = static_cast<unsigned>(p.rows.blocks * kChunksOfSegment * segments);
  ssd_rows_kernel<kStates><<<ctas, kRowsThreads, HopperRowsShape<kStates>::kSharedBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "sm90_ssd_backward");
}

template <int kStates>
void launch_gate(const cuda::SsdGateParams& given, int segments, int multiprocessors, cudaStream_t stream) {
  cuda::SsmParams scan = given.scan;
  scan.segments = segments;
  scan.y = given.dz.data;
  scan.y_token_stride = given.dz.token_stride;
  scan.y_head_stride = given.dz.head_stride;
  scan.y_aligned = given.dz.aligned;
  HopperSsdGate p{map_task<kStates>(scan, multiprocessors), {given.dy, given.dz.wide}, given.first_segment};
  p.ssd.maps_y = p.ssd.maps_y && !given.dz.wide;
  const auto ctas = static_cast<unsigned>(p.ssd.blocks.threes + p.ssd.blocks.shorts) * static_cast<unsigned>(segments);
  ssd_gate_kernel<kStates><<<ctas, kSsdThreads, gate_gradient_bytes<kStates>(), stream>>>(p);
  check_cuda(cudaGetLastError(), "sm90_ssd_backward");
}

template <int kStates>
constexpr HopperSsdBackwardLauncher ssd_backward_launcher() {
  return {[] {
            cuda::allow_shared(ssd_states_kernel<kStates, false, false>, SsdLayout<kStates, false>::kSharedBytes);
            cuda::allow_shared(ssd_states_kernel<kStates, false, true>, ChunkStateTiles<kStates>::kSharedBytes);
            cuda::allow_shared(ssd_states_kernel<kStates, true, false>, SsdLayout<kStates, false>::kSharedBytes);
            cuda::allow_shared(ssd_states_kernel<kStates, true, true>, ChunkStateTiles<kStates>::kSharedBytes);
            cuda::allow_shared(ssd_gated_gradients_kernel<kStates>, GatedGradientTiles<kStates>::kSharedBytes);
            cuda::allow_shared(ssd_rows_kernel<kStates>, HopperRowsShape<kStates>::kSharedBytes);
            cuda::allow_shared(ssd_gate_kernel<kStates>, gate_gradient_bytes<kStates>());
          },
          [](const cuda::SsdStatesParams& params, bool reversed, int multiprocessors, cudaStream_t stream) {
            launch_states<kStates, false>(params, reversed, params.scan.segments, multiprocessors, stream);
          },
          launch_gated_gradients<kStates>,
          launch_states<kStates, true>,
          launch_rows<kStates>,
          launch_gate<kStates>};
}

}  // namespace ringattn::sm90
