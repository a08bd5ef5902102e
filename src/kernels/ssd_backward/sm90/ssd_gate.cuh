// SPDX-License-Identifier: Apache-2.0
// Gradient of the gate on Hopper: dz = dy · (S · C + D · x) · silu'(z), by the output kernel of sm90_ssd
// (ssm/sm90/ssd_output.cuh), which computes the states of chunks again. Rounding is that of sm90_ssd.
#pragma once

#include "kernels/ssd_backward/cuda/ssd_backward_params.hpp"
#include "kernels/ssm/sm90/ssd_output.cuh"

namespace ringattn::sm90 {

struct HopperSsdGate {
  HopperSsd ssd;  // y is dz
  SsdGateGradient gradient;
  std::int32_t first_segment;  // of the launch
};
static_assert(sizeof(HopperSsdGate) <= 4096, "kernel arguments are at most 4 KiB");

template <int kStates>
__global__ void __launch_bounds__(kSsdThreads, 1) ssd_gate_kernel(const __grid_constant__ HopperSsdGate p) {
  extern __shared__ unsigned char ssd_shared[];
  const DimBlockCta cta_work = dim_block_cta(p.ssd.scan, p.ssd.blocks, static_cast<int>(blockIdx.x));
  compute_outputs<kStates, true>(p.ssd, SsdMemory<kStates, true>(ssd_shared),
                                 SsdChunks(p.ssd.scan, cta_work, p.first_segment, false), &p.gradient);
}

}  // namespace ringattn::sm90
