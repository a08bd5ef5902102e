// SPDX-License-Identifier: Apache-2.0
// Launches of sm90_ssd for one state_dim. kernels/instances.cmake lists its instantiations.
#pragma once

#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/ssm/sm90/ssd_output.cuh"

namespace ringattn::sm90 {

// Describes a tensor [rows, heads, columns]. The stride of a dimension of size 1 has no meaning, but a tensor map needs
// a valid one.
inline MappedTensor mapped(const void* data, std::int64_t token_stride, std::int64_t head_stride, std::int64_t rows,
                           std::int64_t heads, std::int64_t columns) {
  return {data, rows, heads, columns, rows == 1 ? columns : token_stride, heads == 1 ? columns : head_stride};
}

// Makes a tensor map if TMA can access the tensor.
inline bool map_ssd(const MappedTensor& tensor, int columns, CUtensorMap& map) {
  if (!can_map(tensor)) return false;
  map = map_tensor(tensor, Dtype::kBf16, kChunk, columns);
  return true;
}

template <int kStates>
HopperSsd map_task(const SsmParams& s, int multiprocessors) {
  HopperSsd p{};
  p.scan = s;
  p.blocks = deal_dim_blocks(s, s.head_dim / kDimBlockDims, multiprocessors);
  std::int64_t rows = 0;
  for (int run = 0; run < s.run_count; ++run) rows = std::max(rows, s.runs[run].row + s.runs[run].tokens);
  const auto mapped_input = [rows](const SsmTensor& tensor, std::int64_t heads, std::int64_t columns) {
    return mapped(tensor.data, tensor.token_stride, tensor.head_stride, rows, heads, columns);
  };
  const int groups = s.heads / s.group_heads;
  p.maps_x = map_ssd(mapped_input(s.x, s.heads, s.head_dim), kDimBlockDims, p.x);
  p.maps_b = map_ssd(mapped_input(s.b, groups, kStates), kStates, p.b);
  p.maps_c = map_ssd(mapped_input(s.c, groups, kStates), kStates, p.c);
  p.maps_y = map_ssd(mapped(s.y, s.y_token_stride, s.y_head_stride, rows, s.heads, s.head_dim), kDimBlockDims, p.y);
  return p;
}

template <int kStates, bool kOutputs>
constexpr auto ssd_kernel() {
  if constexpr (kOutputs) {
    return &ssd_finish_kernel<kStates>;
  } else {
    return &ssd_state_kernel<kStates>;
  }
}

// Allows the kernel its dynamic shared memory, which is above the default limit.
template <int kStates, bool kOutputs>
void load_ssd() {
  check_cuda(cudaFuncSetAttribute(ssd_kernel<kStates, kOutputs>(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  SsdLayout<kStates, kOutputs>::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <int kStates, bool kOutputs>
void launch_ssd(const SsmParams& scan, int multiprocessors, cudaStream_t stream) {
  const HopperSsd params = map_task<kStates>(scan, multiprocessors);
  const auto ctas =
      static_cast<unsigned>(params.blocks.threes + params.blocks.shorts) * static_cast<unsigned>(scan.segments);
  ssd_kernel<kStates, kOutputs>()<<<ctas, kSsdThreads, SsdLayout<kStates, kOutputs>::kSharedBytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "sm90_ssd");
}

template <int kStates>
constexpr HopperSsdLauncher ssd_launcher() {
  return {[] {
            load_ssd<kStates, false>();
            load_ssd<kStates, true>();
          },
          launch_ssd<kStates, false>, launch_ssd<kStates, true>};
}

}  // namespace ringattn::sm90
